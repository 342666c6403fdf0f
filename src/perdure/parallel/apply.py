"""A layout applied to a model: tensor parallelism first, then FSDP2. torch does the work."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from perdure.errors import UsageError
from perdure.parallel.mesh import Mesh

__all__ = ["parallelize"]


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """The model, cut as the mesh says; in place where torch allows.

    A model says by `tensor_parallel_plan(degree)`, a mapping for `parallelize_module`, how it is cut by tensors.

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
