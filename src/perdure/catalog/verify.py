"""Is what lies there what was written? Three depths: structure, headers, and with `read_data` every byte.

Never modifies anything, needs neither the model nor the ranks, and goes on after a problem, so that one
bad file doesn't hide the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from perdure.catalog.choose import locate
from perdure.catalog.foreign import recognise
from perdure.catalog.read import IterationContent, ShardFiles, read_checked, read_common, read_metadata
from perdure.catalog.report import Problem, Report, problem_of
from perdure.catalog.root import Iteration, Root, read_commit
from perdure.catalog.verify_foreign import verify_foreign
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError
from perdure.format.commit import CommitRecord
from perdure.format.digest import BLOCK
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, Section, ShardRecord, TensorRecord
from perdure.format.names import COMMIT, COMMON, METADATA, TRACKER, parse_iteration_dirname, path_text
from perdure.storage.base import Directory, Storage

__all__ = ["Problem", "Report", "check_data", "verify"]

Progress = Callable[[int, int], None]
"""Called with (bytes checked, bytes in all)."""


def verify(
    path: str | os.PathLike[str],
    *,
    read_data: bool = False,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Report:
    """Checks one iteration, or a whole root; of another program's what can be checked (`verify_foreign`).

    Args:
        path: an iteration directory, or a root with everything in it.
        read_data: read every byte of every tensor too; 8 MiB of memory, whatever the size.
        progress: called as data are read.

    Raises:
        CheckpointNotFoundError: nothing to verify is there.
        FormatTooNewError: the iteration asked for was written by a newer version.
        OSError: the root itself could not be read.
    """
    full = os.path.normpath(path_text(path))
    kind = recognise(full, storage)
    if kind is not None:
        return verify_foreign(full, kind, read_data=read_data, storage=storage, progress=progress)
    report = Report(full)
    if parse_iteration_dirname(os.path.basename(os.path.abspath(full))) is not None and os.path.isdir(full):
        root = Root(os.path.dirname(os.path.abspath(full)), storage)
        names = [os.path.basename(os.path.abspath(full))]
    else:
        root = Root(full, storage)
        names = _look_at_root(root, report)
    total = sum(_data_bytes(root, name) for name in names) if read_data else 0
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report.bytes_read = done
        if progress is not None:
            progress(done, total)

    for name in names:
        report.iterations.append(name)
        report.problems.extend(_check_iteration(root, name, read_data, advance))
    return report


def _look_at_root(root: Root, report: Report) -> list[str]:
    """Names of the directories in a root to check; faults of the root itself go into the report."""
    listing = root.listing()
    if not listing.iterations and not any(u.kind in ("damaged", "no-commit", "too-new") for u in listing.uncommitted):
        locate(root.path, root.storage)
        raise CheckpointNotFoundError(f"{root.path} holds no committed iteration")
    for entry in listing.uncommitted:
        if entry.kind in ("no-commit", "damaged", "too-new", "foreign"):
            file = COMMIT if entry.kind != "foreign" else ""
            hint = entry.error.hint if entry.error is not None and entry.error.hint else ""
            if entry.kind in ("no-commit", "damaged"):
                hint = hint or "it is never loaded; move it away, or restore it from a copy"
            report.problems.append(Problem(root.join(entry.name), file, "", f"{entry.name}: {entry.why}", hint=hint))
        else:
            report.notes.append(f"{entry.name}: {entry.why}; it is cleaned when the run is started again")
    report.problems.extend(_check_tracker(root, listing.iterations, report))
    return [i.dirname for i in listing.iterations]


def _check_tracker(root: Root, iterations: list[Iteration], report: Report) -> Iterator[Problem]:
    tracker = root.tracker()
    if tracker.state == "missing":
        report.notes.append(f"there is no {TRACKER}; a resume takes the newest committed iteration")
    elif tracker.iteration is None or all(i.iteration != tracker.iteration for i in iterations):
        names = ", ".join(str(i.iteration) for i in iterations[-5:]) or "none"
        yield Problem(
            root.path,
            TRACKER,
            "",
            f"{root.join(TRACKER)} names no committed iteration",
            expected=f"one of {names}",
            found=repr(tracker.text),
            hint=f"perdure rewind {root.path} --to N points it at a committed one",
        )


def _data_bytes(root: Root, name: str) -> int:
    try:
        with root.storage.open_directory(root.join(name)) as directory:
            commit = read_commit(directory)
            return 0 if commit is None else sum(f.size for f in read_metadata(directory, commit).files)
    except (OSError, DamagedCheckpointError, FormatTooNewError):
        return 0


def _check_iteration(root: Root, name: str, read_data: bool, advance: Callable[[int], None]) -> Iterator[Problem]:
    path = root.join(name)
    try:
        directory = root.storage.open_directory(path)
    except OSError as error:
        yield Problem(path, "", "", f"{path} cannot be opened: {error.strerror}")
        return
    with directory:
        try:
            commit = read_commit(directory)
        except (DamagedCheckpointError, OSError) as error:
            yield problem_of(path, error, COMMIT)
            return
        if commit is None:
            yield Problem(path, COMMIT, "", f"{os.path.join(path, COMMIT)}: missing; the iteration is not committed")
            return
        number = parse_iteration_dirname(name)
        if number is not None and number != commit.iteration:
            what = f"{path}: its {COMMIT} was written for iteration {commit.iteration}"
            yield Problem(path, COMMIT, "", what, expected=str(number), found=str(commit.iteration))
        yield from _check_content(directory, commit, read_data, advance)


def _check_content(
    directory: Directory, commit: CommitRecord, read_data: bool, advance: Callable[[int], None]
) -> Iterator[Problem]:
    path = directory.path
    try:
        common = read_common(directory, commit)
    except (DamagedCheckpointError, OSError) as error:
        common = None
        yield problem_of(path, error, COMMON)
    if common is not None and common.global_step != commit.iteration:
        what = f"{os.path.join(path, COMMON)}: global_step is not that of the iteration"
        yield Problem(path, COMMON, "", what, expected=str(commit.iteration), found=str(common.global_step))
    try:
        metadata = read_metadata(directory, commit)
    except (DamagedCheckpointError, OSError) as error:
        yield problem_of(path, error, METADATA)
        return
    yield from _check_names(directory, commit, metadata)
    with ShardFiles(directory, metadata, commit) as files:
        sound: set[int] = set()
        for index, record in enumerate(metadata.files):
            try:
                header = files.header(index)
            except (DamagedCheckpointError, OSError) as error:
                yield problem_of(path, error, record.name)
                continue
            sound.add(index)
            for key in sorted(set(header.entries) - files.keys(index))[:5]:
                what = f"{files.path(index)}: {key[:300]}: in the file, but not in {METADATA}"
                yield Problem(path, record.name, key, what)
        if read_data:
            yield from _check_shards(files, metadata, sound, advance)


def _check_names(directory: Directory, commit: CommitRecord, metadata: CheckpointMetadata) -> Iterator[Problem]:
    path = directory.path
    known = {COMMIT, METADATA, COMMON, *(f.name for f in metadata.files)}
    for name in directory.names():
        if name not in known:
            what = f"{os.path.join(path, name)}: not a file of this checkpoint"
            yield Problem(path, name, "", what, hint="move it elsewhere; nothing here is ever added after the commit")
    try:
        size = len(read_checked(directory, METADATA, "", commit.size)) + len(
            read_checked(directory, COMMON, "", commit.size)
        )
    except (DamagedCheckpointError, OSError):
        return
    size += sum(f.size for f in metadata.files)
    if size != commit.size:
        what = f"{path}: {METADATA} accounts for another number of bytes than {COMMIT}"
        yield Problem(path, METADATA, "", what, expected=str(commit.size), found=str(size))


def check_data(
    files: ShardFiles,
    content: IterationContent,
    indices: Iterable[int],
    progress: Callable[[int], None] | None = None,
) -> Iterator[Problem]:
    """Reads every shard of some files of an iteration, in file order, and compares every block with its digest."""
    yield from _check_shards(files, content.metadata, set(indices), progress or (lambda count: None))


def _check_shards(
    files: ShardFiles, metadata: CheckpointMetadata, indices: set[int], advance: Callable[[int], None]
) -> Iterator[Problem]:
    placed: list[tuple[int, int, Section, str, TensorRecord, ShardRecord]] = []
    for section, name, tensor in metadata.tensors():
        for shard in tensor.shards:
            if shard.file in indices:
                entry = files.header(shard.file).entries.get(shard.key or name)
                placed.append((shard.file, entry.begin if entry else 0, section, name, tensor, shard))
    placed.sort(key=lambda p: (p[0], p[1]))
    buffer = memoryview(bytearray(BLOCK))
    for _, _, section, name, tensor, shard in placed:
        yield from _check_shard(files, section, name, tensor, shard, buffer, advance)


def _check_shard(
    files: ShardFiles,
    section: Section,
    name: str,
    tensor: TensorRecord,
    shard: ShardRecord,
    buffer: memoryview,
    advance: Callable[[int], None],
) -> Iterator[Problem]:
    path, file = files.directory.path, files.metadata.files[shard.file].name
    where = f"{os.path.join(path, file)}: {name[:300]}"
    size = shard.box.numel * BY_SAFETENSORS[tensor.dtype].itemsize
    blocks = shard.blocks or (shard.digest,)
    try:
        for number, (start, count, found) in enumerate(files.block_digests(section, name, tensor, shard, buffer)):
            advance(count)
            expected = blocks[number]
            if expected and found != expected:
                block = f" in bytes {start} to {start + count} of {size}" if shard.blocks else ""
                yield Problem(
                    path,
                    file,
                    name,
                    f"{where}: not what was written{block} ({section})",
                    expected=expected,
                    found=found,
                    hint="restore the file from a copy; a resume goes back to the parent iteration by itself",
                )
    except EOFError as error:
        yield Problem(path, file, name, f"{where}: {error}")
    except (DamagedCheckpointError, OSError) as error:
        yield problem_of(path, error, file, name)
