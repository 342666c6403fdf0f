"""A layout applied to a model: tensor parallelism first, then FSDP2. torch does the work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from perdure.errors import UsageError
from perdure.models.decoder import Decoder
from perdure.parallel.mesh import Mesh

__all__ = ["parallelize"]


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """The model, cut as the mesh says; in place where torch allows.

    A model of one's own may bring `tensor_parallel_plan()`, a mapping for `parallelize_module`.

    Raises:
        UsageError: tensor parallelism for a model without a plan, or sizes that don't divide.
    """
    if mesh.tensor is not None:
        _tensor_parallel(model, mesh)
    if mesh.sharded is not None:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh.sharded)
        fully_shard(model, mesh=mesh.sharded)
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated blocks of a model: what its outermost module lists hold."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from child.children()
        else:
            yield from _blocks(child)


def _tensor_parallel(model: nn.Module, mesh: Mesh) -> None:
    plan = _decoder_plan(model, mesh) if isinstance(model, Decoder) else None
    if plan is None:
        own = getattr(model, "tensor_parallel_plan", None)
        if own is None:
            raise UsageError(
                f"parallelism.tensor_parallel: {type(model).__name__} has no plan for it",
                hint="give the model a method tensor_parallel_plan() for torch's parallelize_module",
            )
        plan = own()
    parallelize_module(model, mesh.tensor, plan)
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()


def _decoder_plan(model: Decoder, mesh: Mesh) -> dict[str, Any]:
    assert mesh.tensor is not None
    size = mesh.tensor.size()
    first = next(iter(model.layers.values()))
    heads = first.self_attn.k_proj.out_features // first.self_attn.head_dim  # type: ignore[union-attr, operator]
    if heads % size:
        raise UsageError(
            f"parallelism.tensor_parallel: {heads} key/value heads don't divide among {size} ranks",
            hint="choose a degree that divides model.num_key_value_heads",
        )
    plan: dict[str, Any] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in model.layers:
        block = f"layers.{index}"
        plan |= {
            f"{block}.input_layernorm": SequenceParallel(),
            f"{block}.post_attention_layernorm": SequenceParallel(),
            f"{block}.self_attn": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            f"{block}.self_attn.q_proj": ColwiseParallel(),
            f"{block}.self_attn.k_proj": ColwiseParallel(),
            f"{block}.self_attn.v_proj": ColwiseParallel(),
            f"{block}.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{block}.mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"{block}.mlp.gate_proj": ColwiseParallel(),
            f"{block}.mlp.up_proj": ColwiseParallel(),
            f"{block}.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    return plan
