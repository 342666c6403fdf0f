"""One save, from named tensors to a committed iteration.

`prepare` reads the live objects (collectively); `SaveJob.run` needs them no more, makes no collective,
and may run in the background. Ranks tell rank 0 what they wrote by part records in the partial
directory; rank 0 compares them with the plan and publishes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import msgspec
from torch import Tensor

from perdure import __version__
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import Staging, discard, publish
from perdure.catalog.root import Root
from perdure.engine.filing import ShardFile, Slot
from perdure.engine.launcher import deadline_told
from perdure.engine.linked import FROZEN, Linkable
from perdure.engine.plan import SavePlan, ShardId
from perdure.engine.ranks import Ranks
from perdure.engine.staging import Staging as Snapshot
from perdure.engine.streams import devices_of, settle
from perdure.engine.writer import FileWrite, WriteBuffers
from perdure.errors import PerdureError, SaveError
from perdure.format.collector import collector_paused
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.jsonio import decode, encode
from perdure.format.metadata import SECTIONS, CheckpointMetadata, FileRecord, Section, ShardRecord, TensorRecord
from perdure.format.names import iteration_dirname, part_filename, shard_filename, temporary_name
from perdure.state.shards import NamedTensor

__all__ = ["Identity", "SaveJob"]

_KIND: dict[Section, str] = {"model": "model", "optimizer": "opt", "extra": "extra"}
_PART_LIMIT = 1 << 30
SAVE_DEADLINE_S = deadline_told("PERDURE_SAVE_DEADLINE", 3600)
_PATIENCE_S = 10.0  # for the parts of a save under way when some rank has failed


@dataclass(frozen=True)
class Identity:
    """Which save this is: its number in its lineage, what it descends from, and whose it is."""

    lineage: str
    sequence: int
    parent: int
    attempt: str

    @property
    def mark(self) -> str:
        """What every shard file of the save carries."""
        return f"{self.lineage}-{self.sequence}"


class Part(msgspec.Struct, kw_only=True):
    """What one rank wrote, or why it could not: (section number, tensor name, shard) triples, files by index."""

    rank: int
    files: list[FileRecord] = []
    shards: list[tuple[int, str, ShardRecord]] = []
    error: str = ""


@dataclass(frozen=True)
class _File:
    """A file of this rank's on its way, or linked from an earlier save."""

    shards: ShardFile
    write: FileWrite
    link: Linkable | None = None


@dataclass
class SaveJob:
    """Everything that a save needs once the live objects have been read."""

    root: Root
    staging: Staging
    identity: Identity
    plan: SavePlan
    rank: int
    ranks: int
    prefix: str
    files: InitVar[Sequence[ShardFile]]
    tensors: InitVar[Sequence[NamedTensor]]
    common: CommonInfo
    training: dict[str, Any]
    lock: RootLock | None
    before_commit: Callable[[], tuple[int, str]] = field(default=lambda: (0, ""))
    warn: Callable[[str], None] = field(default=lambda text: None)
    peers: Ranks | None = None
    links: Mapping[str, Linkable] = field(default_factory=dict)

    def __post_init__(self, files: Sequence[ShardFile], tensors: Sequence[NamedTensor]) -> None:
        self.linkable: dict[str, Linkable] = {}
        self._cuda = devices_of(piece.tensor for tensor in tensors for piece in tensor.pieces)
        self._files = [self._file(file, file.contents(tensors)) for file in files]
        settle(self._cuda)
        self._early: Exception | None = None

    def stage(self, snapshot: Snapshot, buffers: Callable[[], WriteBuffers]) -> None:
        """Needs the live objects no more: copies what the snapshot has memory for, writes the rest at once.

        What the storage refuses meanwhile is raised by `run`, as anywhere else in the save.
        """
        written = [file for file in self._files if file.link is None]
        snapshot.snapshot([file.write for file in written], cuda=self._cuda)
        try:
            for file in written:
                if file.write.cut:
                    file.write.write_live(self.root.storage, self._path(file), buffers())
        except Exception as error:
            self._early = error

    def run(self, buffers: WriteBuffers) -> CommitRecord | None:
        """Writes this rank's files; on rank 0 then waits for the others and publishes.

        Raises:
            SaveError: the save failed; what was committed before is untouched.
        """
        part = Part(rank=self.rank)
        try:
            self._write_files(part, buffers)
        except BaseException as error:
            for file in self._files:
                file.write.abort()
            part = Part(rank=self.rank, error=_describe(error))
            self._report(part, quietly=True)
            if self.rank == 0:
                discard(self.staging)
            if not isinstance(error, Exception):
                raise
            raise self._failed(error) from error
        if self.rank != 0:
            self._report(part)
            return None
        try:
            parts = [part, *(self._await_part(rank) for rank in range(1, self.ranks))]
            metadata = self._merge(parts)
            ledger_bytes, ledger_digest = self.before_commit()
            commit: CommitRecord = publish(
                self.staging,
                metadata,
                self.common,
                lineage=self.identity.lineage,
                parent=self.identity.parent,
                attempt=self.identity.attempt,
                ranks=self.ranks,
                writer=f"perdure {__version__}",
                ledger_bytes=ledger_bytes,
                ledger_digest=ledger_digest,
                lock=self.lock,
                warn=self.warn,
            )
            return commit
        except PerdureError as error:
            discard(self.staging)
            if isinstance(error, SaveError):
                raise
            raise self._failed(error) from error
        except OSError as error:
            discard(self.staging)
            raise self._failed(error) from error

    def _file(self, file: ShardFile, contents: dict[str, Tensor]) -> _File:
        """A file to be written; or one of frozen weights that has its name already, as nothing in it has changed."""
        name = shard_filename(self.prefix + FROZEN * file.kept, _KIND[file.section], self.rank, self.ranks)
        text = {"format": "pt", "save": self.identity.mark, "rank": str(self.rank)}
        found = _File(file, FileWrite(name, file.layout, contents.__getitem__, text))
        before = self.links.get(name) if file.kept else None
        if before is not None:
            held = [(s.key, s.shard.name, s.dtype, *s.shard.box, contents[s.key]) for s in file.slots]
            if before.holds(held) and before.link(self.root.storage, self._path(found)):
                return replace(found, link=before)
        return found

    def _path(self, file: _File) -> str:
        return os.path.join(self.staging.path, file.write.name)

    def _write_files(self, part: Part, buffers: WriteBuffers) -> None:
        if self._early is not None:
            raise self._early
        for file in self._files:
            number = SECTIONS.index(file.shards.section)
            if file.link is not None:
                part.shards += [(number, name, record) for name, record in file.link.records(len(part.files))]
                part.files.append(file.link.record)
                self.linkable[file.write.name] = replace(file.link, path=self._final(file))
                continue
            written = file.write.run(self.root.storage, self._path(file), buffers)
            records = [self._record(slot, len(part.files), *written.digests[slot.key]) for slot in file.shards.slots]
            part.shards += [(number, s.shard.name, r) for s, r in zip(file.shards.slots, records, strict=True)]
            part.files.append(written.record)
            if file.shards.kept:
                self.linkable[file.write.name] = self._linkable(file, written.record, records)

    @staticmethod
    def _record(slot: Slot, file: int, digest: str, blocks: tuple[str, ...]) -> ShardRecord:
        (offset, shape), name = slot.shard.box, slot.shard.name
        return ShardRecord(file, offset, shape, digest, blocks, "" if slot.key == name else slot.key)

    def _final(self, file: _File) -> str:
        return os.path.join(self.root.join(iteration_dirname(self.common.global_step)), file.write.name)

    def _linkable(self, file: _File, record: FileRecord, shards: Sequence[ShardRecord]) -> Linkable:
        """A file just written, as the next save may link it once this one is committed."""
        rows = {s.key: (s.shard.name, s.dtype, shard) for s, shard in zip(file.shards.slots, shards, strict=True)}
        return Linkable(self._final(file), msgspec.structs.replace(record, save=self.identity.mark), rows)

    def _report(self, part: Part, quietly: bool = False) -> None:
        """Puts this rank's part record where rank 0 looks for it, in one step."""
        if self.rank == 0:
            return
        name = part_filename(self.rank)
        temporary = os.path.join(self.staging.path, temporary_name(name))
        try:
            self.root.storage.write(temporary, encode(part))
            self.root.storage.rename(temporary, os.path.join(self.staging.path, name))
        except OSError as error:
            if not quietly:
                raise self._failed(error) from error
            if self.peers is not None:
                self.peers.post(self._failure_of(self.rank), part.error)

    def _failure_of(self, rank: int) -> str:
        return f"save/{self.identity.attempt}-{self.identity.sequence}/{rank}"

    def _await_part(self, rank: int) -> Part:
        path = os.path.join(self.staging.path, part_filename(rank))
        deadline, pause = time.monotonic() + SAVE_DEADLINE_S, 0.001
        while True:
            try:
                part: Part = decode(self.root.storage.read(path, _PART_LIMIT), Part, path)
                break
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise SaveError(
                        f"step {self.common.global_step}: rank {rank} did not finish writing its part within "
                        f"{SAVE_DEADLINE_S:g} s"
                    ) from None
                time.sleep(pause)
                pause = min(pause * 1.5, 0.1)
                if pause == 0.1 and self.peers is not None:
                    self.peers.check(after_s=_PATIENCE_S)
                    # The storage that a rank could not write to doesn't take its report either.
                    if told := self.peers.posted(self._failure_of(rank)):
                        part = Part(rank=rank, error=told)
                        break
        if part.error:
            raise SaveError(f"step {self.common.global_step} could not be saved: rank {rank}: {part.error}")
        self.root.storage.unlink(path)
        return part

    @collector_paused()
    def _merge(self, parts: Sequence[Part]) -> CheckpointMetadata:
        """The parts as one record, compared with the plan shard by shard."""
        metadata = CheckpointMetadata(training=self.training)
        for (section, name), layout in self.plan.tensors.items():
            record = TensorRecord(layout.dtype, layout.shape, [], layout.logical, layout.aliases)
            metadata.section(section)[name] = record
        for rank, part in enumerate(parts):
            written = {ShardId(SECTIONS[number], name, shard.box) for number, name, shard in part.shards}
            planned = set(self.plan.writes_of(rank))
            if written != planned or len(part.shards) != len(planned):
                raise SaveError(f"rank {rank} wrote {len(part.shards)} shards where the plan has {len(planned)}")
            first = len(metadata.files)
            metadata.files.extend(part.files)
            for number, name, shard in part.shards:
                moved = msgspec.structs.replace(shard, file=first + shard.file) if first else shard
                metadata.section(SECTIONS[number])[name].shards.append(moved)
        return metadata

    def _failed(self, error: Exception) -> SaveError:
        told = f"step {self.common.global_step} could not be saved below {self.root.path}: {_describe(error)}"
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return SaveError(told)
        with contextlib.suppress(OSError):
            free = self.root.storage.free_bytes(self.root.path)
            told += f"; the save takes {self.plan.total_bytes} bytes, and {free} are free now"
        return SaveError(told, hint="free some space, or save elsewhere: checkpoint.save_path")


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = error.message if isinstance(error, PerdureError) else str(error)
    return text or type(error).__name__
