"""Which digest blocks of a checkpoint each rank needs, and who reads those that several need.

Pure: computed alike on every rank from the record and one bit per rank and block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from perdure.engine.place import distinct, overlap
from perdure.engine.reader import Fill
from perdure.format.box import Box
from perdure.format.digest import BLOCK
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, Section, ShardRecord, TensorRecord

__all__ = ["Listed", "Part", "Unit", "blocks_needed", "divide", "list_shards"]

_AT_ONCE = 4096


@dataclass(frozen=True)
class Listed:
    """A shard in the order in which every rank lists them; `first` is the number of its first block."""

    section: Section
    name: str
    record: TensorRecord
    shard: ShardRecord
    size: int
    first: int

    @property
    def blocks(self) -> int:
        """How many digest blocks it has."""
        return -(-self.size // BLOCK)


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + size) of a listed shard, which begin and end with a digest block."""

    shard: Listed
    start: int
    size: int


@dataclass(frozen=True)
class Unit:
    """What is read at once by one rank for all that need it: a block, or small shards that follow each other."""

    number: int
    reader: int
    needed_by: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes of all its parts."""
        return sum(part.size for part in self.parts)


def list_shards(metadata: CheckpointMetadata) -> list[Listed]:
    """The shards of a checkpoint, each box once, in the order in which they lie in their files."""
    found = []
    for section, name, record in metadata.tensors():
        itemsize = BY_SAFETENSORS[record.dtype].itemsize
        for shard in distinct(record.shards):
            size = shard.box.numel * itemsize
            if size:
                order = (shard.file, -itemsize, shard.key or name, section, name, shard.box)
                found.append((order, section, name, record, shard, size))
    found.sort(key=lambda row: row[0])
    listed, first = [], 0
    for _, section, name, record, shard, size in found:
        listed.append(Listed(section, name, record, shard, size, first))
        first += listed[-1].blocks
    return listed


def blocks_needed(listed: Sequence[Listed], fills: Iterable[Fill]) -> NDArray[np.bool_]:
    """Which of all blocks the pieces of a rank need."""
    total = listed[-1].first + listed[-1].blocks if listed else 0
    needed = np.zeros(total, dtype=bool)
    boxes: dict[tuple[Section, str], list[Box]] = {}
    for fill in fills:
        boxes.setdefault((fill.section, fill.name), []).extend(piece.box for piece in fill.pieces)
    for shard in listed:
        itemsize = shard.size // shard.shard.box.numel
        own = needed[shard.first : shard.first + shard.blocks]
        for box in boxes.get((shard.section, shard.name), ()):
            inner = overlap(shard.shard.box, box)
            if inner is None:
                continue
            if len(own) == 1 or inner == shard.shard.box:
                own[:] = True
                break
            starts, count = _runs(shard.shard.box, inner)
            first, last = starts * itemsize // BLOCK, ((starts + count) * itemsize - 1) // BLOCK
            # A run may span blocks: each opens where it begins and closes after where it ends.
            steps = np.zeros(len(own) + 1, dtype=np.int64)
            np.add.at(steps, first, 1)
            np.add.at(steps, last + 1, -1)
            own |= np.cumsum(steps[:-1]) > 0
    return needed


def _runs(outer: Box, inner: Box) -> tuple[NDArray[np.int64], int]:
    """Where the contiguous runs of `inner` begin in the memory of `outer`, and how long each is, in elements."""
    shape = outer.shape
    tail = len(shape)
    while tail > 0 and inner.shape[tail - 1] == shape[tail - 1]:
        tail -= 1
    lead = max(tail - 1, 0)
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.array([sum((i - o) * s for i, o, s in zip(inner.offset, outer.offset, strides, strict=True))])
    for dim in range(lead):
        starts = (starts[:, None] + np.arange(inner.shape[dim]) * strides[dim]).reshape(-1)
    return starts.astype(np.int64), prod(inner.shape[lead:])


def divide(listed: Sequence[Listed], needs: Sequence[bytes]) -> tuple[set[int], list[Unit]]:
    """The shards of which several ranks need the same block, and their blocks as units to be read once.

    Every other shard is left to the rank that needs it. Units go to the rank that has least to read so far,
    what it needs alone included, ties to the lower rank.

    Args:
        needs: of each rank `blocks_needed`, packed to bits.
    """
    if not listed:
        return set(), []
    bits = np.stack([np.frombuffer(each, dtype=np.uint8) for each in needs])
    firsts = np.array([shard.first for shard in listed])
    counts = np.array([shard.blocks for shard in listed])
    total = int(counts.sum())
    demand = np.zeros(total, dtype=np.int32)
    for row in bits:
        demand += np.unpackbits(row, count=total)
    shared = np.maximum.reduceat(demand, firsts) > 1
    sizes = np.full(total, BLOCK, dtype=np.int64)
    sizes[firsts + counts - 1] = [shard.size - (shard.blocks - 1) * BLOCK for shard in listed]
    alone = np.where(np.repeat(shared, counts), 0, sizes)
    loads = [int(np.dot(np.unpackbits(row, count=total), alone)) for row in bits]
    numbers: list[int] = np.flatnonzero(shared).tolist()
    blocks = ((listed[n], b) for n in numbers for b in range(listed[n].blocks))
    units = _units(blocks, _owners(bits, np.flatnonzero(np.repeat(shared, counts))), loads)
    return set(numbers), units


def _owners(bits: NDArray[np.uint8], blocks: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
    """The ranks that need each of some blocks, in turn."""
    for start in range(0, len(blocks), _AT_ONCE):
        chosen = blocks[start : start + _AT_ONCE]
        columns = bits[:, chosen >> 3] >> (7 - (chosen & 7)).astype(np.uint8) & 1
        for column in columns.T:
            yield tuple(np.flatnonzero(column).tolist())


def _units(blocks: Iterable[tuple[Listed, int]], owners: Iterable[tuple[int, ...]], loads: list[int]) -> list[Unit]:
    units: list[Unit] = []
    parts: list[Part] = []
    needed_by: tuple[int, ...] = ()

    def close() -> None:
        if parts:
            reader = min(needed_by, key=lambda rank: (loads[rank], rank))
            units.append(Unit(len(units), reader, needed_by, tuple(parts)))
            loads[reader] += units[-1].size
            parts.clear()

    room = 0
    for (shard, block), ranks in zip(blocks, owners, strict=True):
        if not ranks:
            continue
        part = Part(shard, block * BLOCK, min(BLOCK, shard.size - block * BLOCK))
        if not parts or ranks != needed_by or part.size > room or shard.shard.file != parts[0].shard.shard.file:
            close()
            needed_by, room = ranks, BLOCK
        parts.append(part)
        room -= part.size
    close()
    return units
