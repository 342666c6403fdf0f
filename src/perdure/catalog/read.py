"""What one iteration holds: its three JSON files checked against each other, and its shard files opened.

Everything is read by one handle of the directory, so that a replacement meanwhile can't mix two writings.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from perdure.catalog.root import GONE, NOT_A_FILE, read_commit
from perdure.errors import DamagedCheckpointError
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.digest import BLOCK, digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, FileRecord, Section, ShardRecord, TensorRecord
from perdure.format.names import COMMIT, COMMON, METADATA, parse_shard_filename
from perdure.format.safetensors import Header, header_length, parse_header
from perdure.storage.base import Directory, FileReader

__all__ = [
    "IterationContent",
    "ShardFiles",
    "open_shards",
    "read_checked",
    "read_common",
    "read_header",
    "read_iteration",
    "read_metadata",
    "save_tag",
]

_COMMON_LIMIT = 1 << 20
_METADATA_LIMIT = 2 << 30


class IterationContent(NamedTuple):
    """An iteration's commit.json, metadata.json and common.json."""

    commit: CommitRecord
    metadata: CheckpointMetadata
    common: CommonInfo


def save_tag(commit: CommitRecord) -> str:
    """What every shard of a save says in its header: `<lineage>-<seq>`."""
    return f"{commit.lineage}-{commit.sequence}"


def read_iteration(directory: Directory, verify: bool = True) -> IterationContent:
    """Reads and checks the JSON files of a committed iteration.

    Args:
        directory: the iteration's open directory.
        verify: check digests and look into the metadata deeply; False only decodes.

    Raises:
        DamagedCheckpointError: a file is missing or isn't what was written; the file is named.
        FormatTooNewError: a newer version wrote it.
        OSError: the storage failed, which is not damage.
    """
    commit = read_commit(directory)
    if commit is None:
        raise DamagedCheckpointError(
            f"{os.path.join(directory.path, COMMIT)}: missing; the iteration is not committed", file=COMMIT
        )
    metadata = read_metadata(directory, commit, verify)
    common = read_common(directory, commit, verify)
    if verify and common.global_step != commit.iteration:
        path = os.path.join(directory.path, COMMON)
        raise DamagedCheckpointError(
            f"{path}: global_step {common.global_step}, but iteration {commit.iteration} was committed", file=path
        )
    return IterationContent(commit, metadata, common)


def read_metadata(directory: Directory, commit: CommitRecord, verify: bool = True) -> CheckpointMetadata:
    """metadata.json of a committed iteration; errors as of `read_iteration`."""
    path = os.path.join(directory.path, METADATA)
    # It counts among the committed bytes: a larger file is not the one that was written.
    limit = min(_METADATA_LIMIT, commit.size)
    metadata = CheckpointMetadata.decode(
        read_checked(directory, METADATA, commit.metadata_digest if verify else "", limit), path
    )
    if verify:
        metadata.check(path)
    return metadata


def read_common(directory: Directory, commit: CommitRecord, verify: bool = True) -> CommonInfo:
    """common.json of a committed iteration; errors as of `read_iteration`."""
    data = read_checked(directory, COMMON, commit.common_digest if verify else "", _COMMON_LIMIT)
    return CommonInfo.decode(data, os.path.join(directory.path, COMMON))


def read_checked(directory: Directory, name: str, digest: str, limit: int) -> bytes:
    """A small file whose bytes must have `digest` (any, when that is empty).

    Raises:
        DamagedCheckpointError: missing, not a plain file, over `limit`, or other bytes.
    """
    path = os.path.join(directory.path, name)
    try:
        data = directory.read(name, limit)
    except EOFError as error:
        raise DamagedCheckpointError(f"{path}: {error}", file=path) from None
    except OSError as error:
        raise _damage_or(error, path) from None
    if digest and digest_bytes(data) != digest:
        raise DamagedCheckpointError(
            f"{path}: not what was written: its digest is {digest_bytes(data)}, {digest} was committed", file=path
        )
    return data


def read_header(reader: FileReader, record: FileRecord, path: str) -> tuple[Header, str]:
    """A shard file's header, and its digest as found, checked for size and shape but not yet against anything.

    Raises:
        DamagedCheckpointError: the file has another size, or no valid header.
    """
    if record.size and reader.size != record.size:
        raise DamagedCheckpointError(
            f"{path}: {reader.size} bytes on disk, {record.size} were written",
            file=path,
            hint="the file was cut or grown, or is another one",
        )
    data = _raw_header(reader, path)
    return parse_header(data, reader.size, path), digest_bytes(data)


class ShardFiles:
    """The shard files of one iteration: each opened once, on first use, its header checked against the metadata.

    Used by the reader of tensors and by verify alike. Closing it leaves the directory open.

    Args:
        directory: the iteration's open directory.
        metadata: its metadata.json.
        commit: its commit.json; None for a checkpoint made by others, whose headers carry no mark of a save.
        verify: check headers against digests and the save's mark.
    """

    def __init__(
        self, directory: Directory, metadata: CheckpointMetadata, commit: CommitRecord | None, verify: bool = True
    ) -> None:
        self.directory, self.metadata, self.commit = directory, metadata, commit
        self._verify = verify
        self._open: dict[int, tuple[FileReader, Header]] = {}
        self._lock = threading.Lock()
        self._expected: dict[int, list[tuple[Section, str, str, str, tuple[int, ...]]]] = {}
        for section, name, tensor in metadata.tensors():
            for shard in tensor.shards:
                entry = (section, name, shard.key or name, tensor.dtype, shard.shape)
                self._expected.setdefault(shard.file, []).append(entry)

    def path(self, index: int) -> str:
        """The path of file number `index` of the metadata."""
        return os.path.join(self.directory.path, self.metadata.files[index].name)

    def file_name(self, shard: ShardRecord) -> str:
        """The path of the file that holds a shard."""
        return self.path(shard.file)

    def locate(self, section: Section, name: str, shard: ShardRecord) -> tuple[FileReader, int]:
        """The open file that holds a shard, and the absolute offset of the shard's first byte.

        Raises:
            DamagedCheckpointError: the file or its header isn't what was written.
            OSError: the storage failed.
        """
        reader, header = self._file(shard.file)
        entry = header.entries.get(shard.key or name)
        if entry is None:
            raise self._missing_entry(shard.file, section, name)
        return reader, header.data_start + entry.begin

    def block_digests(
        self, section: Section, name: str, tensor: TensorRecord, shard: ShardRecord, buffer: memoryview
    ) -> Iterator[tuple[int, int, str]]:
        """(first byte, bytes, digest) of every block of a shard, as its file holds it; an empty one has one block.

        Args:
            buffer: room for a block.

        Raises:
            DamagedCheckpointError: the file or its header isn't what was written.
            EOFError: the file is shorter than it says.
            OSError: the storage failed.
        """
        size = shard.box.numel * BY_SAFETENSORS[tensor.dtype].itemsize
        reader, offset = self.locate(section, name, shard)
        for start in range(0, max(size, 1), BLOCK):
            piece = buffer[: min(BLOCK, size - start)]
            reader.pread_into(piece, offset + start)
            yield start, len(piece), digest_bytes(piece)

    def header(self, index: int) -> Header:
        """The checked header of file number `index`."""
        return self._file(index)[1]

    def size(self, index: int) -> int:
        """Bytes of file number `index`, as found when it was opened."""
        return self._file(index)[0].size

    def keys(self, index: int) -> set[str]:
        """The keys that the metadata expects in file number `index`."""
        return {key for _, _, key, _, _ in self._expected.get(index, ())}

    def check(self) -> None:
        """Opens every file and checks its header, so that nothing is read of an iteration that isn't whole."""
        for index in range(len(self.metadata.files)):
            self._file(index)

    def close(self) -> None:
        """Closes the files."""
        with self._lock:
            for reader, _ in self._open.values():
                reader.close()
            self._open.clear()

    def __enter__(self) -> ShardFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, index: int) -> tuple[FileReader, Header]:
        held = self._open.get(index)
        if held is None:
            with self._lock:
                held = self._open.get(index)
                if held is None:
                    held = self._open[index] = self._open_file(index)
        return held

    def _open_file(self, index: int) -> tuple[FileReader, Header]:
        record, path = self.metadata.files[index], self.path(index)
        try:
            reader = self.directory.open(record.name)
        except OSError as error:
            raise _damage_or(error, path) from None
        try:
            try:
                header, digest = read_header(reader, record, path)
            except DamagedCheckpointError as error:
                raise self._explained(error, reader, record, path) from None
            if self._verify and record.header and digest != record.header:
                damage = DamagedCheckpointError(f"{path}: its header is not what was written", file=path)
                raise self._explained(damage, reader, record, path)
            self._check_header(index, header, path)
        except BaseException:
            reader.close()
            raise
        return reader, header

    def _check_header(self, index: int, header: Header, path: str) -> None:
        record = self.metadata.files[index]
        expected = record.save or (save_tag(self.commit) if self.commit is not None else "")
        if self._verify and self.commit is not None and header.text.get("save") != expected:
            raise DamagedCheckpointError(
                f"{path}: belongs to save {header.text.get('save', '(none)')[:120]}, this iteration is {expected}",
                file=path,
                hint="the file was taken from another step or run",
            )
        shard_name = parse_shard_filename(record.name)
        rank = header.text.get("rank")
        if self._verify and self.commit is not None and shard_name is not None and rank != str(shard_name.rank):
            raise DamagedCheckpointError(
                f"{path}: written by rank {str(rank)[:40]}, its name says rank {shard_name.rank}", file=path
            )
        for section, name, key, dtype, shape in self._expected.get(index, ()):
            entry = header.entries.get(key)
            if entry is None:
                raise self._missing_entry(index, section, name)
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise DamagedCheckpointError(
                    f"{path}: {name[:300]}: {entry.dtype} {list(entry.shape)} in the file, {dtype} {list(shape)} in "
                    f"{METADATA}",
                    file=path,
                    tensor=name,
                )

    def _missing_entry(self, index: int, section: Section, name: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self.path(index)}: {name[:300]}: {METADATA} says its {section} shard is here, but the header lacks it",
            file=self.path(index),
            tensor=name,
        )

    def _explained(
        self, damage: DamagedCheckpointError, reader: FileReader, record: FileRecord, path: str
    ) -> DamagedCheckpointError:
        """The same damage with its likely cause, where the file's header gives one away."""
        try:
            raw = _raw_header(reader, path)
        except (DamagedCheckpointError, OSError):
            return damage
        digest = digest_bytes(raw)
        other = next((f.name for f in self.metadata.files if f.header == digest and f.name != record.name), None)
        if other is not None:
            return DamagedCheckpointError(
                f"{path}: holds what was written as {other}",
                file=path,
                hint="the two files were swapped or copied",
            )
        try:
            save = parse_header(raw, reader.size, path).text.get("save")
        except DamagedCheckpointError:
            return damage
        expected = record.save or (save_tag(self.commit) if self.commit is not None else save)
        if save is not None and save != expected:
            return DamagedCheckpointError(
                f"{path}: belongs to save {save[:120]}, this iteration is {expected}",
                file=path,
                hint="the file was taken from another step or run",
            )
        return damage


def open_shards(directory: Directory, content: IterationContent, verify: bool = True) -> ShardFiles:
    """The shard files of an iteration that `read_iteration` gave."""
    return ShardFiles(directory, content.metadata, content.commit, verify)


def _raw_header(reader: FileReader, path: str) -> bytes:
    prefix = bytearray(min(8, reader.size))
    try:
        reader.pread_into(memoryview(prefix), 0)
        data = bytearray(header_length(bytes(prefix), reader.size, path))
        reader.pread_into(memoryview(data), 0)
    except EOFError as error:
        raise DamagedCheckpointError(f"{path}: {error}", file=path) from None
    return bytes(data)


def _damage_or(error: OSError, path: str) -> DamagedCheckpointError | OSError:
    """What a failed open means: a missing or impossible file is damage, anything else the storage's failure."""
    if error.errno in GONE:
        return DamagedCheckpointError(f"{path}: missing", file=path)
    if error.errno in NOT_A_FILE:
        what = "a symbolic link, not a file" if error.errno == errno.ELOOP else error.strerror
        return DamagedCheckpointError(f"{path}: {what}", file=path)
    return error
