"""Where a run stands: what the Trainer, its callbacks and its caller look at."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.engine.progress import Progress
from perdure.errors import TrainingError

__all__ = ["TrainerState"]


@dataclass
class TrainerState(Progress):
    """A run's position and its last step.

    Attributes:
        steps: the target, `training.steps`.
        attempt: id of this start of the command.
        loss: of the last step, per valid token (or sample); NaN before the first.
        grad_norm: global gradient norm of the last step before clipping.
        learning_rate: that the last step used.
        eval_loss: of the last evaluation; NaN before the first.
        skipped_steps: updates left out because the gradients were not finite.
        consecutive_skipped_steps: of those, in a row until now.
        stop_signal: number of the signal that ended the run; 0 otherwise.
    """

    steps: int = 0
    attempt: str = ""
    loss: float = float("nan")
    grad_norm: float = float("nan")
    learning_rate: float = 0.0
    eval_loss: float = float("nan")
    skipped_steps: int = 0
    consecutive_skipped_steps: int = 0
    stop_signal: int = 0

    def count_update(self, applied: bool, limit: int = 0) -> None:
        """An update was applied, or left out.

        Raises:
            TrainingError: `limit` updates (0: any number) have been left out in a row.
        """
        self.skipped_steps += not applied
        self.consecutive_skipped_steps = 0 if applied else self.consecutive_skipped_steps + 1
        if limit and self.consecutive_skipped_steps >= limit:
            raise TrainingError(
                f"step {self.global_step}: updates were left out {limit} times in a row because gradients were not "
                "finite or spiked",
                hint="resume from an earlier iteration with a lower learning rate, or with training.skip_ranges",
            )

    @property
    def finished(self) -> bool:
        """Whether the target is reached."""
        return self.global_step >= self.steps
