"""FP32 master weights: the optimizer works in float32, the model holds the rounding.

For every bfloat16 or float16 parameter p there is a master m in float32. Gradients are summed in float32, the inner
optimizer sees and updates m only, and after each step p = round(m). A float32 (or float64) parameter is its own
master. The invariant `cast(m) == p` holds after construction, after every step and after every complete load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from perdure.errors import UsageError

__all__ = ["MixedPrecisionOptimizer", "needs_master"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def needs_master(parameter: Tensor) -> bool:
    """Whether a parameter is held in a dtype too coarse to be updated in."""
    return parameter.dtype in _LOW_PRECISION


class MixedPrecisionOptimizer(Optimizer):
    """A `torch.optim.Optimizer` over low-precision parameters whose arithmetic is all float32.

    It looks like an optimizer over the *model's* parameters: `param_groups` list them, `state[p]` is the state of p
    (moments in float32, held by the inner optimizer under p's master). Settings are changed in `param_groups` here and
    reach the inner optimizer at the next step.

    Gradients: with `hooks`, each micro-batch's gradient moves out of `p.grad` into a float32 sum as soon as it is
    complete, and `p.grad` is None after `backward`. Without (under DistributedDataParallel, which still
    needs `p.grad` then), call `accumulate_grads()` after each `backward`. Either way clip and check `grads()`, never
    `p.grad`.

    Args:
        param_groups: as for `torch.optim`: dictionaries with `params` and settings.
        build_inner: makes the inner optimizer from the same groups with masters in place of parameters.
        hooks: move gradients by hooks on the parameters.

    Attributes:
        inner: the optimizer that holds and updates the masters.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        build_inner: Callable[[list[dict[str, Any]]], Optimizer],
        *,
        hooks: bool = True,
    ) -> None:
        self._masters: dict[Tensor, Tensor] = {}
        self._hooks = hooks
        self._built = False
        groups = [{**group, "params": list(group["params"])} for group in param_groups]
        self.inner = build_inner([self._with_masters(group) for group in groups])
        resolved = [
            {**inner, "params": group["params"]} for inner, group in zip(self.inner.param_groups, groups, strict=True)
        ]
        super().__init__(resolved, {})
        self.state = _StateByParameter(self)  # type: ignore[assignment]
        self._built = True

    def main_param_of(self, parameter: Tensor) -> Tensor | None:
        """The float32 master of a parameter, or None for one that is its own master."""
        return self._masters.get(parameter)

    def main_params(self) -> dict[Tensor, Tensor]:
        """Every low-precision parameter with its master."""
        return dict(self._masters)

    @torch.no_grad()
    def reload_main_params_from_model(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Set masters to the exact values of their parameters, as after loading weights only.

        Args:
            parameters: only these (for instance those whose master was not in a checkpoint); default all.
        """
        for parameter in self._masters if parameters is None else parameters:
            if parameter in self._masters:
                self._masters[parameter].copy_(parameter)

    @torch.no_grad()
    def copy_main_params_to_model(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Set low-precision parameters to the rounding of their masters.

        Args:
            parameters: only these; default all.
        """
        for parameter in self._masters if parameters is None else parameters:
            if parameter in self._masters:
                parameter.copy_(self._masters[parameter])

    @torch.no_grad()
    def check_alignment(self) -> list[str]:
        """Names of parameters that differ in any bit from the rounding of their master; empty when all is well.

        Compares this rank's part. Names are those of the groups' `param_names`, or `group.index` where there are none.
        """
        differing = []
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                master = self._masters.get(parameter)
                if master is None:
                    continue
                rounded, held = _local(master).to(parameter.dtype), _local(parameter)
                if not torch.equal(rounded.view(torch.int16), held.detach().view(torch.int16)):
                    differing.append(str(name))
        return differing

    @torch.no_grad()
    def accumulate_grads(self) -> None:
        """Add what lies in low-precision `p.grad` to the float32 sums and clear it. Without new gradients: nothing."""
        for parameter in self._masters:
            self._take_grad(parameter)

    def grads(self) -> list[Tensor]:
        """The gradients that the next step will use, to be clipped and checked in place: float32 sums of
        low-precision parameters, `p.grad` of the others; parameters without a gradient are left out."""
        self.accumulate_grads()
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = _reduced(parameter)
        owners = (self._masters.get(p, p) for p in parameters)
        return [owner.grad for owner in owners if owner.grad is not None]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update masters by the inner optimizer, then set the parameters to their rounding.

        Raises:
            UsageError: a closure is passed; it would compute gradients that bypass the masters.
        """
        if closure is not None:
            raise UsageError("an optimizer with FP32 master weights takes no closure in step()")
        self.accumulate_grads()
        self._copy_settings(self.param_groups, self.inner.param_groups)
        self.inner.step()
        # Some optimizers keep counters in their groups.
        self._copy_settings(self.inner.param_groups, self.param_groups)
        for parameter, master in self._masters.items():
            if master.grad is not None:
                parameter.copy_(master)
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and masters."""
        super().zero_grad(set_to_none)
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with masters for the low-precision ones (made from their present values)."""
        if not self._built:
            super().add_param_group(param_group)
            return
        parameters = param_group["params"]
        group = {**param_group, "params": [parameters] if isinstance(parameters, Tensor) else list(parameters)}
        self.inner.add_param_group(self._with_masters(group))
        super().add_param_group({**self.inner.param_groups[-1], "params": group["params"]})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dictionary, whose numbering is also that of the groups here, with the masters
        under `main_params` by the same numbers."""
        ordered = [p for group in self.param_groups for p in group["params"]]
        masters = {number: self._masters[p] for number, p in enumerate(ordered) if p in self._masters}
        self._copy_settings(self.param_groups, self.inner.param_groups)
        return {**self.inner.state_dict(), "main_params": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the parameters themselves are the model's to load.

        Masters that the dictionary lacks are left as they are.
        """
        ordered = [p for group in self.param_groups for p in group["params"]]
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "main_params"})
        self._copy_settings(self.inner.param_groups, self.param_groups)
        for number, value in state_dict.get("main_params", {}).items():
            self._masters[ordered[number]].copy_(value)

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        for parameter in group["params"]:
            if needs_master(parameter) and parameter not in self._masters:
                # float() of a DTensor keeps mesh and placements.
                self._masters[parameter] = parameter.detach().float().clone()
                if self._hooks:
                    parameter.register_post_accumulate_grad_hook(self._take_grad)
        return {**group, "params": [self._masters.get(p, p) for p in group["params"]]}

    @torch.no_grad()
    def _take_grad(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        gradient = _reduced(parameter)
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    @staticmethod
    def _copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
        for from_group, to_group in zip(source, target, strict=True):
            to_group.update({key: value for key, value in from_group.items() if key != "params"})


class _StateByParameter(MutableMapping[Tensor, Any]):
    """The inner optimizer's state, looked up by model parameter instead of by master."""

    def __init__(self, owner: MixedPrecisionOptimizer) -> None:
        self._owner = owner

    def _key(self, parameter: Tensor) -> Tensor:
        return self._owner._masters.get(parameter, parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._owner.inner.state[self._key(parameter)]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._owner.inner.state[self._key(parameter)] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._owner.inner.state[self._key(parameter)]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        # Not inherited, as `in` is not: the inner state creates an entry when it is asked for one.
        return self._owner.inner.state.get(self._key(parameter), default)

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and self._key(parameter) in self._owner.inner.state

    def __iter__(self) -> Iterator[Tensor]:
        parameters = {master: parameter for parameter, master in self._owner._masters.items()}
        return (parameters.get(key, key) for key in self._owner.inner.state)

    def __len__(self) -> int:
        return len(self._owner.inner.state)


def _reduced(parameter: Tensor) -> Tensor:
    """The gradient in the parameter's layout: tensor parallelism leaves sums that are still to be reduced, and they
    have to be before anything is rounded or measured."""
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if placements is not None and getattr(gradient, "placements", placements) != placements:
        gradient = gradient.redistribute(placements=placements)
    return gradient  # type: ignore[no-any-return]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
