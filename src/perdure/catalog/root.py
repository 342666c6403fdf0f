"""Which iterations a root holds, which of them are committed, and what the tracker says.

Reading only: nothing here changes a byte. A directory counts by its commit.json alone, whatever its
name promises; what doesn't count is told with the reason, never hidden.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from perdure.errors import DamagedCheckpointError, FormatTooNewError
from perdure.format.commit import CommitRecord
from perdure.format.names import (
    COMMIT,
    TRACKER,
    iteration_dirname,
    parse_iteration_dirname,
    parse_leftover,
    parse_tracker,
)
from perdure.storage.base import Directory, Storage
from perdure.storage.local import LocalStorage

__all__ = [
    "COMMIT_LIMIT",
    "GONE",
    "NOT_A_FILE",
    "Iteration",
    "Root",
    "RootListing",
    "TrackerReading",
    "Uncommitted",
    "read_commit",
]

COMMIT_LIMIT = 1 << 20
_TRACKER_LIMIT = 4096

GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What a path says that isn't there, or no longer."""

NOT_A_FILE = frozenset({errno.ELOOP, errno.EFBIG, errno.EINVAL, errno.EISDIR, errno.ENXIO})
"""What a name says that is there but isn't a plain file of a sane size; other errors are the storage's own."""


@dataclass(frozen=True)
class Iteration:
    """A committed iteration.

    Attributes:
        iteration: the global step in the directory's name.
        path: the directory.
        dirname: its name under the root; `iteration_...`, or `.iteration_....replaced-<seq>` where a
            replacement was cut off half-way.
        commit: its commit.json.
    """

    iteration: int
    path: str
    dirname: str
    commit: CommitRecord

    @property
    def label(self) -> str:
        """`iteration 2000`, for messages."""
        return f"iteration {self.iteration}"


@dataclass(frozen=True)
class Uncommitted:
    """A name in the root that doesn't count as an iteration.

    Attributes:
        name: its name.
        kind: `damaged` (its commit.json is), `too-new` (sound, by a newer version), `no-commit` (an
            iteration directory without commit.json), `partial`, `replaced`, `removed` (leftovers of ours),
            `foreign` (anything else of a name like ours).
        why: one phrase for people.
        iteration: the step in its name.
        error: what reading commit.json raised, for `damaged` and `too-new`.
        time: commit time of a `too-new` one; 0.0 where unknown.
    """

    name: str
    kind: Literal["damaged", "too-new", "no-commit", "partial", "replaced", "removed", "foreign"]
    why: str
    iteration: int | None = None
    error: DamagedCheckpointError | FormatTooNewError | None = None
    time: float = 0.0


@dataclass(frozen=True)
class TrackerReading:
    """What the tracker says: its text (shortened), the iteration it names, and whether it could be read."""

    text: str
    iteration: int | None
    state: Literal["ok", "missing", "unreadable"]


@dataclass(frozen=True)
class RootListing:
    """One look at a root: committed iterations by (lineage, sequence), and what doesn't count."""

    iterations: list[Iteration] = field(default_factory=list)
    uncommitted: list[Uncommitted] = field(default_factory=list)
    others: int = 0


class Root:
    """The directory that holds a run's iterations.

    Args:
        path: the directory; it need not exist yet.
        storage: where it lies.
    """

    def __init__(self, path: str | os.PathLike[str], storage: Storage | None = None) -> None:
        self.path = os.path.normpath(os.fspath(path))
        self.storage: Storage = storage if storage is not None else LocalStorage()

    def join(self, name: str) -> str:
        """The path of a name in this root."""
        return os.path.join(self.path, name)

    def listing(self) -> RootListing:
        """Everything that has to do with checkpoints, committed or not; empty for a root that doesn't exist.

        Raises:
            OSError: the storage failed; a directory that vanishes meanwhile is no failure.
        """
        try:
            names = self.storage.list(self.path)
        except OSError as error:
            if error.errno in GONE | NOT_A_FILE:
                return RootListing()
            raise
        listing, others = RootListing(), 0
        present = set(names)
        for name in names:
            iteration, leftover = parse_iteration_dirname(name), parse_leftover(name)
            if iteration is not None:
                found = self._look(name, iteration)
            elif leftover is not None:
                found = self._look_at_leftover(name, present)
            else:
                others += 1
                continue
            if isinstance(found, Iteration):
                listing.iterations.append(found)
            elif found is not None:
                listing.uncommitted.append(found)
        listing.iterations.sort(key=lambda i: (i.commit.lineage, i.commit.sequence, i.commit.time, i.iteration))
        return RootListing(listing.iterations, listing.uncommitted, others)

    def iterations(self) -> list[Iteration]:
        """The committed iterations by (lineage, sequence); empty for a root that doesn't exist."""
        return self.listing().iterations

    def uncommitted(self) -> list[Uncommitted]:
        """The names that look like iterations and don't count, with why."""
        return self.listing().uncommitted

    def find(self, iteration: int) -> Iteration | None:
        """The committed iteration of this number, or None."""
        return next((i for i in self.iterations() if i.iteration == iteration), None)

    def tracker(self) -> TrackerReading:
        """What the tracker says; it need not be true."""
        try:
            data = self.storage.read(self.join(TRACKER), _TRACKER_LIMIT)
        except OSError as error:
            if error.errno in GONE:
                return TrackerReading("", None, "missing")
            if error.errno in NOT_A_FILE:
                return TrackerReading(f"({error.strerror})", None, "unreadable")
            raise
        text = data[:40].decode("utf-8", "replace").strip()
        iteration = parse_tracker(data)
        return TrackerReading(text, iteration, "unreadable" if iteration is None else "ok")

    def open(self, iteration: Iteration) -> Directory:
        """A handle of the iteration's directory; everything below it is to be read by this handle."""
        return self.storage.open_directory(iteration.path)

    def _look(self, name: str, number: int) -> Iteration | Uncommitted | None:
        path = self.join(name)
        if not self.storage.is_directory(path):
            return Uncommitted(name, "foreign", "not a directory", number) if self.storage.exists(path) else None
        try:
            with self.storage.open_directory(path) as directory:
                commit = read_commit(directory)
        except OSError as error:
            if error.errno in GONE:
                return None
            raise
        except FormatTooNewError as error:
            return Uncommitted(name, "too-new", error.message, number, error, self._commit_time(path))
        except DamagedCheckpointError as error:
            return Uncommitted(name, "damaged", error.message, number, error)
        if commit is None:
            return Uncommitted(name, "no-commit", f"no {COMMIT}: not a committed iteration of perdure", number)
        if commit.iteration != number:
            damage = DamagedCheckpointError(
                f"{os.path.join(path, COMMIT)}: written for iteration {commit.iteration}, but it lies in {name}",
                file=os.path.join(path, COMMIT),
                hint=f"give the directory its name back: {iteration_dirname(commit.iteration)}",
            )
            return Uncommitted(name, "damaged", damage.message, number, damage)
        return Iteration(number, path, name, commit)

    def _commit_time(self, path: str) -> float:
        """When a newer version committed it, as far as that can be told."""
        try:
            with self.storage.open_directory(path) as directory:
                value = msgspec.json.decode(directory.read(COMMIT, COMMIT_LIMIT)).get("time")
        except (OSError, EOFError, msgspec.DecodeError, ValueError, AttributeError):
            return 0.0
        return float(value) if isinstance(value, int | float) else 0.0

    def _look_at_leftover(self, name: str, present: set[str]) -> Iteration | Uncommitted | None:
        leftover = parse_leftover(name)
        assert leftover is not None
        if leftover.why == "replaced":
            found = self._look(name, leftover.iteration)
            namesake = iteration_dirname(leftover.iteration)
            if (
                isinstance(found, Iteration)
                and namesake not in present
                and not self.storage.exists(self.join(namesake))
            ):
                return found
            return Uncommitted(name, "replaced", "left over when it was replaced", leftover.iteration)
        if leftover.why == "partial":
            why = f"never finished by attempt {leftover.attempt}"
            return Uncommitted(name, "partial", why, leftover.iteration)
        return Uncommitted(name, "removed", "its removal was cut off", leftover.iteration)


def read_commit(directory: Directory) -> CommitRecord | None:
    """commit.json of an open iteration directory; None where there is none.

    Raises:
        DamagedCheckpointError: it is there and isn't what was written.
        FormatTooNewError: a newer version wrote it.
        OSError: the storage failed.
    """
    path = os.path.join(directory.path, COMMIT)
    try:
        data = directory.read(COMMIT, COMMIT_LIMIT)
    except EOFError as error:
        raise DamagedCheckpointError(f"{path}: {error}", file=path) from None
    except OSError as error:
        if error.errno in GONE:
            return None
        if error.errno in NOT_A_FILE:
            raise DamagedCheckpointError(f"{path}: {error.strerror}", file=path) from None
        raise
    return CommitRecord.decode(data, path)
