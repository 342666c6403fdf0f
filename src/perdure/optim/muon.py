"""Muon: sharded matrices are stepped whole, and AdamW does the rest. Needs a torch that has `torch.optim.Muon`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Muon, Optimizer

from perdure.optim.composite import CompositeOptimizer

__all__ = ["MuonWithAdamW"]


class WholeMuon(Muon):
    """`torch.optim.Muon` that updates sharded matrices whole.

    Orthogonalising needs all of a matrix, so weight, gradient and momentum are gathered, one matrix at a time, stepped
    alike on every rank, and cut again: one gathering instead of several for each product, and the same numbers on any
    number of ranks.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                plain = [p for p in group["params"] if not hasattr(p, "placements")]
                self.param_groups = [{**group, "params": plain}]
                super().step()  # type: ignore[no-untyped-call]
                for parameter in group["params"]:
                    if hasattr(parameter, "placements") and parameter.grad is not None:
                        self._step_whole(group, parameter)
        finally:
            self.param_groups = groups
        return loss

    def _step_whole(self, group: dict[str, Any], parameter: Any) -> None:
        whole: Tensor = parameter.full_tensor()
        whole.grad = parameter.grad.full_tensor()
        kept = self.state[parameter]
        self.state[whole] = {key: value.full_tensor() for key, value in kept.items()}
        self.param_groups = [{**group, "params": [whole]}]
        super().step()  # type: ignore[no-untyped-call]
        for key, value in self.state.pop(whole).items():
            kept[key] = _cut(value, parameter)
        parameter.copy_(_cut(whole, parameter))


def _cut(whole: Tensor, like: Any) -> Tensor:
    """This rank's part of a tensor that every rank has, as a tensor that lies like another."""
    mesh = like.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=like.placements)


class MuonWithAdamW(CompositeOptimizer):
    """`torch.optim.Muon` for the groups with `algorithm: muon`, `torch.optim.AdamW` for those with `algorithm: adamw`.

    One learning rate drives both, so `adjust_lr_fn` defaults to the rule that gives Muon's updates the size of
    AdamW's.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
    ) -> None:
        def build_muon(groups: list[dict[str, Any]]) -> Optimizer:
            return WholeMuon(
                groups,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_coefficients=ns_coefficients,
                eps=eps,
                ns_steps=ns_steps,
                adjust_lr_fn=adjust_lr_fn,
            )

        def build_adamw(groups: list[dict[str, Any]]) -> Optimizer:
            return AdamW(groups, lr=lr, betas=adamw_betas, eps=adamw_eps, weight_decay=weight_decay)

        super().__init__(params, {"muon": build_muon, "adamw": build_adamw})
