"""Boxes: n-dimensional ranges of elements inside a tensor, as (offset, shape) pairs of integer tuples.

A 0-dimensional tensor is one box `((), ())` of one element. Pure arithmetic, property-tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Box", "boxes_of_run", "cover_fault", "intersect", "is_line", "runs", "whole"]


class Box(NamedTuple):
    """Elements `offset[d] <= index[d] < offset[d] + shape[d]` of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of `shape`."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offset, self.shape, shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or None where there are none."""
    offset, shape = [], []
    for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True):
        lo, hi = max(ao, bo), min(ao + an, bo + bn)
        if lo >= hi:
            return None
        offset.append(lo)
        shape.append(hi - lo)
    return Box(tuple(offset), tuple(shape))


def is_line(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: Sequence[int]) -> bool:
    """Whether boxes cover a tensor of `shape` as runs of one dimension: the usual cut, seen at little cost.

    Every box has as many dimensions as `shape`.
    """
    shape = tuple(shape)
    if not boxes or not shape:
        return False
    if len(boxes) == 1:
        return not any(boxes[0][0]) and boxes[0][1] == shape and 0 not in shape
    dim = next((d for d, n in enumerate(shape) if boxes[0][1][d] != n), 0)
    others, zeros = shape[:dim] + shape[dim + 1 :], (0,) * (len(shape) - 1)
    if any(extent[:dim] + extent[dim + 1 :] != others for extent in {extent for _, extent in boxes}):
        return False
    if {offset[:dim] + offset[dim + 1 :] for offset, _ in boxes} != {zeros}:
        return False
    at = 0
    for begin, size in sorted([(offset[dim], extent[dim]) for offset, extent in boxes]):
        if begin != at or size <= 0:
            return False
        at += size
    return at == shape[dim]


def cover_fault(boxes: Iterable[Box], shape: Sequence[int]) -> str | None:
    """Why `boxes` don't cover a tensor of `shape` exactly once each element, or None when they do.

    Disjointness is found by a sweep along the first dimension in which boxes differ, so that a cut
    into many boxes costs O(n log n) and not a comparison of all pairs.
    """
    listed = [b for b in boxes if b.numel > 0 or not b.shape]
    for box in listed:
        if not box.inside(shape):
            return f"a shard at {list(box.offset)} of shape {list(box.shape)} lies outside the shape {list(shape)}"
    total, size = sum(b.numel for b in listed), prod(shape)
    if total < size:
        return f"{size - total} of {size} elements are in no shard"
    overlap = _overlap(listed, len(shape))
    if overlap is not None:
        return f"shards at {list(overlap[0].offset)} and {list(overlap[1].offset)} overlap"
    return None if total == size else f"{total} elements for a size of {size}"


def _overlap(boxes: list[Box], ndim: int) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None."""
    if len(boxes) < 2:
        return None
    stack = [(boxes, 0)]
    while stack:
        group, dim = stack.pop()
        if len(group) < 2:
            continue
        if dim == ndim:
            return group[0], group[1]
        group.sort(key=lambda b: b.offset[dim])
        bands, band, end = [], [group[0]], group[0].offset[dim] + group[0].shape[dim]
        for box in group[1:]:
            if box.offset[dim] >= end:
                bands.append(band)
                band = []
            band.append(box)
            end = max(end, box.offset[dim] + box.shape[dim])
        bands.append(band)
        for band in bands:
            aligned = all(b.offset[dim] == band[0].offset[dim] and b.shape[dim] == band[0].shape[dim] for b in band)
            if aligned or len(bands) > 1:
                stack.append((band, dim + 1 if aligned else dim))
            else:
                found = _ragged_overlap(band, dim, ndim)
                if found is not None:
                    return found
    return None


def _ragged_overlap(band: list[Box], dim: int, ndim: int) -> tuple[Box, Box] | None:
    """Overlap within a band whose boxes neither align nor separate along `dim`: compare active pairs only."""
    active: list[Box] = []
    for box in sorted(band, key=lambda b: b.offset[dim]):
        active = [b for b in active if b.offset[dim] + b.shape[dim] > box.offset[dim]]
        for other in active:
            if intersect(box, other) is not None:
                return other, box
        active.append(box)
    return None


def runs(outer: Box, inner: Box) -> Iterator[tuple[int, int]]:
    """Contiguous element ranges of `inner` in the row-major memory of `outer`, as (start, count), ascending.

    `inner` must lie inside `outer`.
    """
    ndim = len(outer.shape)
    if inner.numel == 0:
        return
    tail = ndim
    while tail > 0 and inner.shape[tail - 1] == outer.shape[tail - 1]:
        tail -= 1
    # Dimensions from `tail` on are whole; the run takes one more dimension, of which it has a part.
    strides = [1] * (ndim + 1)
    for d in range(ndim - 1, -1, -1):
        strides[d] = strides[d + 1] * outer.shape[d]
    lead = max(tail - 1, 0)
    count = inner.numel // prod(inner.shape[:lead])
    starts = [i - o for i, o in zip(inner.offset, outer.offset, strict=True)]
    base = sum(s * strides[d + 1] for d, s in enumerate(starts))
    index = [0] * lead
    while True:
        yield base + sum(k * strides[d + 1] for d, k in enumerate(index)), count
        for d in range(lead - 1, -1, -1):
            index[d] += 1
            if index[d] < inner.shape[d]:
                break
            index[d] = 0
        else:
            return


def boxes_of_run(outer: Box, start: int, count: int) -> Iterator[tuple[Box, int]]:
    """Elements [start, start + count) in the row-major memory of `outer` as boxes, each with its first element.

    The reverse of `runs`; ascending, at most two boxes per dimension.
    """
    shape = outer.shape
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    end = start + count
    while start < end:
        # The outermost dimension of which whole rows are left here.
        dim = next((d for d, n in enumerate(strides) if start % n == 0 and start + n <= end), None)
        if dim is None:
            yield outer, 0
            return
        index = [start // stride % size for stride, size in zip(strides, shape, strict=True)]
        rows = min((end - start) // strides[dim], shape[dim] - index[dim])
        offset = tuple(o + i for o, i in zip(outer.offset, index, strict=True))
        yield Box(offset, (*[1] * dim, rows, *shape[dim + 1 :])), start
        start += rows * strides[dim]
