"""How an iteration becomes visible, in one rename, and what a crash on the way leaves to be cleaned.

Order: files, then common.json, metadata.json and commit.json, each made durable; the directory; one
rename; the root; the tracker. A reader at any instant sees the old truth or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.catalog.lock import RootLock
from perdure.catalog.root import Iteration, Root
from perdure.errors import SaveError
from perdure.format.commit import CommitRecord
from perdure.format.common import HEALTHY, CommonInfo
from perdure.format.digest import digest_bytes
from perdure.format.metadata import CheckpointMetadata
from perdure.format.names import (
    COMMIT,
    COMMON,
    METADATA,
    TRACKER,
    format_tracker,
    iteration_dirname,
    parse_leftover,
    partial_dirname,
    removed_dirname,
    replaced_dirname,
    temporary_name,
)

__all__ = ["Staging", "discard", "publish", "recover", "remove_tree", "set_tracker", "stage"]

_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Staging:
    """A partial directory: where a save is written before it is visible."""

    root: Root
    path: str
    iteration: int
    attempt: str
    sequence: int


def stage(root: Root, iteration: int, attempt: str, sequence: int) -> Staging:
    """Makes the partial directory of a save; a left-over of the same name (a failed try) is cleared first."""
    path = root.join(partial_dirname(iteration, attempt, sequence))
    if root.storage.exists(path):
        remove_tree(root, path)
    root.storage.make_directory(path)
    return Staging(root, path, iteration, attempt, sequence)


def discard(staging: Staging) -> None:
    """Removes a partial directory; what cannot be removed now is at the next start."""
    with contextlib.suppress(OSError):
        remove_tree(staging.root, staging.path)


def publish(
    staging: Staging,
    metadata: CheckpointMetadata,
    common: CommonInfo,
    *,
    lineage: str,
    parent: int,
    attempt: str,
    ranks: int,
    writer: str,
    ledger_bytes: int = 0,
    ledger_digest: str = "",
    lock: RootLock | None = None,
    now: Callable[[], float] = time.time,
) -> CommitRecord:
    """Commits a staged save whose shard files are written, then points the tracker at it.

    Raises:
        SaveError: another process took the root over; or the tracker could not be written although the
            iteration is committed.
        OSError: the storage failed before the commit; nothing is visible then.
    """
    root, storage = staging.root, staging.root.storage
    texts = {COMMON: common.encode(), METADATA: metadata.encode()}
    record = CommitRecord(
        iteration=staging.iteration,
        sequence=staging.sequence,
        lineage=lineage,
        parent=parent,
        attempt=attempt,
        ranks=ranks,
        time=round(now(), 3),
        writer=writer,
        size=sum(f.size for f in metadata.files) + sum(map(len, texts.values())),
        consumed_samples=common.consumed_samples,
        healthy=common.ckpt_status == HEALTHY,
        metadata_digest=digest_bytes(texts[METADATA]),
        common_digest=digest_bytes(texts[COMMON]),
        ledger_bytes=ledger_bytes,
        ledger_digest=ledger_digest,
    )
    encoded = record.encode()
    for name, text in {**texts, COMMIT: encoded}.items():
        storage.write(f"{staging.path}/{name}", text)
    storage.sync_directory(staging.path)
    if lock is not None:
        lock.check()
    _take_name(staging)
    try:
        set_tracker(root, staging.iteration)
    except OSError as error:
        raise SaveError(
            f"step {staging.iteration} is committed, but the tracker {TRACKER} could not be written: {error}",
            hint="free some space and start again: the newest committed iteration is found without the tracker",
        ) from error
    return CommitRecord.decode(encoded)


def _take_name(staging: Staging) -> None:
    """The commit: the partial directory gets the iteration's name."""
    root, storage = staging.root, staging.root.storage
    final = root.join(iteration_dirname(staging.iteration))
    if not storage.exists(final):
        storage.rename(staging.path, final)
        storage.sync_directory(root.path)
        return
    try:
        storage.exchange(staging.path, final)
        storage.sync_directory(root.path)
        old = staging.path
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        old = root.join(replaced_dirname(staging.iteration, staging.sequence))
        storage.rename(final, old)
        storage.sync_directory(root.path)
        storage.rename(staging.path, final)
        storage.sync_directory(root.path)
    with contextlib.suppress(OSError):
        remove_tree(root, old)


def set_tracker(root: Root, iteration: int) -> None:
    """Points the tracker at an iteration, in one step."""
    temporary = root.join(temporary_name(TRACKER))
    root.storage.write(temporary, format_tracker(iteration).encode())
    root.storage.rename(temporary, root.join(TRACKER))
    root.storage.sync_directory(root.path)


def remove_tree(root: Root, path: str) -> None:
    """Deletes a directory of ours, the commit first, so that no half of it is ever taken for whole."""
    storage = root.storage
    try:
        names = storage.list(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda n: (n != COMMIT, n)):
        child = f"{path}/{name}"
        if storage.is_directory(child):
            remove_tree(root, child)
        else:
            with contextlib.suppress(FileNotFoundError):
                storage.unlink(child)
    with contextlib.suppress(FileNotFoundError):
        storage.remove_directory(path)


def remove_iteration(root: Root, iteration: Iteration) -> None:
    """Makes an iteration invisible in one rename, then deletes its files."""
    hidden = root.join(removed_dirname(iteration.iteration, iteration.commit.sequence))
    root.storage.rename(iteration.path, hidden)
    root.storage.sync_directory(root.path)
    remove_tree(root, hidden)


def recover(root: Root, attempt: str) -> list[str]:
    """Cleans what dead attempts left below a root whose lock is held; gives lines worth telling.

    A complete replaced directory without its namesake gets its name back; partial, removed and
    superseded ones go. Only names that we write are touched.
    """
    storage, told = root.storage, []
    names = storage.list(root.path)
    for name in names:
        leftover = parse_leftover(name)
        path = root.join(name)
        if leftover is None or not storage.is_directory(path):
            continue
        final = root.join(iteration_dirname(leftover.iteration))
        try:
            if leftover.why == "replaced" and not storage.exists(final) and storage.exists(f"{path}/{COMMIT}"):
                storage.rename(path, final)
                storage.sync_directory(root.path)
                told.append(f"{iteration_dirname(leftover.iteration)} was being replaced when its run ended: kept")
                continue
            if leftover.why == "partial" and leftover.attempt != attempt:
                # Renamed away first, so that a holder that wakes up cannot publish it.
                hidden = root.join(removed_dirname(leftover.iteration, leftover.sequence))
                if not storage.exists(hidden):
                    storage.rename(path, hidden)
                    path = hidden
            remove_tree(root, path)
        except OSError as error:
            told.append(f"warning: {name}, left over by an earlier run, could not be removed: {error}")
    if temporary_name(TRACKER) in names:
        with contextlib.suppress(OSError):
            storage.unlink(root.join(temporary_name(TRACKER)))
    return told
