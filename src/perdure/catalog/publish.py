"""How an iteration becomes visible, in one rename, and what a crash on the way leaves to be cleaned.

Order: files, then common.json, metadata.json and commit.json, each made durable; the directory; one
rename; the root; the tracker. A reader at any instant sees the old truth or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.catalog.events import end_torn_line
from perdure.catalog.lock import RootLock
from perdure.catalog.root import Root
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

__all__ = ["Staging", "discard", "hide", "publish", "recover", "remove_tree", "set_tracker", "stage"]

_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass
class Staging:
    """A partial directory: where a save is written before it is visible.

    `published` is set once its name may have been given away: from then on the path may hold the
    iteration that was replaced, and `discard` leaves it alone.
    """

    root: Root
    path: str
    iteration: int
    attempt: str
    sequence: int
    published: bool = False


def stage(root: Root, iteration: int, attempt: str, sequence: int) -> Staging:
    """Makes the partial directory of a save; a left-over of the same name (a failed try) is cleared first."""
    path = root.join(partial_dirname(iteration, attempt, sequence))
    if root.storage.exists(path):
        remove_tree(root, path)
    root.storage.make_directory(path)
    return Staging(root, path, iteration, attempt, sequence)


def discard(staging: Staging) -> None:
    """Removes a partial directory that was not published; what cannot be removed now is at the next start."""
    if staging.published:
        return
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
    warn: Callable[[str], None] = lambda text: None,
) -> CommitRecord:
    """Commits a staged save whose shard files are written, then points the tracker at it.

    Raises:
        SaveError: another process took the root over; or the tracker could not be written although the
            iteration is committed.
        OSError: the storage failed before the commit; nothing is visible then.
    """
    root, storage = staging.root, staging.root.storage
    _tidy(staging, metadata)
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
        storage.write(os.path.join(staging.path, name), text)
    storage.sync_directory(staging.path)
    if lock is not None:
        lock.check()
    replaced = _take_name(staging, lineage, warn)
    try:
        set_tracker(root, staging.iteration, lock)
    except SaveError:
        raise
    except OSError as error:
        raise SaveError(
            f"iteration {staging.iteration} is committed in {root.path}, but the tracker {TRACKER} could not be "
            f"written: {error.strerror or error}; it says {root.tracker().text or 'nothing'}",
            hint=f"make room; then `perdure rewind {root.path} --to {staging.iteration}` points it there",
        ) from error
    if replaced is not None:
        try:
            remove_tree(root, replaced)
        except OSError as error:
            warn(f"what was replaced by iteration {staging.iteration} could not be removed yet: {error}")
    return CommitRecord.decode(encoded)


def _tidy(staging: Staging, metadata: CheckpointMetadata) -> None:
    """Every file of the metadata must be there, and nothing else may be."""
    expected = {f.name for f in metadata.files}
    names = set(staging.root.storage.list(staging.path))
    if not expected <= names:
        missing = sorted(expected - names)
        raise SaveError(f"{staging.path}: {len(missing)} shard files are not there, first {missing[0]}")
    for name in sorted(names - expected):
        staging.root.storage.unlink(os.path.join(staging.path, name))


def _take_name(staging: Staging, lineage: str, warn: Callable[[str], None]) -> str | None:
    """The commit: the partial directory gets the iteration's name. Gives the path of what it replaced."""
    root, storage = staging.root, staging.root.storage
    final = root.join(iteration_dirname(staging.iteration))
    if storage.exists(final):
        _make_way(staging, final, lineage, warn)
    if not storage.exists(final):
        try:
            storage.rename(staging.path, final)
        except FileNotFoundError as error:
            raise SaveError(
                f"{staging.path} is gone: another process has taken this root over; nothing was published"
            ) from error
        staging.published = True
        storage.sync_directory(root.path)
        return None
    try:
        storage.exchange(staging.path, final)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
    else:
        staging.published = True
        storage.sync_directory(root.path)
        return staging.path
    waiting = root.join(replaced_dirname(staging.iteration, staging.sequence))
    storage.rename(final, waiting)
    try:
        storage.rename(staging.path, final)
    except OSError:
        with contextlib.suppress(OSError):
            storage.rename(waiting, final)
        raise
    staging.published = True
    storage.sync_directory(root.path)
    return waiting


def _make_way(staging: Staging, final: str, lineage: str, warn: Callable[[str], None]) -> None:
    """What has the iteration's name is replaced only where this run may; anything else is never deleted.

    Raises:
        SaveError: a checkpoint of another run, or of a newer version, has the name.
    """
    root, name = staging.root, iteration_dirname(staging.iteration)
    listing = root.listing()
    held = next((i for i in listing.iterations if i.dirname == name), None)
    other = next((u for u in listing.uncommitted if u.name == name), None)
    if (held is not None and held.commit.lineage != lineage) or (other is not None and other.kind == "too-new"):
        whose = f"of another run ({held.commit.lineage})" if held is not None else "of a newer version"
        raise SaveError(
            f"{final} holds a checkpoint {whose}, which is not replaced",
            hint="save elsewhere: checkpoint.save_path",
        )
    if other is not None and other.kind in ("no-commit", "foreign"):
        aside = f"{final}.set-aside-{staging.attempt}-{staging.sequence}"
        root.storage.rename(final, aside)
        warn(f"{final} was there, not a committed iteration ({other.why}); it was renamed to {os.path.basename(aside)}")


def set_tracker(root: Root, iteration: int, lock: RootLock | None = None) -> None:
    """Points the tracker at an iteration, in one step.

    Raises:
        SaveError: another process has taken the root over: its tracker stands.
        OSError: the storage failed.
    """
    temporary = root.join(temporary_name(TRACKER))
    root.storage.write(temporary, format_tracker(iteration).encode())
    if lock is not None and not lock.still_mine():
        raise SaveError(
            f"{root.path}: another process has taken this root over; iteration {iteration} was committed, but the "
            "tracker is left as the other one has it",
            hint="two runs must not save below one root: give one of them another checkpoint.save_path",
        )
    root.storage.rename(temporary, root.join(TRACKER))
    root.storage.sync_directory(root.path)


def remove_tree(root: Root, path: str) -> None:
    """Deletes a directory of ours, the commit first, so that no half of it is ever taken for whole.

    It is flat; a directory in it isn't ours, and makes this fail.
    """
    storage = root.storage
    try:
        names = storage.list(path)
    except FileNotFoundError:
        return
    for name in sorted(names, key=lambda n: (n != COMMIT, n)):
        with contextlib.suppress(FileNotFoundError):
            storage.unlink(os.path.join(path, name))
    with contextlib.suppress(FileNotFoundError):
        storage.remove_directory(path)


def hide(root: Root, path: str, iteration: int, sequence: int) -> str:
    """Renames a directory of ours to a name that nobody reads; gives its new path."""
    while root.storage.exists(hidden := root.join(removed_dirname(iteration, sequence))):
        sequence += 1
    root.storage.rename(path, hidden)
    return hidden


def recover(root: Root, attempt: str = "") -> list[str]:
    """Cleans what dead attempts left below a root whose lock is held; gives lines worth telling.

    A complete replaced directory without its namesake gets its name back; partial, removed and
    superseded ones go. Only names that we write are touched, and an error is told, not raised.
    """
    storage = root.storage
    told: list[str] = []
    doomed: list[tuple[str, str]] = []
    listing = root.listing()
    for iteration in listing.iterations:
        if iteration.dirname.startswith("."):
            name = iteration_dirname(iteration.iteration)
            try:
                storage.rename(iteration.path, root.join(name))
                told.append(f"{name} was being replaced when its run ended; it has its name back")
            except OSError as error:
                told.append(f"warning: {iteration.dirname} could not be given its name back: {error}")
    committed = {i.iteration for i in listing.iterations}
    for entry in listing.uncommitted:
        leftover, path = parse_leftover(entry.name), root.join(entry.name)
        if leftover is None or not storage.is_directory(path):
            continue
        if leftover.why == "replaced" and leftover.iteration not in committed:
            told.append(f"warning: {entry.name} is kept: the iteration that replaced it is not sound")
            continue
        if leftover.why == "partial":
            # Renamed away first, so that a holder that wakes up cannot publish it.
            try:
                path = hide(root, path, leftover.iteration, leftover.sequence)
            except OSError as error:
                told.append(f"warning: {entry.name}, left over by an earlier run, could not be renamed: {error}")
                continue
        doomed.append((entry.name, path))
    if told or doomed:
        with contextlib.suppress(OSError):
            storage.sync_directory(root.path)
    for name, path in doomed:
        try:
            remove_tree(root, path)
        except OSError as error:
            told.append(f"warning: {name}, left over by an earlier run, could not be removed: {error}")
    temporary = root.join(temporary_name(TRACKER))
    if storage.exists(temporary):
        with contextlib.suppress(OSError):
            storage.unlink(temporary)
    with contextlib.suppress(OSError):
        end_torn_line(root)
    return told
