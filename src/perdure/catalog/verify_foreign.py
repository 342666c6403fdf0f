"""Another program's checkpoint verified: what its own files can show, since it writes no digests.

Structure and headers; whether a full resume would find all that belongs together; and with `read_data` every byte,
where the copies of a piece that several files hold are compared with each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from perdure.catalog.foreign import WRITERS, ForeignContent, ForeignEntry, ForeignKind, ForeignListing, list_foreign
from perdure.catalog.read import ShardFiles
from perdure.catalog.report import Problem, Report, problem_of
from perdure.errors import DamagedCheckpointError
from perdure.format.box import Box
from perdure.format.digest import BLOCK
from perdure.format.mindformers import check_resumable
from perdure.format.names import COMMON, TRACKER
from perdure.storage.base import Storage
from perdure.storage.local import LocalStorage

__all__ = ["verify_foreign"]


def verify_foreign(
    path: str,
    kind: ForeignKind,
    *,
    read_data: bool = False,
    storage: Storage | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Checks a path that `recognise` knows; arguments and result as of `verify`."""
    storage = storage or LocalStorage()
    listing = list_foreign(path, kind, storage)
    report = Report(path)
    named = len(listing.entries) == 1 and os.path.basename(path) == listing.entries[0].dirname
    if kind == "mindformers" and not named:
        _check_tracker(listing, report)
    complete = [(e, e.content) for e in listing.entries if e.content is not None]
    total = sum(r.nbytes * len(r.shards) for _, c in complete for _, _, r in c.metadata.tensors()) if read_data else 0

    def advance(count: int) -> None:
        report.bytes_read += count
        if progress is not None:
            progress(report.bytes_read, total)

    for entry in listing.entries:
        report.iterations.append(entry.dirname)
        where = path if named or kind == "huggingface" else os.path.join(listing.root, entry.dirname)
        if entry.content is None:
            hint = "it is never loaded; move it away, or restore it from a copy"
            report.problems.append(Problem(where, "", "", f"{where}: {entry.why}", hint=hint))
            continue
        report.problems += _check_resume(where, entry, entry.content, report)
        if read_data:
            report.problems += _read_all(storage, where, entry.content, advance)
    if read_data:
        report.notes.append(f"{WRITERS[kind]} writes no digests: bytes were read, and copies of a piece compared")
    else:
        report.notes.append(f"{WRITERS[kind]} writes no digests: a flipped bit in its files is not noticed")
    return report


def _check_tracker(listing: ForeignListing, report: Report) -> None:
    tracker, complete = listing.tracker, listing.complete
    if tracker.state == "missing":
        report.notes.append(f"there is no {TRACKER}; a resume takes the highest complete iteration")
    elif tracker.iteration not in complete:
        names = ", ".join(map(str, complete)) or "none"
        what = f"{os.path.join(listing.root, TRACKER)} names no complete iteration"
        report.problems.append(
            Problem(listing.root, TRACKER, "", what, expected=f"one of {names}", found=repr(tracker.text))
        )
    elif max(complete) != tracker.iteration:
        report.notes.append(
            f"the tracker says {tracker.iteration}, which a resume takes; {max(complete)} is complete too"
        )


def _check_resume(where: str, entry: ForeignEntry, content: ForeignContent, report: Report) -> Iterator[Problem]:
    """What a full resume would refuse although every file is sound."""
    if content.metadata.optimizer:
        try:
            check_resumable(content.metadata, where)
        except DamagedCheckpointError as error:
            yield problem_of(where, error, "")
    if entry.iteration is None or not content.metadata.optimizer:
        report.notes.append(f"{entry.dirname}: no optimizer state; a run can start from its weights only")
    elif content.common is None:
        report.notes.append(f"{entry.dirname}: no {COMMON}; a run can start from its weights only")
    elif content.common.position_unknown:
        report.notes.append(
            f"{entry.dirname}: {COMMON} tells neither batch size nor samples; a run can start from its weights only"
        )


def _read_all(
    storage: Storage, where: str, content: ForeignContent, advance: Callable[[int], None]
) -> Iterator[Problem]:
    buffer = memoryview(bytearray(BLOCK))
    with storage.open_directory(where) as directory, ShardFiles(directory, content.metadata, None) as files:
        for section, name, tensor in content.metadata.tensors():
            seen: dict[Box, tuple[list[str], str]] = {}
            for shard in tensor.shards:
                file = content.metadata.files[shard.file].name
                try:
                    digests = []
                    for _, count, digest in files.block_digests(section, name, tensor, shard, buffer):
                        digests.append(digest)
                        advance(count)
                except (DamagedCheckpointError, OSError) as error:
                    yield problem_of(where, error, file, name)
                    continue
                except EOFError as error:
                    yield Problem(where, file, name, f"{os.path.join(where, file)}: {name[:300]}: {error}")
                    continue
                known, first = seen.setdefault(shard.box, (digests, file))
                if known != digests:
                    what = f"{os.path.join(where, file)}: {name[:300]}: not what {first} holds of the same piece"
                    yield Problem(where, file, name, what, hint="one of the two is damaged; neither says which")
