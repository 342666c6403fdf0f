"""A layout applied to a model: pipeline stages first, then tensor parallelism, then FSDP2. torch does the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from perdure.config.layer_ranges import even_stages, stage_ranges
from perdure.config.schema import ParallelismConfig, TrainConfig
from perdure.errors import UsageError
from perdure.parallel.gradients import Tied
from perdure.parallel.mesh import Mesh
from perdure.parallel.pipeline import Pipeline, first_argument
from perdure.parallel.recompute import apply_recompute
from perdure.parallel.shapes import Shapes, meta_copy
from perdure.parallel.stages import Cut, cut, layer_names, put_tied, without

__all__ = ["Parallel", "parallelize"]

# Before torch 2.9 gradients arrive as a mean in any case; the step corrects for either.
_CAN_SUM = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


@dataclass(frozen=True)
class Parallel:
    """A model under a layout.

    Attributes:
        model: what this rank holds, with the names of the whole model.
        pipeline: runs micro-batches where the model is cut into stages; `model` cannot be called then.
        tied: parameters that other stages hold too.
        mean_over: over how many ranks gradients arrive as a mean instead of a sum.
        sharded: the modules that FSDP2 gathers and shards again.
    """

    model: nn.Module
    pipeline: Pipeline | None = None
    tied: tuple[Tied, ...] = ()
    mean_over: int = 1
    sharded: tuple[FSDPModule, ...] = ()

    def rest(self) -> None:
        """Puts parameters back into shards where a forward pass without a backward one has left them gathered.

        Nothing may be saved before: what the modules hold then are not the parameters that are trained.
        """
        for module in self.sharded:
            module.reshard()


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    config: TrainConfig,
    compute_dtype: torch.dtype | None = None,
) -> Parallel:
    """The model on `device`, cut as the mesh says; in place where torch allows.

    A model says by `tensor_parallel_plan(degree)`, a mapping for `parallelize_module`, how it is cut by tensors, and
    by `pipeline_plan()` how it is cut into stages (see `perdure.parallel.stages`).

    Args:
        compute_dtype: what FSDP2 gathers parameters in and computes in, while they stay in their own dtype.

    Raises:
        UsageError: the model has no plan for what is asked, or sizes don't divide.
        ConfigError: layers are placed that are not there.
    """
    parts = _Parts.whole(model) if mesh.pipeline is None else _Parts.cut(model, mesh, config, compute_dtype)
    layers = _layers(model)
    for stage in parts.stages.values():
        stage.to(device)
    parts.model.to(device)
    apply_recompute(layers, config.recompute)
    for stage in parts.stages.values():
        if mesh.tensor is not None:
            _tensor_parallel(stage, mesh)
        if mesh.sharded is not None:
            _shard(stage, mesh, device, config.parallelism, compute_dtype)
    sums = _CAN_SUM and config.parallelism.disable_gradient_division
    return Parallel(
        model=parts.model,
        pipeline=parts.pipeline(mesh, device, config.parallelism.pipeline_parallel_schedule),
        tied=parts.tie(model, mesh),
        mean_over=mesh.data_ranks if mesh.sharded is not None and not sums else 1,
        sharded=tuple(m for stage in parts.stages.values() for m in stage.modules() if isinstance(m, FSDPModule)),
    )


@dataclass(frozen=True)
class _Parts:
    """What a rank holds of a model: all of it, and by stages."""

    model: nn.Module
    stages: Mapping[int, nn.Module]
    division: Cut | None = None
    shapes: Shapes | None = None

    @classmethod
    def whole(cls, model: nn.Module) -> _Parts:
        return cls(model, {0: model})

    @classmethod
    def cut(cls, model: nn.Module, mesh: Mesh, config: TrainConfig, compute_dtype: torch.dtype | None) -> _Parts:
        assert mesh.pipeline is not None
        ranks, place = mesh.pipeline.size(), mesh.pipeline.get_local_rank()
        division = cut(model, _placed(model, ranks, config))
        count = len(division.held)
        mine = range(place, count, ranks)
        bare = meta_copy(model)
        bare_stages = [without(bare, division.absent({number})) for number in range(count)]
        shapes = Shapes(bare_stages, first_argument(model), compute_dtype if mesh.sharded is not None else None)
        stages = {number: without(model, division.absent({number})) for number in mine}
        return cls(without(model, division.absent(mine)), stages, division, shapes)

    def pipeline(self, mesh: Mesh, device: torch.device, schedule: str) -> Pipeline | None:
        if mesh.pipeline is None or self.division is None or self.shapes is None:
            return None
        first = first_argument(self.model)
        group = mesh.pipeline.get_group()
        return Pipeline(self.stages, len(self.division.held), self.shapes, first, group, device, schedule)

    def tie(self, whole: nn.Module, mesh: Mesh) -> tuple[Tied, ...]:
        """Gives tied parameters all their names, and their group; every rank passes here."""
        if mesh.pipeline is None or self.division is None:
            return ()
        found = []
        ranks, place = mesh.pipeline.size(), mesh.pipeline.get_local_rank()
        for names in self.division.tied:
            stages = {stage for name in names for stage in self.division.stages_of(name)}
            holders = tuple(sorted({stage % ranks for stage in stages}))
            if mesh.sharded is not None and len(holders) < len(stages):
                raise UsageError(
                    f"parallelism: {names[0]} and {names[1]} are one tensor in two stages of one rank, which cannot "
                    "be sharded",
                    hint="place the layers so that the two lie on different ranks, or in one stage",
                )
            group = mesh.pipeline_group(holders)
            if place in holders:
                here = next(n for n in names if {s % ranks for s in self.division.stages_of(n)} & {place})
                parameter = self.model.get_parameter(here)
                put_tied(self.model, whole, names, parameter)
                found.append(Tied(parameter, group, counts=place == holders[0]))
        return tuple(found)


def _placed(model: nn.Module, ranks: int, config: TrainConfig) -> list[range]:
    """The layers of each stage."""
    parallelism, key = config.parallelism, "parallelism.pipeline_parallel_layers_per_stage"
    chunks, wish = parallelism.pipeline_parallel_interleave_num, parallelism.pipeline_parallel_layers_per_stage
    layers = len(layer_names(model))
    try:
        if wish in (None, "auto"):
            return even_stages(layers, ranks, chunks)
        placed = stage_ranges(wish, chunks)
    except ValueError as error:
        raise config.fault(key, str(error)) from None
    if placed[-1].stop != layers:
        raise config.fault(key, f"expected all {layers} layers, found {placed[-1].stop}")
    return placed


def _shard(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    parallelism: ParallelismConfig,
    compute_dtype: torch.dtype | None,
) -> None:
    """FSDP2 over the blocks of a model or stage, and over what is left of it."""
    policy = parallelism.reshard_after_forward_policy
    keep = policy == "never" or parallelism.data_parallel_shard_strategy == "optim_grads"
    if policy == "default":
        # As in the reference: stages run several forward passes before the first backward one.
        keep = keep or mesh.pipeline is not None
    settings: dict[str, Any] = {
        "mesh": mesh.sharded,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=compute_dtype and torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if parallelism.cpu_offload
        else OffloadPolicy(),
    }
    # Left out where torch shall decide: not every version has a word for that.
    if keep or policy == "always":
        settings["reshard_after_forward"] = not keep
    for block in _blocks(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    if _CAN_SUM and parallelism.disable_gradient_division:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that keys of the configuration number."""
    if hasattr(model, "pipeline_plan") or isinstance(model, nn.Sequential):
        return [model.get_submodule(name) for name in layer_names(model)]
    return list(_blocks(model))


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a model: what its outermost module lists hold."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _blocks(child)


def _tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    assert mesh.tensor is not None
    plan = getattr(model, "tensor_parallel_plan", None)
    if plan is None:
        raise UsageError(
            f"parallelism.tensor_parallel: {type(model).__name__} has no plan for it",
            hint="give the model a method tensor_parallel_plan(degree) for torch's parallelize_module",
        )
    parallelize_module(model, mesh.tensor, plan(mesh.tensor.size()))
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
