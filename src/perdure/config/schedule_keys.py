"""The keys that each learning-rate schedule takes besides `type`, `learning_rate` and `by`."""

from __future__ import annotations

from typing import Any

from perdure.config.kinds import Count, Milestones, Nonnegative, Positive, Ratio

__all__ = ["KEY_KINDS", "REQUIRED", "SCHEDULE_KEYS"]

_WARM_UP = ("total_steps", "warmup_steps", "warmup_ratio", "warmup_lr_init")
_DECAY = (*_WARM_UP, "decay_steps", "decay_ratio", "lr_end")
_ANNEALING = ("total_steps", "base_lr", "eta_min")

SCHEDULE_KEYS: dict[str, tuple[str, ...]] = {
    "ConstantWarmUpLR": _WARM_UP,
    "LinearWithWarmUpLR": _WARM_UP,
    "CosineWithWarmUpLR": (*_DECAY, "num_cycles"),
    "CosineWithRestartsAndWarmUpLR": (*_DECAY, "num_cycles"),
    "PolynomialWithWarmUpLR": (*_DECAY, "power"),
    "ConstantWithCoolDownLR": (
        *_WARM_UP, "keep_steps", "decay_steps", "decay_ratio", "num_cycles", "lr_end1", "final_steps", "lr_end2"
    ),
    "WarmUpStableDecayLR": (*_WARM_UP, "decay_start_steps", "decay_start_ratio", "lr_end"),
    "StepMilestonesLR": (*_WARM_UP, "milestones", "gamma"),
    "CosineAnnealingLR": (*_ANNEALING, "t_max"),
    "CosineAnnealingWarmRestarts": (*_ANNEALING, "t_0", "t_mult"),
}  # fmt: skip

REQUIRED: dict[str, tuple[str, ...]] = {
    "WarmUpStableDecayLR": ("decay_start_steps", "decay_start_ratio"),
    "StepMilestonesLR": ("milestones",),
    "CosineAnnealingWarmRestarts": ("t_0",),
}
"""Of these one must be given."""

KEY_KINDS: dict[str, Any] = {
    "total_steps": Positive,
    "warmup_steps": Count,
    "warmup_ratio": Ratio,
    "warmup_lr_init": Nonnegative,
    "decay_steps": Count,
    "decay_ratio": Ratio,
    "decay_start_steps": Count,
    "decay_start_ratio": Ratio,
    "keep_steps": Count,
    "final_steps": Count,
    "lr_end": Nonnegative,
    "lr_end1": Nonnegative,
    "lr_end2": Nonnegative,
    "num_cycles": Nonnegative,
    "power": Nonnegative,
    "milestones": Milestones,
    "gamma": Nonnegative,
    "base_lr": Nonnegative,
    "eta_min": Nonnegative,
    "t_max": Positive,
    "t_0": Positive,
    "t_mult": Positive,
}
"""The kind of each key's value; null everywhere means not given."""
