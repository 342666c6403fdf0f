"""The root that a run saves below: whose it is, how its saves are numbered, what is kept."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from perdure.catalog.choose import fallback
from perdure.catalog.events import append_event, damage_marks, read_events
from perdure.catalog.lineage import ancestors, links, next_sequence
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import recover, set_tracker
from perdure.catalog.retention import delete, keep, withdraw
from perdure.catalog.root import Iteration, Root
from perdure.config.schema import CheckpointConfig
from perdure.engine.priority import lower_priority
from perdure.engine.ranks import Ranks
from perdure.engine.same_directory import check_shared
from perdure.errors import SaveError, UsageError
from perdure.format.names import EVENTS, TRACKER
from perdure.storage.base import Storage

__all__ = ["SaveRoot", "check_continues", "check_unused"]


def check_unused(path: str, iterations: Sequence[Iteration]) -> None:
    """Refuses to start a run at step 0 below a root, `path`, that holds iterations.

    Raises:
        UsageError: it does.
    """
    if iterations:
        raise UsageError(
            f"{path} already holds iteration {iterations[-1].iteration} of another run, and this one starts at step 0",
            hint="continue it with checkpoint.auto_resume=True or checkpoint.load_path, "
            "or save elsewhere: checkpoint.save_path",
        )


def check_continues(path: str, iterations: Sequence[Iteration], loaded: str, lineage: str) -> None:
    """Refuses to go on with the run of a checkpoint, `loaded`, below a root, `path`, that holds another one.

    Raises:
        UsageError: it does.
    """
    if {i.commit.lineage for i in iterations} - {lineage}:
        raise UsageError(
            f"{path} holds iterations of another run than {loaded}", hint="save elsewhere: checkpoint.save_path"
        )


class SaveRoot:
    """A save root, held for writing on rank 0 while saving is enabled.

    `lineage`, `sequence` (of the newest save of this run) and `parent` say what the next save descends from.

    Raises:
        RootLockedError: another living run saves here.
        UsageError: the directory cannot be made.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        path: str,
        storage: Storage,
        ranks: Ranks,
        attempt: str,
        say: Callable[[str], None],
    ) -> None:
        self.root = Root(os.path.abspath(path), storage)
        self.attempt, self.lineage, self.sequence, self.parent = attempt, "", 0, 0
        self.lock: RootLock | None = None
        self._deletion: threading.Thread | None = None
        self._config, self._ranks, self._say = config, ranks, say
        if config.enable_save:
            ranks.together(self._open if ranks.is_first else lambda: None, "opening the save root")
            try:
                check_shared(self.root, ranks)
            except BaseException:
                self.release()
                raise
            ranks.together(self._recover if ranks.is_first else lambda: None, "clearing up in the save root")

    @property
    def started(self) -> bool:
        """Whether the lineage is known: a load, or the first save, settles it."""
        return bool(self.lineage)

    def start_fresh(self) -> None:
        """A new lineage; a root that holds another one is refused before anything is trained."""

        def check() -> str:
            if self._config.enable_save:
                check_unused(self.root.path, self.iterations())
            return uuid.uuid4().hex[:16]

        self.lineage = self._ranks.decide(check, "starting a run", str)
        self.sequence = self.parent = 0

    def go_on_from(self, root: str, path: str, lineage: str, sequence: int) -> None:
        """Continues the lineage of what was loaded from `path` below `root`.

        Raises:
            UsageError: this root holds another run.
        """

        def following() -> int:
            iterations = self.iterations()
            if root != self.root.path and self._config.enable_save:
                check_continues(self.root.path, iterations, path, lineage)
            events = read_events(self.root) if self.root.storage.exists(self.root.path) else []
            return next_sequence(iterations, lineage, sequence, events) - 1

        # A checkpoint made by others has none: this run draws its own, one for all ranks.
        self.lineage = lineage or self._ranks.decide(lambda: uuid.uuid4().hex[:16], "starting a lineage", str)
        self.parent = sequence
        self.sequence = self._ranks.decide(following, "numbering the saves", int)

    def earlier(self, position: int) -> Iteration | None:
        """The nearest healthy iteration that this run descends from and whose samples end at `position` or before."""
        iterations = self.iterations()
        known = links(iterations, read_events(self.root) if iterations else [])
        line = ancestors(iterations, self.lineage, self.parent, known)
        damaged = self.damaged(self.root) if iterations else set()
        return next(
            (
                i
                for i in line
                if i.commit.healthy and i.commit.consumed_samples <= position and i.commit.digest not in damaged
            ),
            None,
        )

    def go_back_to(self, iteration: int, sequence: int) -> None:
        """The next save descends from an earlier one, which the tracker names from now on."""
        self.parent = sequence
        if self._ranks.is_first and self._config.enable_save:
            set_tracker(self.root, iteration, self.lock)

    def iterations(self) -> list[Iteration]:
        """The committed iterations here; none where the root does not exist yet."""
        return self.root.iterations()

    def damaged(self, source: Root) -> set[str]:
        """Commit digests of what was found damaged, by this run's events or the source's."""
        return damage_marks(self.root) | (damage_marks(source) if source.path != self.root.path else set())

    def contains(self, path: str) -> bool:
        """Whether a path is the root or lies below it."""
        full = os.path.abspath(path)
        return full == self.root.path or full.startswith(self.root.path + os.sep)

    def check_room(self, needed: int, step: int) -> None:
        """Refuses a save that would not fit; waits for what retention gave up only where its room is needed.

        Raises:
            SaveError: with the bytes needed and free.
        """
        needed += 1 << 20
        free = self.root.storage.free_bytes(self.root.path)
        if free < needed:
            self.finish_deletion()
            free = self.root.storage.free_bytes(self.root.path)
        if free < needed:
            raise SaveError(
                f"step {step} needs {needed} bytes below {self.root.path}, where {free} are free",
                hint="free some space, lower checkpoint.save_max, or save elsewhere: checkpoint.save_path",
            )

    def event(self, event: str, **fields: Any) -> None:
        """Appends to events.jsonl, if anything is written at all; never fails a run."""
        if not self._ranks.is_first or not self._config.enable_save:
            return
        with contextlib.suppress(OSError):
            append_event(self.root, event, attempt=self.attempt, lineage=self.lineage, **fields)

    def retain(self) -> None:
        """Makes invisible what retention gives up, and deletes it while training goes on; cannot fail a run."""
        # A process that was paused and taken over must not delete what its heir may be reading.
        hidden = self._withdraw() if self.lock is not None and self.lock.still_mine() else []
        if hidden:
            self.finish_deletion()
            deletion = threading.Thread(target=self._delete, args=(hidden,), name="perdure-delete")
            # None can be started once the interpreter ends; what is hidden is deleted at the next start.
            with contextlib.suppress(RuntimeError):
                deletion.start()
                self._deletion = deletion

    def finish_deletion(self) -> None:
        """Waits until what retention gave up is deleted, and its room is free."""
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    def _delete(self, hidden: list[str]) -> None:
        lower_priority()
        for path in hidden:
            for warning in delete(self.root, path):
                self._say(f"warning: {warning}")

    def _withdraw(self) -> list[str]:
        """Renames what retention gives up out of sight; the paths to delete."""
        hidden = []
        try:
            iterations = self.root.iterations()
            pinned = self._pinned([i for i in iterations if i.commit.lineage == self.lineage])
            verdicts = keep(iterations, self._config.save_max, lineage=self.lineage, pinned=pinned)
            for iteration, verdict in verdicts.items():
                if verdict.remove:
                    path, warnings = withdraw(self.root, iteration)
                    for warning in warnings:
                        self._say(f"warning: {warning}")
                    if path is not None:
                        hidden.append(path)
                        self.event("remove", iteration=iteration.iteration, sequence=iteration.commit.sequence)
        except OSError as error:
            self._say(f"warning: old iterations could not be removed now: {error}")
        return hidden

    def _pinned(self, own: list[Iteration]) -> dict[int, str]:
        """The sequences of this run that stay whatever the count, with the reason: RESUME.md, Retention."""
        pinned = {}
        tracked = self.root.tracker().iteration
        for iteration in own:
            if iteration.iteration == tracked:
                pinned[iteration.commit.sequence] = "named by the tracker"
        healthy = [i.commit.sequence for i in own if i.commit.healthy]
        if self._config.load_healthy and healthy:
            pinned.setdefault(max(healthy), "newest healthy")
        pinned[self.sequence] = "just saved"
        if len(pinned) < self._config.save_max:
            saved = next((i for i in own if i.commit.sequence == self.sequence), None)
            # After a rewind, what was saved on the branch that was left is newer, but nothing falls back to it.
            nearest = fallback(self.root, saved, among=own) if saved is not None else None
            if nearest is not None:
                pinned.setdefault(nearest.commit.sequence, "taken if the newest is damaged")
        return pinned

    def _open(self) -> None:
        try:
            os.makedirs(self.root.path, exist_ok=True)
        except OSError as error:
            why = "it is no directory" if os.path.lexists(self.root.path) else error.strerror
            raise UsageError(
                f"checkpoint.save_path: {self.root.path} cannot be made: {why}",
                hint="name a directory that can be: checkpoint.save_path (default: `checkpoint` in output_dir)",
            ) from error
        for name in (TRACKER, EVENTS):
            if self.root.storage.is_directory(self.root.join(name)):
                raise UsageError(
                    f"checkpoint.save_path: {self.root.join(name)} is a directory, where a file is to be written",
                    hint="move it away, or save elsewhere",
                )
        self.lock = RootLock.acquire(self.root.path, attempt=self.attempt)

    def _recover(self) -> None:
        try:
            lines = recover(self.root, self.attempt)
        except OSError:
            self.release()
            raise
        for line in lines:
            self._say(line)

    def release(self) -> None:
        """Gives the root back."""
        self.finish_deletion()
        if self.lock is not None:
            self.lock.release()
            self.lock = None
