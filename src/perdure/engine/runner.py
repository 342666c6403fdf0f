"""Runs saves: at once, on all ranks together, or behind training."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from perdure.engine.priority import lower_priority
from perdure.engine.ranks import Ranks
from perdure.engine.save import SAVE_DEADLINE_S, SaveJob
from perdure.engine.staging import Staging as Snapshot
from perdure.engine.watch import SAVE_THREAD
from perdure.engine.writer import WriteBuffers
from perdure.errors import SaveError
from perdure.format.collector import collector_paused
from perdure.format.commit import CommitRecord

__all__ = ["SaveRunner", "Underway"]

# One at a time: the disk is kept busy, and a processor is left to training.
BACKGROUND_WORKERS = 1


@dataclass
class Underway:
    """A save behind training; once its thread has ended, what came of it."""

    job: SaveJob
    thread: threading.Thread
    seconds: float = 0.0
    commit: CommitRecord | None = None
    error: BaseException | None = None

    def outcome(self) -> BaseException | None:
        """Waits for the end; what it raised, which is then known to the program."""
        self.thread.join()
        _unheard.pop(id(self), None)
        return self.error


_unheard: dict[int, Underway] = {}
"""Saves behind training whose outcome nobody has asked for."""


@atexit.register
def _tell_unheard() -> None:
    """A program that ends without closing its checkpointer is told all the same; its threads have ended by now."""
    for underway in _unheard.values():
        if underway.error is not None:
            sys.stderr.write(f"error: {underway.error}\n")


class SaveRunner:
    """Holds the threads and the memory that saves use again and again.

    Args:
        staging_bytes: most memory for a snapshot; None for as much as one needs.
        after_commit: called with the commit (None on other ranks than the first) and the seconds that the save took,
            by the thread of a save behind training.
    """

    def __init__(
        self, ranks: Ranks, staging_bytes: int | None, after_commit: Callable[[CommitRecord | None, float], None]
    ) -> None:
        self._ranks, self._after_commit = ranks, after_commit
        self._snapshot, self._expecting = Snapshot(staging_bytes), False
        self._buffers: WriteBuffers | None = None
        self._background: WriteBuffers | None = None

    def run(self, job: SaveJob) -> CommitRecord | None:
        """Runs a save on all ranks; returns on each once the commit is visible there.

        Raises:
            SaveError: it failed on some rank; raised on all.
        """

        def work() -> CommitRecord | None:
            if not self._ranks.is_first:
                job.run(self._write_buffers())
                self._await_first(job)
                return None
            try:
                return job.run(self._write_buffers())
            finally:
                self._ranks.post(*_through(job))

        with collector_paused():
            return self._ranks.together(work, f"saving step {job.common.global_step}")

    def _await_first(self, job: SaveJob) -> None:
        """Returns when rank 0 is through: the directory is gone then, or there is word of one that could not go."""
        deadline, look = time.monotonic() + SAVE_DEADLINE_S, 0.0
        key, number = _through(job)
        while job.root.storage.exists(job.staging.path):
            self._ranks.check()
            if (now := time.monotonic()) > look:
                if self._ranks.posted(key) == number:
                    return
                look = now + 0.25
            if now > deadline:
                raise SaveError(f"rank 0 did not publish step {job.common.global_step} in {SAVE_DEADLINE_S:g} s")
            time.sleep(0.002)

    def expect(self, size: Callable[[], int]) -> None:
        """Asked once how large a snapshot will be (0: not known), has its memory ready before the first one is due."""
        if not self._expecting:
            self._expecting = True
            if (expected := size()) > 0:
                self._snapshot.expect(expected)

    def start(self, job: SaveJob, started: float) -> Underway:
        """Takes the snapshot, and leaves the rest to a thread that gives way to training."""
        job.stage(self._snapshot, self._write_buffers)
        if self._background is None:
            self._background = WriteBuffers(BACKGROUND_WORKERS, background=True)
        buffers = self._background

        def work() -> None:
            lower_priority()
            try:
                underway.commit = job.run(buffers)
                underway.seconds = time.monotonic() - started
                self._after_commit(underway.commit, underway.seconds)
            except BaseException as error:
                underway.error = error
            self._ranks.phase.background = ""

        self._ranks.phase.background = f"saving step {job.common.global_step} in the background"
        thread = threading.Thread(target=work, name=f"{SAVE_THREAD}-{job.common.global_step}", daemon=False)
        underway = Underway(job, thread)
        _unheard[id(underway)] = underway
        thread.start()
        return underway

    def close(self) -> None:
        """Ends the threads."""
        for buffers in (self._buffers, self._background):
            if buffers is not None:
                buffers.close()
        self._buffers = self._background = None

    def _write_buffers(self) -> WriteBuffers:
        if self._buffers is None:
            self._buffers = WriteBuffers()
        return self._buffers


def _through(job: SaveJob) -> tuple[str, str]:
    """The word by which rank 0 says that it is through with a save."""
    return f"through/{job.identity.attempt}", str(job.identity.sequence)
