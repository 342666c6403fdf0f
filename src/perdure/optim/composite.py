"""Several optimizers over disjoint parameter groups that look like one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.optim import Optimizer

from perdure.errors import UsageError

__all__ = ["CompositeOptimizer"]


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
        self._share()
        self._built = True

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let every part update its groups, in the order of the builders; a part alone may step by itself."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loading a state dictionary puts other objects here, which the parts are to share as well."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        for algorithm, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            part.state = self.state

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
