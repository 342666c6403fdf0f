"""The learning rate as a pure function of the step: closed forms, plain Python floats, no state.

A schedule is called with the 0-based step s (the first update uses s = 0), which may be a fraction: with
`by: samples` it is `consumed_samples / global_batch_size`. Two processes that agree on configuration and step agree on
every bit of the rate, however they got there.

Each class below is one `type`; its fields are the keys that the type takes. Common to all but the two annealing ones:
for s < w the rate is `warmup_lr_init + (peak - warmup_lr_init) · s/w`, where `peak` is `learning_rate` and w is
`warmup_steps`. A `*_ratio` times the total replaces the `*_steps` value, rounded down to a whole step.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from perdure.errors import UsageError
from perdure.importing import KeyFaults, accepted_keys, check_keys, resolve, section_keys

__all__ = ["SCHEDULES", "Schedule", "build_schedule"]


@dataclass(frozen=True)
class Schedule:
    """The rate of a run. `schedule(s)` is the rate of the update that starts at step s.

    Attributes:
        type: the `lr_scheduler.type` it was built from.
        by: `steps` or `samples`.
        settings: everything that the rate depends on, JSON-able; two runs with equal settings have equal rates.
    """

    type: str
    by: str
    settings: dict[str, Any]
    formula: Callable[[float], float]

    def __call__(self, step: float) -> float:
        return float(self.formula(step))

    def rate(self, *, global_step: int, consumed_samples: int, global_batch_size: int) -> float:
        """The rate at a point of the run, following whichever of step and samples `by` names."""
        return self(consumed_samples / global_batch_size if self.by == "samples" else global_step)


@dataclass(frozen=True, kw_only=True)
class _WarmUp:
    learning_rate: float = 1e-5
    total_steps: int
    warmup_steps: float = 0
    warmup_ratio: float | None = None
    warmup_lr_init: float = 0.0

    def __post_init__(self) -> None:
        self._settle("warmup")

    def _settle(self, name: str, default: float | None = None) -> None:
        """Fix `<name>_steps`: from `<name>_ratio` where given, else as given, else the default."""
        ratio, steps = getattr(self, f"{name}_ratio"), getattr(self, f"{name}_steps")
        if ratio is not None:
            # The tiny term keeps 0.29 × 100 = 28.999999999999996 a whole 29.
            steps = math.floor(ratio * self.total_steps + 1e-9)
        object.__setattr__(self, f"{name}_steps", default if steps is None else steps)

    def __call__(self, step: float) -> float:
        if step < self.warmup_steps:
            return self.warmup_lr_init + (self.learning_rate - self.warmup_lr_init) * (step / self.warmup_steps)
        return self.after_warm_up(step)

    def after_warm_up(self, step: float) -> float:
        """The rate at a step >= warmup_steps."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ConstantWarmUpLR(_WarmUp):
    """The peak."""

    def after_warm_up(self, step: float) -> float:
        return self.learning_rate


@dataclass(frozen=True, kw_only=True)
class LinearWithWarmUpLR(_WarmUp):
    """A line from the peak at w to 0 at the total."""

    def after_warm_up(self, step: float) -> float:
        if step >= self.total_steps:
            return 0.0
        return self.learning_rate * ((self.total_steps - step) / (self.total_steps - self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class _Decay(_WarmUp):
    """From the peak at w to `lr_end` at d = `decay_steps` (default the total), and `lr_end` from there on."""

    decay_steps: float | None = None
    decay_ratio: float | None = None
    lr_end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle("decay", default=self.total_steps)

    def after_warm_up(self, step: float) -> float:
        assert self.decay_steps is not None
        # Also what keeps d <= w from dividing by zero.
        if step >= self.decay_steps:
            return self.lr_end
        share = self.share((step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return self.lr_end + (self.learning_rate - self.lr_end) * share

    def share(self, progress: float) -> float:
        """How much of (peak - lr_end) is left at a progress in [0, 1)."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class CosineWithWarmUpLR(_Decay):
    """`num_cycles` cosine waves; the default half wave falls from the peak to `lr_end`."""

    num_cycles: float = 0.5

    def share(self, progress: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_cycles * progress)))


@dataclass(frozen=True, kw_only=True)
class CosineWithRestartsAndWarmUpLR(_Decay):
    """`num_cycles` falling half waves, each starting at the peak again."""

    num_cycles: float = 1.0

    def share(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * ((self.num_cycles * progress) % 1.0)))


@dataclass(frozen=True, kw_only=True)
class PolynomialWithWarmUpLR(_Decay):
    """(1 - progress) to the `power`."""

    lr_end: float = 1e-7
    power: float = 1.0

    def share(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


@dataclass(frozen=True, kw_only=True)
class ConstantWithCoolDownLR(_WarmUp):
    """The peak for `keep_steps`; a cosine to `lr_end1` over `decay_steps` (default: what the other phases leave of
    the total); `lr_end1` for `final_steps`; then `lr_end2` (default `lr_end1`)."""

    keep_steps: float = 0
    decay_steps: float | None = None
    decay_ratio: float | None = None
    num_cycles: float = 0.5
    lr_end1: float = 0.0
    final_steps: float = 0
    lr_end2: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = self.total_steps - self.warmup_steps - self.keep_steps - self.final_steps
        self._settle("decay", default=max(0, rest))

    def after_warm_up(self, step: float) -> float:
        assert self.decay_steps is not None
        since = step - self.warmup_steps - self.keep_steps
        if since < 0:
            return self.learning_rate
        if since < self.decay_steps:
            share = max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * self.num_cycles * (since / self.decay_steps))))
            return self.lr_end1 + (self.learning_rate - self.lr_end1) * share
        if since < self.decay_steps + self.final_steps or self.lr_end2 is None:
            return self.lr_end1
        return self.lr_end2


@dataclass(frozen=True, kw_only=True)
class WarmUpStableDecayLR(_WarmUp):
    """The peak until `decay_start_steps`, a line to `lr_end` at the total, then `lr_end`."""

    decay_start_steps: float | None = None
    decay_start_ratio: float | None = None
    lr_end: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay_start_steps is None and self.decay_start_ratio is None:
            text = "missing, WarmUpStableDecayLR requires it (or decay_start_ratio)"
            raise KeyFaults([("lr_scheduler.decay_start_steps", text)])
        self._settle("decay_start")

    def after_warm_up(self, step: float) -> float:
        assert self.decay_start_steps is not None
        if step >= self.total_steps:
            return self.lr_end
        if step < self.decay_start_steps:
            return self.learning_rate
        fallen = (step - self.decay_start_steps) / (self.total_steps - self.decay_start_steps)
        return self.learning_rate + (self.lr_end - self.learning_rate) * fallen


@dataclass(frozen=True, kw_only=True)
class StepMilestonesLR(_WarmUp):
    """The peak times `gamma` for every milestone reached (s >= milestone)."""

    milestones: list[float]
    gamma: float = 0.1

    def after_warm_up(self, step: float) -> float:
        return float(self.learning_rate * self.gamma ** bisect.bisect_right(sorted(self.milestones), step))


@dataclass(frozen=True, kw_only=True)
class CosineAnnealingLR:
    """A cosine from `base_lr` (default `learning_rate`) to `eta_min` at `t_max` (default the total), and up again."""

    learning_rate: float = 1e-5
    total_steps: int
    base_lr: float | None = None
    t_max: float | None = None
    eta_min: float = 0.0

    def __call__(self, step: float) -> float:
        base = self.learning_rate if self.base_lr is None else self.base_lr
        period = self.total_steps if self.t_max is None else self.t_max
        return self.eta_min + (base - self.eta_min) * 0.5 * (1.0 + math.cos(math.pi * step / period))


@dataclass(frozen=True, kw_only=True)
class CosineAnnealingWarmRestarts:
    """The same fall within periods of t_0, t_0·t_mult, t_0·t_mult², … steps."""

    learning_rate: float = 1e-5
    total_steps: int
    t_0: float
    t_mult: int = 1
    base_lr: float | None = None
    eta_min: float = 0.0

    def __call__(self, step: float) -> float:
        base = self.learning_rate if self.base_lr is None else self.base_lr
        start, period = 0.0, float(self.t_0)
        if self.t_mult == 1:
            start = step // self.t_0 * self.t_0
        # Periods grow geometrically, so this takes log(step) turns; a logarithm would round at the boundaries.
        while self.t_mult > 1 and step >= start + period:
            start, period = start + period, period * self.t_mult
        return self.eta_min + (base - self.eta_min) * 0.5 * (1.0 + math.cos(math.pi * (step - start) / period))


SCHEDULES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        ConstantWarmUpLR,
        LinearWithWarmUpLR,
        CosineWithWarmUpLR,
        CosineWithRestartsAndWarmUpLR,
        PolynomialWithWarmUpLR,
        ConstantWithCoolDownLR,
        WarmUpStableDecayLR,
        StepMilestonesLR,
        CosineAnnealingLR,
        CosineAnnealingWarmRestarts,
    )
}
"""Schedule types by name. An import path names a function of the same manner: keys in, a function of the step out."""


def build_schedule(section: Any, total_steps: int) -> Schedule:
    """Build the schedule that an `lr_scheduler:` section describes.

    Args:
        section: a mapping or `perdure.config`'s LRSchedulerConfig. Beside a registered name, `type` may be an import
            path; what it names is called with the section's keys (and `learning_rate` and `total_steps` where it takes
            them) and returns a function of the step.
        total_steps: `training.steps`; `lr_scheduler.total_steps` wins over it.

    Raises:
        KeyFaults: unknown type, keys that the type does not take, values out of range; all in one go.
    """
    values, written = section_keys(section)
    values = {key: value for key, value in values.items() if value is not None}
    name, by = str(values.pop("type", "")), str(values.pop("by", "steps"))
    values.setdefault("total_steps", total_steps)
    constructor = resolve(name, SCHEDULES, key="lr_scheduler.type")
    accepted = accepted_keys(constructor)
    keys = {k: v for k, v in values.items() if k in written or accepted is None or k in accepted}
    if "total_steps" not in written and accepted is not None and "total_steps" not in accepted:
        keys.pop("total_steps", None)

    faults = check_keys(constructor, keys)
    if by not in ("steps", "samples"):
        faults.append(("by", f"`{by}` is neither `steps` nor `samples`"))
    if name in SCHEDULES:
        faults += [fault for key, value in keys.items() if (fault := _value_fault(key, value)) is not None]
    if faults:
        raise KeyFaults([(f"lr_scheduler.{key}", text) for key, text in faults])
    formula = constructor(**keys)
    if not callable(formula) or hasattr(formula, "optimizer"):
        raise UsageError(
            f"lr_scheduler.type: `{name}` gave a {type(formula).__name__}, not a function of the step",
            hint="return a function that takes the 0-based step and returns the rate",
        )
    settings = asdict(formula) if is_dataclass(formula) and not isinstance(formula, type) else dict(keys)
    return Schedule(name, by, {"type": name, "by": by, **settings}, formula)


_AT_LEAST_ONE = ("total_steps", "t_max", "t_0", "t_mult")
_NON_NEGATIVE = ("learning_rate", "base_lr", "warmup_lr_init", "lr_end", "lr_end1", "lr_end2", "eta_min", "gamma")


def _value_fault(key: str, value: Any) -> tuple[str, str] | None:
    if key == "milestones":
        if isinstance(value, (list, tuple)) and all(_is_number(each) and each >= 0 for each in value):
            return None
        return key, f"{value!r} is not a list of steps"
    if not _is_number(value):
        return key, f"{value!r} is not a finite number"
    if key in _AT_LEAST_ONE and value < 1:
        return key, f"{value} is less than 1"
    if key.endswith("_ratio") and not 0.0 <= value <= 1.0:
        return key, f"{value} is not in [0, 1]"
    if value < 0 and (key.endswith("_steps") or key in _NON_NEGATIVE):
        return key, f"{value} is negative"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
