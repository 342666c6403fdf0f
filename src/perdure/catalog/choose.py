"""Which iteration a resume takes: RESUME.md, Order 1 and 2; and what it falls back to."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from perdure.catalog.events import read_events
from perdure.catalog.lineage import ancestors, links, newest_by_lineage
from perdure.catalog.root import Iteration, Root, TrackerReading, Uncommitted
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError
from perdure.format.names import TRACKER, parse_iteration_dirname
from perdure.storage.base import Storage

__all__ = ["Choice", "Located", "choose", "decide", "fallback", "locate"]


@dataclass(frozen=True)
class Located:
    """The root that a path means, and the iteration where the path named one itself."""

    root: Root
    iteration: Iteration | None


@dataclass(frozen=True)
class Choice:
    """The iteration to load, and what the user should know about the choice."""

    iteration: Iteration
    warnings: list[str] = field(default_factory=list)


def locate(path: str, storage: Storage | None = None) -> Located:
    """What a `load_path` means: a save root, or one iteration of one.

    Raises:
        CheckpointNotFoundError: nothing that was saved is there; the path and what was expected are named.
    """
    full = os.path.abspath(path)
    root = Root(full, storage)
    expected = f"expected a save root: a directory with iteration_XXXXXXXX below it and {TRACKER}"
    if not os.path.lexists(full):
        raise CheckpointNotFoundError(f"{path} does not exist; {expected}")
    if not os.path.isdir(full):
        raise CheckpointNotFoundError(f"{path} is a file; {expected}")
    number = parse_iteration_dirname(os.path.basename(full))
    if number is not None:
        above = Root(os.path.dirname(full), storage)
        listing = above.listing()
        for iteration in listing.iterations:
            if iteration.dirname == os.path.basename(full):
                return Located(above, iteration)
        raise _not_committed(path, [u for u in listing.uncommitted if u.iteration == number])
    listing = root.listing()
    if listing.iterations:
        return Located(root, None)
    if listing.uncommitted:
        raise _not_committed(path, listing.uncommitted)
    what = "is empty" if not root.storage.list(full) else "holds no checkpoint"
    raise CheckpointNotFoundError(f"{path} {what}; {expected}")


def _not_committed(path: str, found: Sequence[Uncommitted]) -> Exception:
    for entry in found:
        if entry.error is not None:
            return entry.error
    shown = "; ".join(f"{entry.name}: {entry.why}" for entry in found[:3])
    return CheckpointNotFoundError(
        f"{path} holds no committed iteration ({shown})" if shown else f"{path} holds no committed iteration",
        hint="a save that was interrupted is not loaded; `perdure ls` shows what is there",
    )


def choose(root: Root, *, load_healthy: bool = False, exclude: Collection[str] = ()) -> Choice:
    """The iteration of a root that a resume takes.

    Args:
        load_healthy: take the newest one that is not marked abnormal.
        exclude: commit digests of iterations known to be damaged.

    Raises:
        CheckpointNotFoundError: none is committed.
        FormatTooNewError: the newest was written by a newer version.
        DamagedCheckpointError: all are known to be damaged.
    """
    listing = root.listing()
    if not listing.iterations:
        located = locate(root.path, root.storage)
        raise _not_committed(located.root.path, [])
    newest_time = max(i.commit.time for i in listing.iterations)
    for entry in listing.uncommitted:
        if entry.kind == "too-new" and entry.error is not None and entry.time >= newest_time:
            raise entry.error
    events = read_events(root)
    known = links(listing.iterations, events)
    choice = decide(listing.iterations, root.tracker(), load_healthy=load_healthy, exclude=exclude)
    if choice.iteration.commit.digest not in exclude:
        return choice
    commit = choice.iteration.commit
    for older in ancestors(listing.iterations, commit.lineage, commit.parent, known):
        if older.commit.digest not in exclude:
            text = f"{choice.iteration.dirname} is marked as damaged; taking {older.dirname}, from which it descends"
            return Choice(older, [*choice.warnings, text])
    raise DamagedCheckpointError(
        f"{root.path}: {choice.iteration.dirname} is marked as damaged, and so is all it descends from",
        hint=f"perdure verify --read-data {root.path}",
    )


def decide(
    iterations: Sequence[Iteration],
    tracker: TrackerReading,
    *,
    load_healthy: bool = False,
    exclude: Collection[str] = (),
) -> Choice:
    """Pure: the tracker's iteration where it names a committed one, else the newest by sequence."""
    warnings: list[str] = []
    named = next((i for i in iterations if i.iteration == tracker.iteration), None)
    if named is None:
        newest = newest_by_lineage(iterations)
        chosen = next(iter(newest.values()))
        said = {"missing": "there is no tracker", "unreadable": f"the tracker is not readable: {tracker.text!r}"}.get(
            tracker.state, f"the tracker says {tracker.text!r}, which is not committed"
        )
        warnings.append(f"{said}; taking {chosen.dirname}, the newest that is committed")
        if len(newest) > 1:
            warnings.append(f"the root holds {len(newest)} runs; this is the one that saved last")
    else:
        chosen = named
        later = [
            i
            for i in iterations
            if i.commit.lineage == chosen.commit.lineage and i.commit.sequence > chosen.commit.sequence
        ]
        if later:
            names = ", ".join(i.dirname for i in later[:3])
            warnings.append(f"the tracker names {chosen.dirname}; {len(later)} newer ones are committed too: {names}")
    if load_healthy and not chosen.commit.healthy:
        sound = [
            i
            for i in iterations
            if i.commit.lineage == chosen.commit.lineage
            and i.commit.sequence <= chosen.commit.sequence
            and i.commit.healthy
            and i.commit.digest not in exclude
        ]
        if sound:
            healthy = max(sound, key=lambda i: i.commit.sequence)
            warnings.append(f"{chosen.dirname} is marked abnormal; taking {healthy.dirname} (load_healthy)")
            chosen = healthy
        else:
            warnings.append(f"{chosen.dirname} is marked abnormal, but no healthy one is left")
    return Choice(chosen, warnings)


def fallback(root: Root, iteration: Iteration, *, exclude: Collection[str] = ()) -> Iteration | None:
    """The nearest iteration that this one descends from and that is not known to be damaged."""
    iterations = root.iterations()
    known = links(iterations, read_events(root))
    commit = iteration.commit
    for older in ancestors(iterations, commit.lineage, commit.parent, known):
        if older.commit.digest not in exclude:
            return older
    return None
