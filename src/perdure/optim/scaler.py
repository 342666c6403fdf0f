"""The loss scale of float16 training: two numbers, and exactly how they move."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perdure.errors import UsageError
from perdure.format.common import SCALE_LIMIT

__all__ = ["LossScaler"]


class LossScaler:
    """A factor on the loss that keeps small float16 gradients from vanishing.

    Dynamic: a step with a non-finite gradient is not applied and multiplies the scale by `backoff_factor`;
    `growth_interval` finite steps in a row multiply it by `growth_factor`, both as far as float32 holds it. This is
    the rule of `torch.amp.GradScaler`, with the state in two plain numbers. Static (`dynamic=False`): the scale never
    moves, and 1.0 leaves loss and gradients untouched. The caller divides gradients by the scale.

    Attributes:
        scale: the current factor, `loss_scale` of common.json.
        good_steps: finite steps in a row since the scale last moved, the growth counter of metadata.json.
    """

    def __init__(
        self,
        *,
        dynamic: bool = True,
        scale: float | None = None,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if growth_factor <= 1.0 or not 0.0 < backoff_factor < 1.0 or growth_interval < 1:
            raise UsageError("a loss scale needs growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1")
        self.dynamic = dynamic
        self.scale = float((65536.0 if dynamic else 1.0) if scale is None else scale)
        self.good_steps = 0
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval

    @classmethod
    def for_dtypes(cls, *dtypes: str | torch.dtype | None) -> LossScaler:
        """Dynamic when any of the dtypes (parameters, computation) is float16; else static at 1.0."""
        return cls(dynamic=any(dtype in ("float16", torch.float16) for dtype in dtypes))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss if self.scale == 1.0 else loss * self.scale

    def update(self, finite: bool) -> None:
        """Move the scale after a step: `finite` is what all ranks agreed on."""
        if not self.dynamic:
            return
        if not finite:
            self.scale = max(self.scale * self.backoff_factor, 1.0 / SCALE_LIMIT)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            grown = self.scale * self.growth_factor
            self.scale = grown if grown < SCALE_LIMIT else self.scale
            self.good_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """`{"scale": float, "good_steps": int}`; all there is to restore."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave. A static scaler keeps its own scale: its configuration says what it is."""
        if self.dynamic:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
