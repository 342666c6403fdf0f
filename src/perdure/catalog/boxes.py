"""Boxes of tensors read from shard files a few MiB at a time, whatever the cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from perdure.format.box import Box, runs
from perdure.format.metadata import ShardRecord
from perdure.storage.base import FileReader

__all__ = ["chunks", "distinct_boxes", "read_box"]

_CHUNK = 4 << 20
_SPAN = 16 << 20


def distinct_boxes(shards: list[ShardRecord]) -> list[ShardRecord]:
    """Each box once: without `remove_redundancy` several files hold the same."""
    if len(shards) < 2:
        return shards
    found: dict[Box, ShardRecord] = {}
    for shard in shards:
        found.setdefault(shard.box, shard)
    return list(found.values())


def chunks(box: Box, itemsize: int, most: int = _CHUNK) -> Iterator[Box]:
    """A box cut along its leading dimensions into pieces of at most `most` bytes, or one element."""
    stack = [box]
    while stack:
        part = stack.pop()
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if part.numel * itemsize <= most or dim is None:
            yield part
            continue
        rest = prod(part.shape[dim + 1 :]) * itemsize
        step = max(1, most // max(rest, 1))
        end = part.offset[dim] + part.shape[dim]
        for start in reversed(range(part.offset[dim], end, step)):
            offset = (*part.offset[:dim], start, *part.offset[dim + 1 :])
            shape = (*part.shape[:dim], min(step, end - start), *part.shape[dim + 1 :])
            stack.append(Box(offset, shape))


def read_box(reader: FileReader, offset: int, outer: Box, inner: Box, itemsize: int) -> bytearray:
    """The bytes of `inner`, row-major, out of a shard that is `outer` and begins at byte `offset`."""
    data = bytearray(inner.numel * itemsize)
    if not data:
        return data
    target, at = memoryview(data), 0
    pieces = list(runs(outer, inner))
    first, end = pieces[0][0] * itemsize, (pieces[-1][0] + pieces[-1][1]) * itemsize
    if len(pieces) > 1 and end - first <= _SPAN:
        span = bytearray(end - first)
        reader.pread_into(memoryview(span), offset + first)
        for start, count in pieces:
            begin = start * itemsize - first
            target[at : at + count * itemsize] = span[begin : begin + count * itemsize]
            at += count * itemsize
        return data
    for start, count in pieces:
        reader.pread_into(target[at : at + count * itemsize], offset + start * itemsize)
        at += count * itemsize
    return data
