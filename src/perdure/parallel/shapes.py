"""The shapes of hidden states between stages, found by running the model on the meta device: no memory, no exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perdure.errors import UsageError

__all__ = ["Call", "Shape", "Shapes", "meta_copy"]

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Call:
    """The arguments that a loss function called the model with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that give the same shapes."""
        return tuple(_signature(value) for value in (*self.args, *sorted(self.kwargs.items())))

    def with_hidden(self, hidden: Any, name: str) -> Call:
        """The same call with hidden states in place of the model's first argument, called `name`."""
        if self.args:
            return Call((hidden, *self.args[1:]), self.kwargs)
        return Call((), {**self.kwargs, name: hidden})


def meta_copy(model: nn.Module) -> nn.Module:
    """The model without memory.

    Raises:
        UsageError: it holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UsageError(
            f"pipeline parallelism: {type(model).__name__} cannot be copied, which the shapes between stages are "
            f"learnt from: {type(error).__name__}: {error}",
            hint="keep locks, open files and generators out of the model, or give it a __deepcopy__",
        ) from error


class Shapes:
    """What passes between stages.

    Args:
        stages: all stages, on the meta device.
        first: name of the first argument of the model's forward.
        compute_dtype: what floating-point parameters and arguments are cast to for computing, or None.
    """

    def __init__(self, stages: Sequence[nn.Module], first: str, compute_dtype: torch.dtype | None = None) -> None:
        self._stages, self._first, self._dtype = stages, first, compute_dtype
        if compute_dtype is not None:
            for stage in stages:
                stage.to(compute_dtype)
        self._known: dict[tuple[Any, ...], list[Shape]] = {}

    def between(self, calls: Sequence[Call]) -> list[Shape]:
        """Shape and dtype of what each stage but the last hands on, the same for all calls.

        Raises:
            UsageError: the calls differ in their shapes, or the model doesn't run on the meta device, or a stage
                hands on something else than one tensor.
        """
        signatures = [call.signature() for call in calls]
        for number, signature in enumerate(signatures):
            if signature != signatures[0]:
                raise UsageError(
                    "pipeline parallelism needs micro-batches of one shape within a step, and micro-batch "
                    f"{number} differs from the first",
                    hint="pad all samples to one length, or run without parallelism.pipeline_parallel",
                )
        if signatures[0] not in self._known:
            self._known[signatures[0]] = self._run(calls[0])
        return self._known[signatures[0]]

    @torch.no_grad()
    def _run(self, call: Call) -> list[Shape]:
        call = Call(_mapped(call.args, self._to_meta), _mapped(dict(call.kwargs), self._to_meta))
        found: list[Shape] = []
        for number, stage in enumerate(self._stages[:-1]):
            try:
                hidden = stage(*call.args, **call.kwargs)
            except Exception as error:
                raise UsageError(
                    f"pipeline parallelism: stage {number} of {type(stage).__name__} cannot be run on the meta device, "
                    f"which tells the shapes between stages: {type(error).__name__}: {error}",
                    hint="a stage takes the hidden states in place of the model's first argument; "
                    "see pipeline_plan() in the guide to parallel layouts",
                ) from error
            if not isinstance(hidden, Tensor):
                raise UsageError(
                    f"pipeline parallelism: stage {number} of {type(stage).__name__} hands on a "
                    f"{type(hidden).__name__}, expected one tensor"
                )
            found.append((tuple(hidden.shape), hidden.dtype))
            call = call.with_hidden(hidden, self._first)
        return found

    def _to_meta(self, tensor: Tensor) -> Tensor:
        return tensor.to("meta", self._dtype) if tensor.is_floating_point() and self._dtype else tensor.to("meta")


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _signature(item)) for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(_mapped(item, change) for item in value)
    return value
