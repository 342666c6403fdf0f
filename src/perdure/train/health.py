"""The health of a run, judged step by step from loss and gradient norms: pure, and exact through a resume.

A step is abnormal when

- its loss or gradient norm is not finite (a float16 overflow that the loss scale answers is no fault);
- its loss, or its norm on a logarithmic scale, is a spike: more than `WIDTH` robust deviations above the median of the
  last `WINDOW` steps. Median and median absolute deviation bear outliers, so every finite figure enters the
  window, and a level that has changed for good is accepted after half a window;
- a norm has been above its absolute threshold for `global_norm_skip_time` steps in a row.

All figures are already those of all ranks, so that every rank comes to the same verdict without asking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from perdure.config.schema import HealthCheckpointConfig
from perdure.format.common import HEALTHY, UNHEALTHY

__all__ = ["HealthMonitor", "Verdict", "is_spike"]

WINDOW = 64
FEWEST = 20
"""Steps that must have been seen before a figure can be a spike."""
WIDTH = 8.0
LOSS_FLOOR = 0.02
"""Least deviation of a loss, as a fraction of its median: nothing below 16 % above it is a spike."""
LOG_NORM_FLOOR = 0.25
"""Least deviation of a logarithmic norm: nothing below 7.4 times the usual norm is a spike."""
SETTLED_AFTER = 10
"""Normal steps after which weights that took a spike's update count as healthy again."""


@dataclass(frozen=True)
class Verdict:
    """What a step's figures say.

    Attributes:
        why: what is wrong, in words; empty for a normal step.
        hold: leave the update out.
        go_back: return to a checkpoint from before `onset`.
        onset: stream position at which the present row of suspicious steps began.
        ckpt_status: of a checkpoint that is saved after this step.
    """

    why: str = ""
    hold: bool = False
    go_back: bool = False
    onset: int = 0
    ckpt_status: int = HEALTHY


@dataclass
class HealthMonitor:
    """Judges steps.

    Args:
        limits: the section `monitor.health_checkpoint`.
    """

    limits: HealthCheckpointConfig = field(default_factory=HealthCheckpointConfig)
    losses: list[float] = field(default_factory=list)
    log_norms: list[float] = field(default_factory=list)
    above: int = 0
    onset: int | None = None
    unsettled: int = 0

    def judge(
        self, position: int, loss: float, norm: float, embedding_norm: Callable[[], float], *, overflow: bool = False
    ) -> Verdict:
        """The verdict on a step, before its update.

        Args:
            position: stream position of the step's first sample.
            loss: mean over the global batch.
            norm: global gradient norm before clipping.
            embedding_norm: gives that of the input embedding; asked only where it can be above its threshold.
            overflow: the gradients are not finite because of the loss scale, which is about to shrink.
        """
        why = "" if overflow and math.isfinite(loss) else _not_finite(loss, norm)
        why = why or self._spike(loss, norm)
        high = self._above(norm, embedding_norm)
        self.above = self.above + 1 if high else 0
        if high and self.above >= self.limits.global_norm_skip_time:
            why = why or f"{high} for {self.above} steps in a row"
        if not (why or high):
            self.onset = None
        elif self.onset is None or self.onset > position:
            # A row that begins ahead of the position was seen in data that have begun afresh since.
            self.onset = position
        hold = bool(why) and self.limits.on_spike != "mark"
        self._remember(loss, norm)
        if why and not hold:
            self.unsettled = SETTLED_AFTER
        status = UNHEALTHY if why or self.unsettled else HEALTHY
        if not why:
            self.unsettled = max(0, self.unsettled - 1)
        return Verdict(why, hold, bool(why) and self.limits.on_spike == "rollback", self.onset or 0, status)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs to judge on as if nothing had happened; JSON-able, every number exact."""
        return {
            "losses": list(self.losses),
            "log_norms": list(self.log_norms),
            "above": self.above,
            "onset": self.onset,
            "unsettled": self.unsettled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave; an empty mapping (a checkpoint without) starts afresh."""
        self.losses = [float(value) for value in state.get("losses", ())]
        self.log_norms = [float(value) for value in state.get("log_norms", ())]
        self.above, self.onset = int(state.get("above", 0)), state.get("onset")
        self.unsettled = int(state.get("unsettled", 0))

    def _spike(self, loss: float, norm: float) -> str:
        if math.isfinite(loss) and is_spike(loss, self.losses, LOSS_FLOOR, relative=True):
            return f"its loss {loss:.4g} is a spike above the usual {median(self.losses):.4g}"
        if math.isfinite(norm) and norm > 0 and is_spike(math.log(norm), self.log_norms, LOG_NORM_FLOOR):
            return f"its gradient norm {norm:.4g} is a spike above the usual {math.exp(median(self.log_norms)):.4g}"
        return ""

    def _above(self, norm: float, embedding_norm: Callable[[], float]) -> str:
        limits = self.limits
        if norm > limits.global_norm_skip_threshold:
            return f"its gradient norm was above {limits.global_norm_skip_threshold:g}"
        # A part of the gradient is never longer than the whole, so this is seldom computed.
        if norm > limits.embedding_local_norm_threshold and embedding_norm() > limits.embedding_local_norm_threshold:
            return f"the gradient norm of its embedding was above {limits.embedding_local_norm_threshold:g}"
        return ""

    def _remember(self, loss: float, norm: float) -> None:
        if math.isfinite(loss):
            self.losses = [*self.losses[-WINDOW + 1 :], loss]
        if math.isfinite(norm) and norm > 0:
            self.log_norms = [*self.log_norms[-WINDOW + 1 :], math.log(norm)]


def is_spike(value: float, usual: Sequence[float], floor: float, *, relative: bool = False) -> bool:
    """Whether a figure lies more than `WIDTH` robust deviations above the median of the usual ones.

    Args:
        floor: least deviation that counts; with `relative`, as a fraction of the median's size.
    """
    if len(usual) < FEWEST:
        return False
    middle = median(usual)
    if not value > middle + WIDTH * (floor * abs(middle) if relative else floor):
        return False
    # 1.4826 makes the median absolute deviation of normal figures their standard deviation.
    return value > middle + WIDTH * 1.4826 * median(abs(each - middle) for each in usual)


def _not_finite(loss: float, norm: float) -> str:
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    return "" if math.isfinite(norm) else f"its gradient norm is {norm}"
