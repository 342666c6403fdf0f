"""What a run writes beside its checkpoints: the attempt's configuration, metrics.jsonl and ledger.jsonl."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.catalog.lock import RootLock
from perdure.data.record import StreamRecord
from perdure.engine.checkpointer import Checkpointer
from perdure.errors import RootLockedError, UsageError
from perdure.train.history import History, number
from perdure.train.state import TrainerState

__all__ = ["Logbook", "header_of"]

_TAKEN = frozenset(("resumed", "step", "samples", "consumed_samples", "loss", "attempt"))
"""Names by which readers of metrics.jsonl tell its lines apart, and steps."""


def header_of(
    state: TrainerState,
    checkpointer: Checkpointer,
    left_out: Sequence[tuple[int, int]],
    data: StreamRecord,
    moved: Mapping[str, Any],
) -> dict[str, Any]:
    """The line that begins an attempt, or what follows a return to an earlier checkpoint.

    It says from which attempt's save the lines after it go on, at which position, which stream positions the
    run leaves out beside the configured ones (`left_out`), what moved it in the stream on purpose (`moved`), and
    all that decides which sample stands where (`data`).
    """
    loaded = checkpointer.loaded
    goes_on = loaded if loaded is not None and not loaded.weights_only else None
    return {
        "attempt": state.attempt,
        "resumed": checkpointer.parent or None,
        "parent_attempt": goes_on.attempt if goes_on else "",
        "parent_samples": goes_on.progress.consumed_samples if goes_on else 0,
        "lineage": checkpointer.lineage,
        "step": state.global_step,
        "consumed_samples": state.consumed_samples,
        "left_out": [list(pair) for pair in left_out],
        "moved": dict(moved),
        "data": data,
        "time": time.time(),
    }


class Logbook:
    """The histories of one attempt; nothing is written before `open`, nor ever on ranks but the first.

    Args:
        directory: `output_dir`.
        writes: whether this is the rank that writes.
        say: is told when lines must wait for room.
    """

    def __init__(self, directory: str, *, writes: bool, say: Callable[[str], None]) -> None:
        self._directory, self._writes, self._say = os.path.abspath(directory), writes, say
        self._metrics: History | None = None
        self._ledger: History | None = None
        self._held = contextlib.ExitStack()
        self._is_open = False

    def open(self, header: dict[str, Any], config: str, *, attempt: str, locked_already: str | None = None) -> None:
        """Locks `output_dir`, keeps the resolved configuration and begins the histories.

        Args:
            locked_already: a directory that this run holds anyway.

        Raises:
            UsageError: `output_dir`, or a history in it, cannot be written.
            RootLockedError: another run writes there.
        """
        self._is_open = True
        if not self._writes:
            return
        directory = self._directory
        try:
            os.makedirs(directory, exist_ok=True)
            if locked_already is None or os.path.realpath(directory) != os.path.realpath(locked_already):
                self._held.callback(_lock(directory, attempt).release)
            with open(os.path.join(directory, f"config-{attempt}.yaml"), "w", encoding="utf-8") as file:
                file.write(config)
            for name in ("metrics.jsonl", "ledger.jsonl"):
                _check_writable(os.path.join(directory, name))
        except RootLockedError:
            raise
        except OSError as error:
            raise UsageError(
                f"output_dir: {error.filename or directory} cannot be written: {error.strerror}",
                hint="name another output_dir",
            ) from error
        self._metrics = History(os.path.join(directory, "metrics.jsonl"), _without_data(header), warn=self._say)
        self._ledger = History(os.path.join(directory, "ledger.jsonl"), header, digest=True, warn=self._say)
        self._held.callback(self._metrics.close)
        self._held.callback(self._ledger.close)

    def close(self) -> None:
        """Ends the histories and gives `output_dir` back; no save may be under way, whose commit vouches for them."""
        self._is_open = False
        self._metrics = self._ledger = None
        self._held.close()

    def go_on(self, header: dict[str, Any]) -> None:
        """What follows is that of a run which has gone back to an earlier checkpoint."""
        if self._metrics is not None and self._ledger is not None:
            self._metrics.write(_without_data(header))
            self._ledger.write(header)

    def step(self, state: TrainerState, samples: tuple[int, int], id_sum: int, figures: dict[str, Any]) -> None:
        """A step is done; `figures` are those beside what `state` knows."""
        if self._metrics is None or self._ledger is None:
            return
        self._ledger.write(
            {
                "attempt": state.attempt,
                "step": state.global_step,
                "global_batch_size": state.global_batch_size,
                "samples": samples,
                "ids": f"{id_sum:016x}",
            }
        )
        self._metrics.write(
            {
                "step": state.global_step,
                "loss": number(state.loss),
                "learning_rate": state.learning_rate,
                "grad_norm": number(state.grad_norm),
                "global_batch_size": state.global_batch_size,
                "consumed_samples": state.consumed_samples,
                "samples": samples,
                "attempt": state.attempt,
                **figures,
            }
        )

    def figures(self, state: TrainerState, figures: dict[str, float]) -> None:
        """Figures at the present step that not every step has.

        Raises:
            UsageError: the histories are not open, a name is one that readers go by, or a figure is no number.
        """
        if not self._is_open:
            raise UsageError(
                f"figures {', '.join(figures)} have no place in metrics.jsonl: no run is under way",
                hint="call Trainer.log from on_train_begin to on_train_end",
            )
        if taken := _TAKEN & figures.keys():
            raise UsageError(
                f"metrics.jsonl: a figure of one's own cannot be called {min(taken)}, as the lines of steps have it",
                hint=f"name it otherwise: my_{min(taken)}",
            )
        try:
            told = {name: number(float(value)) for name, value in figures.items()}
        except (TypeError, ValueError) as error:
            raise UsageError(f"a figure for metrics.jsonl is no number: {error}") from error
        if self._metrics is not None:
            self._metrics.write({"step": state.global_step, **told, "attempt": state.attempt})

    def sync(self) -> tuple[int, str]:
        """Makes the ledger durable; its length and digest, 0 and "" without one."""
        return self._ledger.sync() if self._ledger is not None else (0, "")


def _without_data(header: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in header.items() if key != "data"}


def _check_writable(path: str) -> None:
    """Raises OSError where a history can never be written; one on a full disk waits for room."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _lock(directory: str, attempt: str) -> RootLock:
    """Two runs must not write one history."""
    try:
        return RootLock.acquire(directory, attempt=attempt)
    except RootLockedError as error:
        raise RootLockedError(
            error.message, hint="wait for it or stop it; or give this run another output_dir"
        ) from None
