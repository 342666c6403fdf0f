"""What a callback may do, and how the configuration names one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.errors import PerdureError, TrainingError

if TYPE_CHECKING:
    from perdure.train.state import TrainerState

__all__ = ["Callback", "call_hooks"]


class Callback:
    """Override what you need. Hooks run on every rank, in the order in which callbacks are listed.

    After a resume from step k no hook runs for step k again. A callback that has `state_dict` and
    `load_state_dict` is saved and restored with the run.
    """

    def on_build(self, trainer: Any, state: TrainerState) -> None:
        """Model, optimizer and data are built, and nothing is loaded yet."""

    def on_train_begin(self, trainer: Any, state: TrainerState) -> None:
        """Model, optimizer and data are built and, on a resume, loaded."""

    def on_step_begin(self, trainer: Any, state: TrainerState) -> None:
        """A step is about to run; `state.global_step` counts the steps done."""

    def on_step_end(self, trainer: Any, state: TrainerState) -> None:
        """A step is done, and neither evaluated nor saved yet."""

    def on_evaluate(self, trainer: Any, state: TrainerState) -> None:
        """The run has evaluated the step that is done, and not yet saved it: `state.eval_loss`.

        One that a signal stopped at such a step evaluates when it goes on, before anything else.
        """

    def on_save(self, trainer: Any, state: TrainerState) -> None:
        """A save of this step was started (or, without `async_save`, is committed)."""

    def on_rollback(self, trainer: Any, state: TrainerState) -> None:
        """The run has gone back to an earlier checkpoint; `state` is what it holds, no step having run since."""

    def on_train_end(self, trainer: Any, state: TrainerState) -> None:
        """The run ends: its target is reached, or it was asked to stop."""


def call_hooks(callbacks: Sequence[Callback], name: str, trainer: Any, state: TrainerState) -> None:
    """Calls one hook of each callback, in order.

    Raises:
        TrainingError: a callback failed; it is named, and the step.
    """
    for callback in callbacks:
        try:
            getattr(callback, name)(trainer, state)
        except PerdureError:
            raise
        except Exception as error:
            raise TrainingError(
                f"callback {type(callback).__name__}.{name} failed at step {state.global_step}: "
                f"{type(error).__name__}: {error}"
            ) from error
