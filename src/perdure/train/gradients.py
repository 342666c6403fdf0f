"""Plain replicas: every rank holds the whole model, and gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.engine.ranks import Ranks

__all__ = ["sum_gradients"]

BUCKET = 32 << 20


def sum_gradients(gradients: Sequence[Tensor], ranks: Ranks) -> None:
    """Sums gradients over all ranks, in place, in buckets of at most 32 MiB (or one tensor)."""
    if ranks.size == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET or gradient.dtype != bucket[0].dtype):
            _sum(bucket)
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        _sum(bucket)


def _sum(bucket: list[Tensor]) -> None:
    with torch.no_grad():
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        for gradient, summed in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))
