"""Several optimizers over disjoint parameter groups that look like one, and Muon with AdamW made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Muon, Optimizer

from perdure.errors import UsageError

__all__ = ["CompositeOptimizer", "MuonWithAdamW", "suits_muon"]


class CompositeOptimizer(Optimizer):
    """One `torch.optim.Optimizer` whose groups are updated by different algorithms.

    Each group says in `algorithm` which part updates it. Groups and state are shared with the parts: `param_groups`
    keeps the order given, `state` is keyed by parameter, and settings changed here are the parts' settings.

    Args:
        param_groups: groups with `algorithm` set to a name of `builders`.
        builders: for each algorithm, what makes its optimizer from its groups.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        builders: Mapping[str, Callable[[list[dict[str, Any]]], Optimizer]],
    ) -> None:
        groups = list(param_groups)
        self.parts: dict[str, Optimizer] = {}
        self._built = False
        for algorithm, build in builders.items():
            own = [group for group in groups if group["algorithm"] == algorithm]
            if own:
                self.parts[algorithm] = build(own)
        remaining = {algorithm: iter(part.param_groups) for algorithm, part in self.parts.items()}
        super().__init__([next(remaining[group["algorithm"]]) for group in groups], {})
        self._built = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let every part update its groups, in the order of the builders."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, part in self.parts.items():
            # Linked at every step, because loading a state dictionary replaces both objects here.
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state
            part.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the part that the group's `algorithm` names.

        Raises:
            UsageError: no part has that name.
        """
        if self._built:
            part = self.parts.get(str(param_group.get("algorithm")))
            if part is None:
                known = ", ".join(self.parts)
                raise UsageError(f"a parameter group names no `algorithm` of this optimizer; it has {known}")
            part.add_param_group(param_group)
            param_group = part.param_groups[-1]
        super().add_param_group(param_group)


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


def suits_muon(name: str, parameter: Tensor, is_embedding: bool) -> bool:
    """Whether Muon's orthogonalised updates make sense for a parameter: a matrix between hidden states, neither an
    embedding nor an output layer (known by name: `lm_head`, `output`, `output_layer`, `head`, `classifier`)."""
    owner = name.rpartition(".")[0].rpartition(".")[2]
    outputs = ("lm_head", "output", "output_layer", "head", "classifier")
    return parameter.ndim == 2 and not is_embedding and owner not in outputs
