"""Which iteration a resume takes: RESUME.md, Order 1 and 2; and what it falls back to."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perdure.catalog.events import read_events
from perdure.catalog.lineage import Links, ancestors, last_save_of, links, newest_by_lineage
from perdure.catalog.others import way_here
from perdure.catalog.root import GONE, NOT_A_FILE, Iteration, Root, RootListing, TrackerReading, Uncommitted
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, PerdureError, UsageError
from perdure.format.huggingface import SINGLE
from perdure.format.names import TRACKER, parse_iteration_dirname, path_text
from perdure.storage.base import Storage

__all__ = ["Choice", "Located", "choose", "decide", "fallback", "locate", "locate_root"]


_LIKELY = ("checkpoint", "checkpoints")
"""What save roots are often called in the directory of a run."""


@dataclass(frozen=True)
class Located:
    """The root that a path means, and the iteration where the path named one itself."""

    root: Root
    iteration: Iteration | None

    @property
    def kind(self) -> Literal["root", "iteration"]:
        """What the path was."""
        return "root" if self.iteration is None else "iteration"


@dataclass(frozen=True)
class Choice:
    """The iteration to load, and what the user should know about the choice."""

    iteration: Iteration
    warnings: list[str] = field(default_factory=list)


def locate(path: str | os.PathLike[str], storage: Storage | None = None) -> Located:
    """What a `load_path` means: a save root, or one iteration of one.

    Raises:
        CheckpointNotFoundError: nothing that was saved is there; the path and what was expected are named.
        DamagedCheckpointError, FormatTooNewError: the one iteration asked for, or all there are, can't be read.
        OSError: the storage failed.
    """
    path = path_text(path)
    full = os.path.abspath(path)
    root = Root(full, storage)
    expected = f"expected a save root, which has iteration_XXXXXXXX directories and {TRACKER}"
    try:
        names = root.storage.list(full)
    except OSError as error:
        if error.errno not in GONE | NOT_A_FILE:
            raise
        hint = None
        if error.errno in NOT_A_FILE:
            what = f"is no directory ({error.strerror})"
        elif root.storage.exists(full):
            what, folder = "is a file, not a directory", os.path.dirname(full)
            if _is_a_part(os.path.basename(full)) or parse_iteration_dirname(os.path.basename(folder)) is not None:
                hint = f"name the directory that it is a part of: {folder}"
            else:
                hint = way_here(path, None)
        else:
            what = "does not exist"
        raise CheckpointNotFoundError(f"{path} {what}; {expected}", hint=hint) from None
    listing = root.listing()
    if listing.iterations:
        return Located(root, None)
    name = os.path.basename(full)
    if parse_iteration_dirname(name) is not None:
        above = Root(os.path.dirname(full), storage)
        around = above.listing()
        for iteration in around.iterations:
            if iteration.dirname == name:
                return Located(above, iteration)
        raise _not_committed(path, [u for u in around.uncommitted if u.name == name])
    if listing.uncommitted:
        raise _not_committed(path, listing.uncommitted)
    what = "holds no checkpoint" if names else "is empty"
    below = next((n for n in _LIKELY if n in names and Root(root.join(n), storage).iterations()), None)
    hint = f"name the save root in it: {os.path.join(path, below)}" if below is not None else way_here(path, names)
    raise CheckpointNotFoundError(f"{path} {what}; {expected}", hint=hint)


def _is_a_part(name: str) -> bool:
    """Whether a file is one of a directory of weights, by its name."""
    return name == SINGLE or (name.endswith(".safetensors") and "-of-" in name)


def locate_root(path: str | os.PathLike[str], storage: Storage | None = None) -> Root:
    """The save root that a path names, for what is done to a whole root.

    Raises:
        UsageError: it names one iteration.
        CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError, OSError: as `locate`.
    """
    located = locate(path, storage)
    if located.iteration is not None:
        raise UsageError(
            f"{os.fspath(path)} is one iteration; expected the save root that holds it",
            hint=f"name {os.path.dirname(os.path.normpath(path)) or '.'}; `perdure inspect` shows one iteration",
        )
    return located.root


def choose(root: Root, *, load_healthy: bool = False, exclude: Collection[str] = ()) -> Choice:
    """The iteration of a root that a resume takes.

    Args:
        load_healthy: take the newest one that is not marked abnormal.
        exclude: commit digests of iterations known to be damaged.

    Raises:
        CheckpointNotFoundError: none is committed, or none is healthy.
        FormatTooNewError: the one to take was written by a newer version.
        DamagedCheckpointError: it and all it descends from are known to be damaged.
        OSError: the storage failed.
    """
    listing = root.listing()
    if not listing.iterations:
        locate(root.path, root.storage)
        raise _not_committed(root.path, [])
    events, tracker = read_events(root), root.tracker()
    known = links(listing.iterations, events)
    tracked = last_save_of(tracker.iteration, events) if tracker.iteration is not None else None
    return decide(listing, tracker, known, tracked=tracked, load_healthy=load_healthy, exclude=exclude, where=root.path)


def decide(
    listing: RootListing,
    tracker: TrackerReading,
    known: Links,
    *,
    tracked: tuple[str, int] | None = None,
    load_healthy: bool = False,
    exclude: Collection[str] = (),
    where: str = "the root",
) -> Choice:
    """The pure part of `choose`: the tracker's iteration where it names a committed one, else the newest.

    Newest and older go by lineage, sequence and parents; iteration numbers are compared with the tracker's
    text and nothing else. Where the tracker's iteration is there but its commit.json isn't what was written,
    that is damage like any other: its parent is next, never a branch that was left.

    Args:
        tracked: lineage and sequence of the save that the tracker's number stands for, where events remember it.
    """
    iterations = listing.iterations
    chosen = next((i for i in iterations if i.iteration == tracker.iteration), None)
    broken = next((u for u in listing.uncommitted if u.iteration == tracker.iteration and _is_broken(u)), None)
    if chosen is not None:
        warnings = _newer_ones(iterations, chosen)
    elif broken is not None and tracked is not None:
        chosen, warnings = _parent_of_broken(iterations, broken, tracked, known, where)
    else:
        chosen, warnings = _newest(listing, tracker)
    line = [chosen, *ancestors(iterations, chosen.commit.lineage, chosen.commit.parent, known)]
    sound = [i for i in line if i.commit.digest not in exclude]
    if not sound:
        raise DamagedCheckpointError(
            f"{where}: {chosen.dirname} is marked as damaged, and no sound one that it descends from is left",
            hint=f"perdure verify --read-data {where}; once repaired: perdure rewind {where} --to {chosen.iteration}",
        )
    if sound[0] is not chosen:
        warnings.append(
            f"{chosen.dirname} is marked as damaged; taking {sound[0].dirname}, from which it descends (once repaired: "
            f"perdure rewind {where} --to {chosen.iteration})"
        )
    if not load_healthy or sound[0].commit.healthy:
        return Choice(sound[0], warnings)
    healthy = next((i for i in sound if i.commit.healthy), None)
    if healthy is None:
        raise CheckpointNotFoundError(
            f"{where}: {sound[0].dirname} is marked abnormal, and no healthy one that it descends from is left",
            hint="set checkpoint.load_healthy=False, or name an iteration directory as load_path",
        )
    warnings.append(f"{sound[0].dirname} is marked abnormal; taking {healthy.dirname} (load_healthy)")
    return Choice(healthy, warnings)


def fallback(
    root: Root, iteration: Iteration, *, exclude: Collection[str] = (), among: Sequence[Iteration] | None = None
) -> Iteration | None:
    """The nearest iteration that this one descends from and that is not known to be damaged.

    Args:
        exclude: commit digests of iterations known to be damaged.
        among: what the root holds, where that has been read already.
    """
    iterations = root.iterations() if among is None else among
    commit = iteration.commit

    def nearest(known: Links) -> Iteration | None:
        older = ancestors(iterations, commit.lineage, commit.parent, known)
        return next((i for i in older if i.commit.digest not in exclude), None)

    # Only the events remember parents that are gone; they grow with the run, and are read when they must be.
    return nearest(links(iterations)) or nearest(links(iterations, read_events(root)))


def _newer_ones(iterations: Sequence[Iteration], chosen: Iteration) -> list[str]:
    """A warning where the tracker has been left behind, or set back."""
    later = [
        i.dirname
        for i in iterations
        if i.commit.lineage == chosen.commit.lineage and i.commit.sequence > chosen.commit.sequence
    ]
    if not later:
        return []
    more = f" and {len(later) - 3} more" if len(later) > 3 else ""
    were = "was" if len(later) == 1 else "were"
    return [
        f"the tracker names {chosen.dirname}, which is taken; saved later and not taken {were} "
        f"{', '.join(later[-3:])}{more}"
    ]


def _parent_of_broken(
    iterations: Sequence[Iteration], broken: Uncommitted, tracked: tuple[str, int], known: Links, where: str
) -> tuple[Iteration, list[str]]:
    """What the tracker's iteration descends from, where its own commit.json is gone or damaged."""
    lineage, sequence = tracked
    found = next(ancestors(iterations, lineage, known.get(tracked, 0), known), None)
    if found is None:
        others = ", ".join(str(i.iteration) for i in iterations)
        raise DamagedCheckpointError(
            f"{where}: the tracker names {broken.name}, which is damaged ({broken.why}), and nothing that it descends "
            "from is left",
            hint=f"perdure rewind {where} --to N goes on from another; there are {others}",
        )
    return found, [
        f"the tracker names {broken.name}, save {sequence}, which is damaged ({broken.why}); taking {found.dirname}, "
        "from which it descends"
    ]


def _newest(listing: RootListing, tracker: TrackerReading) -> tuple[Iteration, list[str]]:
    """The newest committed iteration, where the tracker is of no use, with the reason."""
    newest = newest_by_lineage(listing.iterations)
    chosen = next(iter(newest.values()))
    last = max(i.commit.time for i in listing.iterations)
    entry = next((u for u in listing.uncommitted if u.iteration == tracker.iteration and not _leftover(u)), None)
    if tracker.state != "ok":
        entry = next((u for u in listing.uncommitted if u.kind == "too-new" and u.time >= last), None)
    if entry is not None and entry.kind == "too-new" and entry.error is not None:
        raise entry.error
    if tracker.state == "missing":
        said = f"there is no tracker ({TRACKER})"
    elif tracker.state == "unreadable":
        said = f"the tracker reads {tracker.text!r}, which is no iteration"
    else:
        why = f" ({entry.why})" if entry is not None else ""
        said = f"the tracker says {tracker.text!r}, which is not a committed iteration{why}"
    warnings = [f"{said}; taking {chosen.dirname}, the newest that is committed"]
    if entry is None:
        broken = [u for u in listing.uncommitted if u.kind == "damaged"]
        warnings += [f"{u.name} does not count: {u.why}" for u in broken[:3]]
    if len(newest) > 1:
        warnings.append(
            f"the root holds {len(newest)} runs ({', '.join(newest)}); {chosen.dirname} is of the one that saved last"
        )
    return chosen, warnings


def _is_broken(entry: Uncommitted) -> bool:
    return entry.kind in ("damaged", "no-commit")


def _leftover(entry: Uncommitted) -> bool:
    return entry.kind in ("partial", "replaced", "removed")


def _not_committed(path: str, found: Sequence[Uncommitted]) -> PerdureError:
    for entry in found:
        if entry.error is not None:
            return entry.error
    shown = "; ".join(f"{entry.name}: {entry.why}" for entry in found[:3])
    return CheckpointNotFoundError(
        f"{path} holds no committed iteration{f' ({shown})' if shown else ''}",
        hint=f"a save that was interrupted is never loaded; see `perdure ls {path}`",
    )
