"""Gradients of a step as one thing over all ranks: their sum over replicas, their norm, their scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.parallel.mesh import Mesh

__all__ = ["Tied", "own_square", "scale", "settle", "sum_over_replicas", "sum_tied"]

BUCKET = 32 << 20


@dataclass(frozen=True)
class Tied:
    """A parameter that several pipeline stages hold: each has a part of its gradient.

    Attributes:
        group: the ranks that hold it.
        counts: whether this rank's counts in the norm (one of the group does).
    """

    parameter: Tensor
    group: Any
    counts: bool


@torch.no_grad()
def settle(parameters: Iterable[Tensor]) -> None:
    """Brings the gradients of `parameters` into their layout: tensor parallelism leaves sums pending in some, and
    others whole."""
    for parameter in parameters:
        gradient: Any = parameter.grad
        placements = getattr(parameter, "placements", None)
        if placements is not None and getattr(gradient, "placements", placements) != placements:
            parameter.grad = gradient.redistribute(placements=placements)


def sum_over_replicas(gradients: Sequence[Tensor], group: Any) -> None:
    """Sums gradients over plain replicas, in place, in buckets of at most 32 MiB (or one tensor)."""
    if group is None:
        return
    bucket: list[Tensor] = []
    size = 0
    for gradient in map(_local, gradients):
        if bucket and (size + gradient.nbytes > BUCKET or gradient.dtype != bucket[0].dtype):
            _sum(bucket, group)
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        _sum(bucket, group)


@torch.no_grad()
def _sum(bucket: list[Tensor], group: Any) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


@torch.no_grad()
def sum_tied(gradient: Tensor, tied: Tied) -> None:
    """Sums the gradient of a tied parameter over the ranks that hold it, in place."""
    dist.all_reduce(_local(gradient), group=tied.group)


@torch.no_grad()
def own_square(gradients: Sequence[Tensor], mesh: Mesh) -> float:
    """What this rank adds to the square of the global 2-norm; over all ranks each element is counted once.

    A part that another rank counts adds 0, or NaN where it is not finite here.
    """
    total = 0.0
    for group in _alike(gradients):
        parts = [_local(gradient) for gradient in group]
        # A norm has its tensor's dtype, and that of a float16 one ends at 65504.
        norms = torch._foreach_norm(parts, 2, torch.float32 if parts[0].dtype.itemsize == 2 else None)
        square = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
        total += float(square) * mesh.is_first_holder(group[0])
    return total


@torch.no_grad()
def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiplies all gradients, in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_([_local(g) for g in gradients], factor)


def _alike(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients by dtype, and by what their parts are parts of: the mesh and the placements."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        mesh = getattr(gradient, "device_mesh", None)
        groups[gradient.dtype, mesh, getattr(gradient, "placements", None)].append(gradient)
    return list(groups.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
