"""Micro-batches through the stages of a pipeline, forward and backward; torch.distributed.pipelining does the work.

The loss function sees a whole model: it is called once up to its call of the model, to learn the arguments, and on
the last stage again, where that call gives what has come through the stages. So any loss function works that calls
the model once. What travels between ranks is hidden states, and their gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from perdure.errors import PerdureError, UsageError
from perdure.parallel.shapes import Call, Shape, Shapes

__all__ = ["Loss", "Pipeline", "Seed", "first_argument"]

Loss = Callable[[int, Any], Tensor]
"""`loss(index, model)`: the scalar of micro-batch `index`, with `model` called once for it."""
Seed = Callable[[int, int], None]
"""`seed(index, stage)`: seeds the random streams for a stage's part of a micro-batch."""
_KEPT = 4
"""Schedules that are kept, each with its receive buffers: one for each shape and number of micro-batches."""

# Versions without the word never scale gradients.
_UNSCALED: dict[str, Any] = {"scale_grads": False} if "scale_grads" in signature(ScheduleGPipe).parameters else {}


class Pipeline:
    """The stages that this rank holds.

    Args:
        stages: this rank's stages by number.
        count: number of stages over all ranks.
        shapes: tells the shapes between stages.
        first: name of the model's first argument.
        group: the ranks of this pipeline, in the order of their first stages.
        device: where the stages are.
        schedule: `gpipe`, `1f1b` or `interleaved_1f1b`, for training.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        count: int,
        shapes: Shapes,
        first: str,
        group: ProcessGroup,
        device: torch.device,
        schedule: str,
    ) -> None:
        self._stages = [_Stage(module, number, count, first) for number, module in sorted(stages.items())]
        self._count, self._shapes, self._group, self._device = count, shapes, group, device
        self._schedule_name = schedule
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def train(self, micro_batches: int, loss: Loss, seed: Seed) -> None:
        """Forward and backward of all micro-batches; gradients are summed into the parameters.

        `loss` runs to its end on the last stage only.

        Raises:
            UsageError: the loss function does not call the model just once, or shapes differ within the step.
        """
        self._run(micro_batches, loss, seed, train=True)

    @torch.no_grad()
    def evaluate(self, micro_batches: int, loss: Loss, seed: Seed) -> None:
        """Forward only."""
        self._run(micro_batches, loss, seed, train=False)

    def _run(self, micro_batches: int, loss: Loss, seed: Seed, *, train: bool) -> None:
        for stage in self._stages:
            stage.train(train)
        calls = [_call_of(loss, index, self._stages[0].module) for index in range(micro_batches)]
        shapes = self._shapes.between(calls)
        key = (train, micro_batches, *shapes)
        schedule = self._schedules.pop(key, None) or self._schedule(micro_batches, shapes, train)
        self._schedules[key] = schedule
        if len(self._schedules) > _KEPT:
            del self._schedules[next(iter(self._schedules))]
        for stage in self._stages:
            stage.begin(calls, None if stage.is_last else shapes[stage.number], loss, seed)
        indices = torch.arange(micro_batches)
        first = (indices,) if self._stages[0].is_first else ()
        try:
            with _quiet():
                schedule.step(*first, target=indices, index=indices)
        except RuntimeError as error:
            own = _own(error)
            if own is None:
                raise
            raise own from error
        finally:
            for stage in self._stages:
                stage.end()

    def _schedule(self, micro_batches: int, shapes: Sequence[Shape], train: bool) -> Any:
        stages: list[Any] = []
        for stage in self._stages:
            number = stage.number
            stages.append(
                PipelineStage(
                    stage,
                    number,
                    self._count,
                    self._device,
                    input_args=torch.arange(1) if stage.is_first else _meta(shapes[number - 1], train),
                    output_args=_meta(((1,), torch.float32) if stage.is_last else shapes[number], train),
                    group=self._group,
                )
            )
        loss = _the_loss if train else None
        if len(stages) > 1 or self._schedule_name == "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, micro_batches, loss_fn=loss, **_UNSCALED)
        one = Schedule1F1B if train and self._schedule_name == "1f1b" else ScheduleGPipe
        return one(stages[0], micro_batches, loss_fn=loss, **_UNSCALED)


class _Stage(nn.Module):
    """A stage as torch runs it: the number of a micro-batch goes in beside the hidden states."""

    def __init__(self, module: nn.Module, number: int, count: int, first: str) -> None:
        super().__init__()
        self.module = module
        self.number, self.is_first, self.is_last = number, number == 0, number == count - 1
        self._first = first
        self._calls: list[Call] = []
        self._shape: Shape | None = None
        self._loss: Loss | None = None
        self._seed: Seed | None = None

    def begin(self, calls: Sequence[Call], shape: Shape | None, loss: Loss, seed: Seed) -> None:
        """What the next micro-batches are, and what the stage after expects."""
        self._calls, self._shape, self._loss, self._seed = list(calls), shape, loss, seed

    def end(self) -> None:
        """Forgets them."""
        self._calls, self._loss, self._seed = [], None, None

    def forward(self, hidden: Tensor, index: Tensor) -> Tensor:
        number = int(index)
        if not self.is_last:
            return cast(Tensor, self._ours(number, hidden, self._calls[number]))
        assert self._loss is not None
        asked = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            if asked:
                raise _called("more than once")
            asked = True
            return self._ours(number, hidden, Call(args, kwargs))

        value = self._loss(number, _StandIn(self.module, run))
        return value.float().reshape(1)

    def _ours(self, number: int, hidden: Tensor, call: Call) -> Any:
        assert self._seed is not None
        self._seed(number, self.number)
        call = call if self.is_first else call.with_hidden(hidden, self._first)
        output = self.module(*call.args, **call.kwargs)
        if not self.is_last and (tuple(output.shape), output.dtype) != self._shape:
            raise UsageError(
                f"pipeline parallelism: stage {self.number} hands on {output.dtype} {list(output.shape)}, and on the "
                f"meta device it was {self._shape and (self._shape[1], list(self._shape[0]))}",
                hint="the shape of hidden states must follow from the shapes of the model's arguments alone",
            )
        if not self.is_last and torch.is_grad_enabled() and not output.requires_grad:
            # Frozen so far: the stage after sends a gradient all the same.
            output.requires_grad_()
        return output


class _Reached(BaseException):
    """The loss function has called the model; no `except Exception` of its own is to catch this."""


class _StandIn:
    """Looks like the model to a loss function."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self._model, self._run = model, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _call_of(loss: Loss, index: int, model: nn.Module) -> Call:
    """The arguments with which the loss function calls the model for a micro-batch."""
    calls: list[Call] = []

    def reached(*args: Any, **kwargs: Any) -> NoReturn:
        calls.append(Call(args, kwargs))
        raise _Reached

    try:
        loss(index, _StandIn(model, reached))
    except _Reached:
        return calls[0]
    raise _called("not at all")


def _called(how_often: str) -> UsageError:
    return UsageError(
        f"pipeline parallelism: the loss function calls the model {how_often}, expected once per micro-batch",
        hint="call model(...) exactly once in compute_loss_func(model, batch)",
    )


def first_argument(model: nn.Module) -> str:
    """The name of the first argument of a model's forward."""
    return next(iter(signature(model.forward).parameters))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's print of the whole schedule when a stage fails; the error itself says enough."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _the_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def _meta(shape: Shape, train: bool) -> Tensor:
    return torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=train)


def _own(error: BaseException) -> PerdureError | None:
    """Our own error, where torch has wrapped one."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, PerdureError):
        inner = inner.__cause__
    return inner
