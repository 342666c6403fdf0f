"""Saving and resuming for a training loop: what the Trainer uses, and a loop of one's own can."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from torch import nn

from perdure.config.schema import CheckpointConfig
from perdure.engine.base import Base
from perdure.engine.base_load import load_base
from perdure.engine.launcher import check_joined, number_told
from perdure.engine.linked import Linkable
from perdure.engine.live import Live
from perdure.engine.loaded import Loaded
from perdure.engine.prepare import Preparer
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.engine.restore import Restore
from perdure.engine.runner import SaveRunner, Underway
from perdure.engine.same_settings import check_same_config
from perdure.engine.save import SaveJob
from perdure.engine.saveroot import SaveRoot
from perdure.errors import SaveError, UsageError
from perdure.format.commit import CommitRecord
from perdure.storage.base import Storage
from perdure.storage.local import LocalStorage

__all__ = ["Checkpointer", "Loaded"]

Say = Callable[[str], None]
_TOLD_EVERY_S = 1.0  # a rank whose background save still writes says so to those that wait for it


class Checkpointer:
    """Saves a run and finds it again.

    Args:
        config: the `checkpoint` section.
        model: parameters and persistent buffers are saved by fully qualified name.
        optimizer: any torch optimizer; its state is saved by parameter name.
        extra: registered objects with `state_dict` and `load_state_dict`, by name.
        training: called at each save for what else a resume must compare: a dictionary of what JSON can hold.
        restore_settings: a full load restores parameter-group settings as saved.
        tell_loads: say in one line what was loaded, and what of it is worth knowing.
        ranks: the job's ranks (default: torch.distributed if it is initialised).
        storage: where bytes live (default: this machine's file system).
        default_path: stands for an empty `save_path`.
        before_commit: makes the ledger durable; gives its length and digest.
        say: receives one line per event worth telling (default: stderr, on rank 0).

    Raises:
        UnsupportedStateError: a registered object cannot be saved.
        RootLockedError: another living run saves below the same root.
        UsageError: `save_path` cannot be used, or the ranks are not joined or go by different configurations.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        model: nn.Module,
        optimizer: Any = None,
        extra: Mapping[str, Any] | None = None,
        training: Callable[[], dict[str, Any]] = dict,
        restore_settings: bool = True,
        tell_loads: bool = True,
        ranks: Ranks | None = None,
        storage: Storage | None = None,
        default_path: str = "./output/checkpoint",
        attempt: str | None = None,
        before_commit: Callable[[], tuple[int, str]] = lambda: (0, ""),
        say: Say | None = None,
    ) -> None:
        if not isinstance(config, CheckpointConfig):
            raise UsageError(f"config: expected a CheckpointConfig, found {type(config).__name__}")
        self.config = config
        self.ranks = ranks or Ranks()
        check_joined(self.ranks.size)
        check_same_config(config, self.ranks, "checkpoint")
        self.loaded: Loaded | None = None
        self.last_commit: CommitRecord | None = None
        self._last_saved, self._trained_since, self._closed = (-1, -1), False, False
        self.last_stall_s = self.last_save_s = 0.0
        self._say = say or (print_line if self.ranks.is_first else lambda line: None)
        self._restore_settings, self._tell_loads = restore_settings, tell_loads
        self._live = Live(model, optimizer, extra or {})
        self.attempt = attempt or self.ranks.decide(lambda: uuid.uuid4().hex[:12], "agreeing on the attempt")
        self._save_root = SaveRoot(
            config, config.save_path or default_path, storage or self._local(), self.ranks, self.attempt, self._say
        )
        self._base: Base | None = None
        self._links: dict[str, Linkable] = {}
        self._preparer = Preparer(
            config,
            self._live,
            self._save_root,
            self.ranks,
            training=training,
            before_commit=before_commit,
            say=self._say,
        )
        self._runner = SaveRunner(self.ranks, config.staging_bytes, self._after_commit)
        self._underway: Underway | None = None

    @property
    def path(self) -> str:
        """The save root."""
        return self._save_root.root.path

    @property
    def last_saved_step(self) -> int:
        """Step of the save that was started last or loaded; -1 for none, or after one that failed."""
        return self._last_saved[0]

    @property
    def last_save_rate(self) -> float:
        """GiB/s of the last save, over all ranks, from its start to its commit; known on rank 0."""
        size = self.last_commit.size if self.last_commit is not None else 0
        return size / (1 << 30) / self.last_save_s if self.last_save_s else 0.0

    @property
    def lineage(self) -> str:
        """Id of the run, drawn at step 0; empty until `load` or the first save settles it."""
        return self._save_root.lineage

    @property
    def parent(self) -> int:
        """Sequence that the next save descends from; 0 for none."""
        return self._save_root.parent

    # ---- loading

    def load(self, checkpoint_path: str | None = None) -> Progress:
        """Resumes as the configuration says; zero progress on a first start, never a guess.

        Args:
            checkpoint_path: wins over `load_path`.

        Raises:
            CheckpointNotFoundError: a path was given and nothing committed is there.
            MismatchError: the checkpoint is of another model, optimizer or layout; nothing was changed.
            DamagedCheckpointError: the contents are not what was written, and no sound parent is left.
            UsageError: the checkpointer is closed and holds the root no more.
            SaveError: a background save was under way and failed.
        """
        self._check_open()
        self.wait()
        if self.config.base_load_path:
            self._base = load_base(self.config, self._live, self._save_root, self.ranks, self._say)
        self.loaded = loaded = self._restore().run(checkpoint_path)
        self._links = loaded.links if loaded is not None and loaded.root == self.path else {}
        if self._base is not None:
            self._base.settle(loaded.model_tensors if loaded is not None else frozenset())
        if loaded is None:
            self._save_root.start_fresh()
            if self.config.auto_resume and self._live.optimizer is None:
                self._say("warning: there is no optimizer, without which auto_resume will not take up what is saved")
            return Progress()
        if loaded.weights_only:
            self._save_root.start_fresh()
        else:
            self._save_root.go_on_from(loaded.root, loaded.path, loaded.lineage, loaded.sequence)
            if loaded.sequence and loaded.root == self.path:
                self._last_saved, self._trained_since = _position(loaded.progress), False
            self._expect_save()
        self._save_root.event(
            "load", path=loaded.path, step=loaded.progress.global_step, sequence=loaded.sequence, notes=loaded.notes
        )
        progress = Progress() if loaded.weights_only else loaded.progress
        if self._tell_loads:
            self._say(loaded.told(f"step {progress.global_step}, sample {progress.consumed_samples}", ()))
        return progress

    def go_back(self, position: int, **why: Any) -> Progress | None:
        """Loads the newest healthy checkpoint of this run from before a stream position; the run goes on from there.

        What was saved after it stays on disk as a branch, as after `perdure rewind`.

        Args:
            position: first sample that the checkpoint must not have seen.
            why: goes into the event.

        Returns:
            The position to go on from; None, and nothing has changed, where there is no such checkpoint.

        Raises:
            SaveError: a background save was under way and failed.
        """
        self.wait()

        def find() -> str:
            found = self._save_root.earlier(position)
            return found.dirname if found is not None else ""

        dirname = self.ranks.decide(find, "looking for an earlier checkpoint", str)
        if not dirname:
            return None
        self.loaded = loaded = self._restore().again(dirname)
        step = loaded.progress.global_step
        self.ranks.together(lambda: self._save_root.go_back_to(step, loaded.sequence), "moving the tracker")
        self._last_saved, self._trained_since = _position(loaded.progress), False
        self._links = loaded.links
        self._save_root.event("rollback", to=step, sequence=loaded.sequence, **why)
        return loaded.progress

    def _restore(self) -> Restore:
        return Restore(
            self.config,
            self._live,
            self._save_root,
            self.ranks,
            restore_settings=self._restore_settings,
            say=self._say,
            base=self._base,
        )

    def note(self, event: str, **fields: Any) -> None:
        """Appends an event to the root's events.jsonl, on rank 0 and where saving is enabled; never fails a run."""
        self._save_root.event(event, **fields)

    # ---- saving

    def step(self, progress: Progress) -> bool:
        """To be called after each optimizer step: saves when one is due, surfaces errors of background saves.

        Saves never overlap: one that falls due while another is under way waits for it.
        Returns whether a save was started.

        Raises:
            SaveError: this or an earlier save failed (with `on_save_error: warn` it is said and the run goes on).
        """
        self.poll()
        # Data begun afresh with another batch size come by the same step and position once more.
        self._trained_since |= _position(progress) != self._last_saved
        due = progress.global_step % self.config.save_interleaved_steps == 0 and progress.global_step > 0
        if not due:
            self._expect_save()
        return self.config.enable_save and due and self.save(progress)

    def save(self, progress: Progress, *, wait: bool | None = None) -> bool:
        """Saves now; a step that was just saved or loaded is not saved again.

        Args:
            wait: return only when the commit is visible (default: unless `async_save`).

        Raises:
            UsageError: the checkpointer is closed and holds the root no more, or a number of `progress` cannot be.
            RanksError: the ranks are at different places.
        """
        self._check_open()
        saved_already = _position(progress) == self._last_saved and not self._trained_since
        if not self.config.enable_save or saved_already:
            if wait:
                self.wait()
            return False
        self.wait()
        if not self._save_root.started:
            self._save_root.start_fresh()
        started = time.monotonic()
        job: SaveJob | None = None
        try:
            job = self._preparer.job(progress, self._base, self._links)
            self._last_saved, self._trained_since = _position(progress), False
            background = self.config.async_save if wait is None else not wait
            if background:
                self._underway = self._runner.start(job, started)
            else:
                commit = self._runner.run(job)
                seconds = time.monotonic() - started
                self._settle(job, commit, seconds)
                self._after_commit(commit, seconds)
        except SaveError as error:
            self._failed(error, job)
        except BaseException:
            # Ctrl-C, say: whoever catches it and saves again means it.
            self._not_saved(job)
            raise
        self.last_stall_s = time.monotonic() - started
        return True

    def _expect_save(self) -> None:
        """The state is complete: the memory of a first snapshot is made ready behind training, where one is to come."""
        if self.config.enable_save and self.config.async_save:
            self._runner.expect(self._preparer.expected_bytes)

    def poll(self) -> None:
        """Takes note of a background save that has ended; raises what it raised, on every rank.

        A job of several ranks exchanges one small message here while a save is under way.
        """
        if self._underway is None:
            return
        done = not self._underway.thread.is_alive()
        if all(self.ranks.gather(done, "polling the background save")):
            self._finish_underway()

    def wait(self) -> None:
        """Waits for the save under way, if there is one; raises what it raised."""
        while self._underway is not None:
            # One rank may have far longer to write than an exchange may take.
            self._underway.thread.join(_TOLD_EVERY_S)
            self.poll()

    def close(self) -> None:
        """Waits for the save under way and gives the root back."""
        try:
            self.wait()
        finally:
            self._release()
        self.ranks.leave()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.ranks.failed(error)
        # The first error is the one to be told; a save under way is still let finish.
        if self._underway is not None and (failed := self._underway.outcome()) is not None:
            self._say(f"warning: {failed}")
        self._release()

    def _finish_underway(self) -> None:
        underway, self._underway = self._underway, None
        if underway is None:
            return
        try:
            self.ranks.agree(underway.outcome(), f"saving step {underway.job.common.global_step}")
            self._settle(underway.job, underway.commit, underway.seconds)
        except SaveError as error:
            self._failed(error, underway.job)

    def _settle(self, job: SaveJob, commit: CommitRecord | None, seconds: float) -> None:
        """A save is committed: the numbers move on."""
        self._save_root.parent, self._links = job.identity.sequence, job.linkable
        self.last_save_s, self.last_commit = seconds, commit

    def _after_commit(self, commit: CommitRecord | None, seconds: float) -> None:
        """On rank 0: the commit is told, and old iterations go."""
        if commit is None:
            return
        self._save_root.event(
            "save",
            step=commit.iteration,
            sequence=commit.sequence,
            parent=commit.parent,
            bytes=commit.size,
            seconds=round(seconds, 3),
        )
        self._save_root.retain()

    def _failed(self, error: SaveError, job: SaveJob | None) -> None:
        self._not_saved(job)
        self._save_root.event("save_failed", why=error.message)
        if self.config.on_save_error == "warn":
            self._say(f"warning: {error.message}; the run goes on without it (on_save_error: warn)")
            return
        raise error

    def _not_saved(self, job: SaveJob | None) -> None:
        self._last_saved = (-1, -1)
        if job is not None and job.staging.published:
            self._save_root.parent = job.identity.sequence

    # ---- the root, and whose it is

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(
                f"the checkpointer of {self.path} is closed",
                hint="load and save within its `with` block, or make another one",
            )

    def _local(self) -> LocalStorage:
        """This machine's file system; several ranks of it that hold the same whole tensors read the same."""
        here = number_told("LOCAL_WORLD_SIZE", least=1) or self.ranks.size
        whole = not any(hasattr(p, "placements") for p in self._live.model.parameters())
        # Two reading all past the page cache are still as fast as two reading through it.
        return LocalStorage(shared_reads=here > 2 and whole and not self.config.load_balanced)

    def _release(self) -> None:
        self._closed = True
        self._runner.close()
        self._save_root.release()


def _position(progress: Progress) -> tuple[int, int]:
    """What tells two states of a run apart: after a change of the batch size the step alone doesn't."""
    if not isinstance(progress, Progress):
        raise UsageError(f"progress: expected a Progress, as load() gives it, found {type(progress).__name__}")
    return progress.global_step, progress.consumed_samples


def print_line(line: str) -> None:
    """One line on stderr, where there is one: a terminal or pipe that has gone ends no run."""
    stream: TextIO | None = sys.stderr
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.write(f"{line}\n")
            stream.flush()
