"""One optimizer step: forward and backward over this rank's micro-batches, one exchange, clip, update.

The loss is normalised by the valid tokens of the whole global batch, so that neither accumulation nor
the number of ranks changes gradients: micro-batch losses are sums, divided by the number of samples
before `backward` (a constant), and the gradients are corrected once the tokens are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perdure.data.loader import StepBatch
from perdure.data.samples import sample_sum
from perdure.engine.ranks import Ranks
from perdure.errors import TrainingError, UsageError
from perdure.optim.scaler import LossScaler
from perdure.parallel.apply import Parallel
from perdure.parallel.buffers import SharedBuffers
from perdure.parallel.gradients import own_square, scale, settle, sum_over_replicas, sum_tied
from perdure.parallel.mesh import Mesh
from perdure.state.random import seed_streams
from perdure.train.health import HealthMonitor, Verdict
from perdure.train.stop import SIGNALS

__all__ = ["LossFunction", "StepResult", "TrainStep", "loss_and_count", "next_token_loss", "to_device"]

LossFunction = Callable[[nn.Module, Any], "Tensor | tuple[Tensor, Any]"]
IGNORED = -100


@dataclass(frozen=True)
class StepResult:
    """What a step gave: loss per valid token (or sample), gradient norm before clipping, tokens seen.

    `applied` is False where the update was left out; `stop` is the signal that some rank received;
    `id_sum` identifies the samples that all ranks really had; `verdict` is the health monitor's.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool
    finite: bool
    stop: int
    id_sum: int
    verdict: Verdict


def next_token_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy of `labels` given `input_ids`, and the number of labels that are not -100."""
    if not isinstance(batch, dict) or "input_ids" not in batch or "labels" not in batch:
        raise UsageError(
            f"the default loss needs batches with `input_ids` and `labels`, these are {type(batch).__name__}",
            hint="pass compute_loss_func(model, batch) to Trainer",
        )
    output = model(batch["input_ids"])
    logits = getattr(output, "logits", output)
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()


class TrainStep:
    """Runs optimizer steps.

    Args:
        parallel: the model under its layout.
        loss: `loss(model, batch)` gives (sum, count), or the mean over the micro-batch's samples.
        max_norm: gradients are clipped to this global norm; 0 leaves them.
        skip_non_finite: leave out an update whose gradient norm is not finite.
        health: judges every step before its update, which it may hold back.

    Raises:
        UsageError: a module gives sparse gradients.
    """

    def __init__(
        self,
        parallel: Parallel,
        optimizer: Any,
        *,
        loss: LossFunction,
        ranks: Ranks,
        mesh: Mesh,
        device: torch.device,
        scaler: LossScaler,
        seed: int,
        max_norm: float,
        skip_non_finite: bool,
        health: HealthMonitor,
    ) -> None:
        self._parallel, self._model, self._optimizer, self._loss = parallel, parallel.model, optimizer, loss
        self._modules = list(parallel.model.modules())
        for name, module in parallel.model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise UsageError(
                    f"the gradients of {name or 'the model'} are sparse, whose norm and sum over ranks torch has not",
                    hint=f"make it a {type(module).__name__} with sparse=False",
                )
        self._buffers = SharedBuffers(parallel.model, mesh)
        self._ranks, self._mesh, self._device, self._scaler = ranks, mesh, device, scaler
        self._seed, self._max_norm, self._skip, self._health = seed, max_norm, skip_non_finite, health

    def run(
        self,
        batch: StepBatch,
        global_batch_size: int,
        learning_rate: Callable[[dict[str, Any]], float],
        stop: Callable[[], int],
    ) -> StepResult:
        """One step over `batch`; `learning_rate` gives each parameter group its rate, `stop` the signal received."""
        # What a callback has left in evaluation must not outlive the step: a resumed run would not have it.
        if not all(module.training for module in self._modules):
            self._model.train()
        micro_batches = batch.micro_batches
        loss_sum: Tensor | float = 0.0
        tokens: Tensor | float = 0.0

        def scaled_loss(index: int, model: Any) -> Tensor:
            nonlocal loss_sum, tokens
            micro = micro_batches[index]
            seed_streams(self._seed, micro.first)
            value, count = loss_and_count(self._loss, model, to_device(micro.data, self._device), len(micro.ids))
            if not value.requires_grad:
                raise UsageError(
                    "the loss does not depend on any parameter that is trained, so there is nothing to learn from it",
                    hint="compute it from the model's output without .item(), .detach() or torch.no_grad()",
                )
            # Left on the device: reading them here would hold up the backward pass.
            loss_sum, tokens = loss_sum + value.detach().double(), tokens + count
            return self._scaler.scale_loss(value / global_batch_size)

        if self._parallel.pipeline is not None:
            self._parallel.pipeline.train(
                len(micro_batches),
                scaled_loss,
                lambda index, stage: seed_streams(self._seed, micro_batches[index].first, stage),
            )
        else:
            for index in range(len(micro_batches)):
                scaled_loss(index, self._model).backward()  # type: ignore[no-untyped-call]
                if hasattr(self._optimizer, "accumulate_grads"):
                    self._optimizer.accumulate_grads()
        positions = chain.from_iterable(micro.positions for micro in micro_batches)
        ids = chain.from_iterable(micro.ids for micro in micro_batches)
        sums = float(loss_sum), float(tokens), sample_sum(positions, ids)
        return self._finish(batch.first, sums, global_batch_size, learning_rate, stop)

    def _finish(
        self,
        position: int,
        sums: tuple[float, float, int],
        batch_size: int,
        rate: Callable[[dict[str, Any]], float],
        stop: Callable[[], int],
    ) -> StepResult:
        gradients = self._gradients()
        sum_over_replicas(gradients, self._mesh.replicas)
        elsewhere = self._sum_tied()
        asked = stop()
        loss_sum, tokens, id_sum = sums
        # One reduction carries everything the ranks must agree on; 32-bit halves keep sums exact in float64.
        mine = [loss_sum, tokens, id_sum & 0xFFFFFFFF, id_sum >> 32 & 0xFFFFFFFF]
        square = own_square([g for g in gradients if id(g) not in elsewhere], self._mesh)
        shared = torch.tensor(
            [*(value * self._mesh.counts for value in mine), square, *(float(asked == each) for each in SIGNALS)],
            dtype=torch.float64,
            device="cpu",
        )
        self._ranks.sum(shared, "finishing a step")
        loss, count, low, high, square, *wishes = shared.tolist()
        if not count >= 0:
            raise UsageError(f"the loss function counted {count:g} tokens (or samples) in a step; expected 0 or more")
        count = count or 1.0
        factor = self._parallel.mean_over * batch_size / count / self._scaler.scale
        norm = math.sqrt(square) * factor
        finite = math.isfinite(norm)
        overflow = self._scaler.dynamic and not finite
        verdict = self._health.judge(
            position, loss / count, norm, lambda: self._embedding_norm() * factor, overflow=overflow
        )
        applied = not verdict.hold and (finite or not (self._skip or self._scaler.dynamic))
        if applied:
            clip = self._max_norm > 0 and finite and norm > self._max_norm
            scale(gradients, factor * self._max_norm / (norm + 1e-6) if clip else factor)
            for group in self._optimizer.param_groups:
                group["lr"] = rate(group)
            self._optimizer.step()
        self._scaler.update(finite)
        self._buffers.follow()
        self._optimizer.zero_grad(set_to_none=True)
        stopped = next((int(number) for number, votes in zip(SIGNALS, wishes, strict=True) if votes), 0)
        ids = int(low) + (int(high) << 32) & (1 << 64) - 1
        return StepResult(loss / count, norm, round(count), applied, finite, stopped, ids, verdict)

    def _gradients(self) -> list[Tensor]:
        if hasattr(self._optimizer, "grads"):
            return list(self._optimizer.grads())
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        settle(parameters)
        return [p.grad for p in parameters if p.grad is not None]

    def _sum_tied(self) -> set[int]:
        """Sums the gradients of what several stages hold; gives the ids of those that count on another rank."""
        elsewhere: set[int] = set()
        for tied in self._parallel.tied:
            if not tied.parameter.requires_grad:
                continue
            gradient = self._owner(tied.parameter).grad
            if gradient is None:
                raise TrainingError("a tied parameter got no gradient on one of its pipeline stages")
            sum_tied(gradient, tied)
            if not tied.counts:
                elsewhere.add(id(gradient))
        return elsewhere

    def _owner(self, parameter: Tensor) -> Tensor:
        """Whose gradient is used for a parameter: its FP32 master's, or its own."""
        master = getattr(self._optimizer, "main_param_of", lambda parameter: None)(parameter)
        return parameter if master is None else master

    def _embedding_norm(self) -> float:
        """The norm of the embeddings' gradients as they are, the same on every rank."""
        tables = dict.fromkeys(m.weight for m in self._modules if isinstance(m, nn.Embedding))
        elsewhere = {id(tied.parameter) for tied in self._parallel.tied if not tied.counts}
        owners = [self._owner(p) for p in tables if id(p) not in elsewhere]
        square = own_square([p.grad for p in owners if p.grad is not None], self._mesh)
        shared = torch.tensor([square], dtype=torch.float64, device="cpu")
        return math.sqrt(float(self._ranks.sum(shared, "looking at the embeddings")))


def loss_and_count(loss: LossFunction, model: nn.Module, data: Any, samples: int) -> tuple[Tensor, Tensor | float]:
    """The summed loss of a micro-batch, and over how many tokens (or samples) it is a sum; weights may make a fraction.

    Raises:
        UsageError: the loss function gave something else than a number, or a number and a count.
    """
    output: Any = loss(model, data)
    value, count = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise UsageError(
            f"the loss function gave {_described(value)}; expected a floating-point tensor with one element",
            hint="compute_loss_func(model, batch) returns the mean over the micro-batch, or (sum, count)",
        )
    value = value.reshape(())
    if count is None:
        return value * samples, samples
    if isinstance(count, Tensor) and count.numel() == 1:
        return value, count.detach().reshape(()).double()
    if isinstance(count, Real) and math.isfinite(count):
        return value, float(count)
    raise UsageError(
        f"the loss function gave {_described(count)} for its count; expected one number",
        hint="compute_loss_func(model, batch) returns (sum, count): of how many tokens or samples it is the sum",
    )


def _described(value: Any) -> str:
    return f"a {value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:100]


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors of a batch (in dictionaries, lists and tuples) on the device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, list | tuple):
        items = [to_device(value, device) for value in data]
        return items if isinstance(data, list) else type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    return data
