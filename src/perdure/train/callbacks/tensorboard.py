"""Figures of a run as TensorBoard event files."""

from __future__ import annotations

import importlib.util
from typing import Any

from perdure.errors import UsageError
from perdure.train.callbacks.base import Callback
from perdure.train.state import TrainerState

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes event files, on the first rank.

    Steps that a resume or a return to an earlier checkpoint does again replace their first entries.

    Args:
        output_dir: where event files go.
        log_interval: steps between two entries.
        queue_size: entries held before they are written.

    Raises:
        UsageError: the tensorboard package is not installed.
    """

    def __init__(self, output_dir: str, log_interval: int = 1, queue_size: int = 1000) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise UsageError(
                "monitor.tensorboard: the tensorboard package is not installed",
                hint="pip install 'perdure[tensorboard]', or leave monitor.tensorboard.output_dir empty",
            )
        self._directory, self._interval, self._queue = output_dir, log_interval, queue_size
        self._writer: Any = None

    def on_train_begin(self, trainer: Any, state: TrainerState) -> None:
        self._open(trainer, state)

    def on_rollback(self, trainer: Any, state: TrainerState) -> None:
        self._close()
        self._open(trainer, state)

    def on_step_end(self, trainer: Any, state: TrainerState) -> None:
        if self._writer is None or state.global_step % self._interval:
            return
        figures = {
            "train/loss": state.loss,
            "train/learning_rate": state.learning_rate,
            "train/grad_norm": state.grad_norm,
            "train/global_batch_size": state.global_batch_size,
            "train/loss_scale": state.loss_scale,
            "train/skipped_steps": state.skipped_steps,
            "data/consumed_samples": state.consumed_samples,
            **{f"speed/{name}": value for name, value in trainer.figures.items()},
        }
        for name, value in figures.items():
            self._writer.add_scalar(name, value, state.global_step)

    def on_evaluate(self, trainer: Any, state: TrainerState) -> None:
        if self._writer is not None:
            self._writer.add_scalar("eval/loss", state.eval_loss, state.global_step)

    def on_train_end(self, trainer: Any, state: TrainerState) -> None:
        self._close()

    def _open(self, trainer: Any, state: TrainerState) -> None:
        if not trainer.ranks.is_first:
            return
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._directory, purge_step=state.global_step + 1, max_queue=self._queue)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
