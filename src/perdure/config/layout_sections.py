"""The sections that say how ranks share a model, and what of it is computed again; the keys are the reference's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from perdure.config.base import Section
from perdure.config.kinds import Positive, RecomputeMode, ShardDegree, Words

__all__ = ["ParallelismConfig", "RecomputeConfig"]


class ParallelismConfig(Section):
    """`parallelism`: how the ranks share the work."""

    data_parallel_shard: ShardDegree = Field(
        default=-1,
        description="FSDP degree; -1: all data-parallel ranks; a divisor of them: replicas of as many shards",
    )
    data_parallel_shard_strategy: Literal["optim_grads_params", "optim_grads", "optim"] = Field(
        default="optim_grads_params",
        description="what is sharded; `optim_grads`: weights stay whole from the forward to the backward pass",
    )
    data_parallel_replicate: Positive = Field(
        default=1,
        description="replicas; above shards: HSDP; if left out, as many as `data_parallel_shard` leaves",
    )
    reshard_after_forward_policy: Literal["default", "always", "never"] = Field(
        default="default",
        description="whether weights are sharded again after the forward pass; default: always, in a pipeline never",
    )
    cpu_offload: bool = Field(default=False, description="keep sharded state in host memory")
    disable_gradient_division: bool = Field(
        default=True,
        description="sum sharded gradients instead of averaging them; the loss is normalised by tokens in any case",
    )
    dense_fsdp_shard_size: Positive | None = Field(
        default=None, description="FSDP degree of weights outside experts, the rest being replicas"
    )
    tensor_parallel: Positive = Field(
        default=1, description="tensor-parallel degree; above 1 it needs `sequence_parallel`"
    )
    sequence_parallel: bool = Field(
        default=False, description="shard activations along the sequence in tensor parallelism"
    )
    context_parallel: Positive = Field(default=1, description="context-parallel degree")
    context_parallel_method: str = Field(default="colossal", description="how attention is exchanged")
    context_parallel_async: bool = Field(default=False, description="overlap that exchange with computation")
    ulysses_degree_in_cp: Positive | None = Field(
        default=None, description="Ulysses part of a hybrid context parallelism"
    )
    pipeline_parallel: Positive = Field(default=1, description="pipeline stages")
    pipeline_parallel_layers_per_stage: Annotated[Any, Words("list, or text, or null")] = Field(
        default="auto",
        description="`auto`: evenly; or for each pipeline rank a text such as `0-3`, with chunks `0-1, 4-5`",
    )
    pipeline_parallel_schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = Field(
        default="1f1b", description="order of the micro-batches; with chunks `1f1b` is `interleaved_1f1b`"
    )
    pipeline_parallel_microbatch_size: Positive = Field(
        default=1,
        description="micro-batches per step; follows from the batch sizes, another value than that is refused",
    )
    pipeline_parallel_interleave_num: Positive = Field(default=1, description="chunks of layers per pipeline rank")
    expert_parallel: Positive = Field(default=1, description="expert-parallel degree")


class RecomputeConfig(Section):
    """`recompute`: activations computed again in the backward pass."""

    mode: RecomputeMode = Field(default="None", description="nothing, whole layers, or selected modules")
    full_recompute_layer: list[Any] | None = Field(
        default=None, description="layers computed again as a whole, such as `[0-3]`; mode `full` requires it"
    )
    select_module: dict[str, Any] | None = Field(
        default=None,
        description="patterns of modules in layers, each with its layers: `{mlp: [0-3]}`; mode `select` requires it",
    )
    exclude_op: dict[str, Any] | None = Field(
        default=None, description="torch operators whose results are kept, each with its layers: `{mm: [0-3]}`"
    )
