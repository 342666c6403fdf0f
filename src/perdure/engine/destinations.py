"""Where bytes of a shard belong in the memory of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from perdure.format.box import Box, intersect
from perdure.format.metadata import ShardRecord
from perdure.state.shards import Piece

__all__ = ["as_dtype", "copy_overlap", "in_place", "meets", "near", "overlap"]


def near(shards: list[ShardRecord], pieces: Sequence[Piece]) -> list[ShardRecord]:
    """The shards that may meet any of the pieces: told by one dimension, at little cost for many."""
    if not shards or not pieces:
        return []
    if len(shards) == 1:
        return shards
    first = shards[0].offset
    dim = next((d for d in range(len(first)) if any(s.offset[d] != first[d] for s in shards)), None)
    if dim is None:
        return shards
    low = min(p.box.offset[dim] for p in pieces)
    high = max(p.box.offset[dim] + p.box.shape[dim] for p in pieces)
    return [s for s in shards if s.offset[dim] < high and s.offset[dim] + s.shape[dim] > low]


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; a box without dimensions shares itself."""
    return a if a == b else intersect(a, b)


def meets(a: Box, b: Box) -> bool:
    """Whether two boxes share an element."""
    return overlap(a, b) is not None


def in_place(tensor: Tensor, stored: torch.dtype) -> bool:
    """Whether a tensor lies in memory as it is stored."""
    return tensor.dtype == stored and tensor.is_cpu and tensor.is_contiguous()


def as_dtype(data: Tensor, stored: torch.dtype) -> Tensor:
    """Bytes seen as elements; copied first where their address isn't a multiple of the element's size."""
    if data.data_ptr() % stored.itemsize:
        data = data.clone()
    return data.view(stored)


def copy_overlap(values: Tensor, box: Box, piece: Piece) -> None:
    """Copies what `values`, which is `box` of the tensor, has of `piece`."""
    if not box.shape:
        piece.tensor.copy_(values)
        return
    both = intersect(box, piece.box)
    if both is None or prod(both.shape) == 0:
        return
    source = values[tuple(slice(o - b, o - b + n) for o, b, n in zip(both.offset, box.offset, both.shape, strict=True))]
    target = piece.tensor[
        tuple(slice(o - b, o - b + n) for o, b, n in zip(both.offset, piece.box.offset, both.shape, strict=True))
    ]
    # Memory that an expanded tensor repeats is written once.
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
