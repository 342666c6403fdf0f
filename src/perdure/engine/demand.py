"""Which digest blocks of a checkpoint each rank needs, and who reads those that several need.

Pure: computed alike on every rank from the record and one bit per rank and block. Shards are numbered in the
order in which they lie in their files; what is said of a million of them is said in arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from perdure.catalog.boxes import distinct_boxes
from perdure.engine.destinations import near, overlap
from perdure.engine.reader import Fill
from perdure.format.box import Box
from perdure.format.digest import BLOCK
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, Section, ShardRecord, TensorRecord

__all__ = ["Division", "Listing", "Part", "Unit", "divide"]

_AT_ONCE = 1 << 16
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Bytes [start, start + size) of a shard, which begin and end with a digest block."""

    section: Section
    name: str
    record: TensorRecord
    shard: ShardRecord
    start: int
    size: int


class Listing:
    """The shards of a checkpoint that have elements, each box once, and their digest blocks, numbered throughout.

    Attributes:
        firsts, counts: number of each shard's first block, and how many it has.
        sizes: bytes of each shard; `files` the file it lies in.
    """

    def __init__(self, metadata: CheckpointMetadata) -> None:
        itemsizes = {name: dtype.itemsize for name, dtype in BY_SAFETENSORS.items()}
        tensors = sorted(metadata.tensors(), key=lambda t: (-itemsizes[t[2].dtype], t[1], t[0]))
        self._keys = {(section, name): number for number, (section, name, _) in enumerate(tensors)}
        self._tensors = tensors
        self._shards = [_with_elements(record) for _, _, record in tensors]
        lengths = [len(shards) for shards in self._shards]
        sizes = [
            prod(shard.shape) * itemsizes[record.dtype]
            for (_, _, record), shards in zip(tensors, self._shards, strict=True)
            for shard in shards
        ]
        files = [shard.file for shards in self._shards for shard in shards]
        owner = np.repeat(np.arange(len(tensors)), lengths)
        position = np.concatenate([np.arange(0), *map(np.arange, lengths)])
        order = np.lexsort((position, owner, np.array(files, dtype=np.int64)))
        self._owner, self._position = owner[order], position[order]
        self._begin = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._number = np.empty(len(order), dtype=np.int64)
        self._number[order] = np.arange(len(order))
        self.sizes: Ints = np.array(sizes, dtype=np.int64)[order]
        self.files: Ints = np.array(files, dtype=np.int64)[order]
        self.counts: Ints = -(-self.sizes // BLOCK)
        self.firsts: Ints = np.cumsum(self.counts) - self.counts

    @property
    def blocks(self) -> int:
        """How many digest blocks there are in all."""
        return int(self.counts.sum())

    def block_sizes(self) -> Ints:
        """Bytes of each block."""
        sizes = np.full(self.blocks, BLOCK, dtype=np.int64)
        sizes[self.firsts + self.counts - 1] = self.sizes - (self.counts - 1) * BLOCK
        return sizes

    def parts(self, blocks: Ints) -> list[Part]:
        """Each of these blocks as a part of its shard."""
        numbers = self.firsts.searchsorted(blocks, side="right") - 1
        starts = (blocks - self.firsts[numbers]) * BLOCK
        sizes = np.minimum(self.sizes[numbers] - starts, BLOCK)
        columns = (each.tolist() for each in (self._owner[numbers], self._position[numbers], starts, sizes))
        found = []
        for tensor, position, start, size in zip(*columns, strict=True):
            section, name, record = self._tensors[tensor]
            found.append(Part(section, name, record, self._shards[tensor][position], start, size))
        return found

    def needed(self, fills: Iterable[Fill]) -> NDArray[np.bool_]:
        """Which of all blocks some pieces need."""
        needed = np.zeros(self.blocks, dtype=bool)
        for fill in fills:
            tensor = self._keys[fill.section, fill.name]
            itemsize = BY_SAFETENSORS[fill.record.dtype].itemsize
            shards = self._shards[tensor]
            places = {id(shard): position for position, shard in enumerate(shards)}
            wanted = {piece.box for piece in fill.pieces}
            for shard in near(shards, fill.pieces):
                number = self._number[self._begin[tensor] + places[id(shard)]]
                first = self.firsts[number]
                _mark(needed[first : first + self.counts[number]], shard.box, wanted, itemsize)
        return needed

    def alone(self, fills: Iterable[Fill], shared: NDArray[np.bool_]) -> list[Fill]:
        """The fills with those of their shards only that are not shared."""
        if shared.all():
            return []
        found = []
        for fill in fills:
            tensor = self._keys[fill.section, fill.name]
            numbers = self._number[self._begin[tensor] : self._begin[tensor + 1]]
            left = np.flatnonzero(~shared[numbers]).tolist()
            if left:
                shards = [self._shards[tensor][position] for position in left]
                record = msgspec.structs.replace(fill.record, shards=shards)
                found.append(Fill(fill.section, fill.name, record, fill.pieces))
        return found


def _with_elements(record: TensorRecord) -> list[ShardRecord]:
    """The shards that have elements, each box once."""
    shards = record.shards
    held = [prod(shard.shape) for shard in shards]
    if sum(held) == prod(record.shape):
        # They cover the tensor, so none is there twice.
        return shards if all(held) else [shard for shard, count in zip(shards, held, strict=True) if count]
    return [shard for shard in distinct_boxes(shards) if prod(shard.shape)]


def _mark(blocks: NDArray[np.bool_], outer: Box, wanted: Iterable[Box], itemsize: int) -> None:
    """Marks those of a shard's blocks that the wanted boxes need."""
    for box in wanted:
        inner = overlap(outer, box)
        if inner is None:
            continue
        if len(blocks) == 1 or inner == outer:
            blocks[:] = True
            return
        starts, count = _runs(outer, inner)
        first, last = starts * itemsize // BLOCK, ((starts + count) * itemsize - 1) // BLOCK
        # A run may span blocks: each opens where it begins and closes after where it ends.
        steps = np.zeros(len(blocks) + 1, dtype=np.int64)
        np.add.at(steps, first, 1)
        np.add.at(steps, last + 1, -1)
        blocks |= np.cumsum(steps[:-1]) > 0


def _runs(outer: Box, inner: Box) -> tuple[Ints, int]:
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


@dataclass(frozen=True)
class Unit:
    """What is read at once by one rank for all that need it: a block, or small shards that follow each other.

    `turn` says how many its reader has read before.
    """

    reader: int
    turn: int
    needed_by: tuple[int, ...]
    blocks: Ints


@dataclass(frozen=True)
class Division:
    """The shards of which several ranks need the same block, and these blocks as units, each to be read once.

    Every other shard is left to the rank that needs it.
    """

    shared: NDArray[np.bool_]
    units: list[Unit]


def divide(listing: Listing, needs: Sequence[bytes]) -> Division:
    """Who reads what: units go to the rank that has least to read so far, ties to the lower rank.

    What a rank needs alone counts among what it has to read.

    Args:
        needs: of each rank `Listing.needed`, packed to bits.
    """
    total = listing.blocks
    if not total:
        return Division(np.zeros(0, dtype=bool), [])
    bits = np.stack([np.frombuffer(each, dtype=np.uint8) for each in needs])
    demand = np.zeros(total, dtype=np.int32)
    for row in bits:
        demand += np.unpackbits(row, count=total)
    shared = np.maximum.reduceat(demand, listing.firsts) > 1
    of_shared = np.repeat(shared, listing.counts)
    sizes = listing.block_sizes()
    alone = np.where(of_shared, 0, sizes)
    loads = np.array([np.dot(np.unpackbits(row, count=total), alone) for row in bits], dtype=np.int64)
    units: list[Unit] = []
    turns = [0] * len(needs)
    blocks = np.flatnonzero(of_shared & (demand > 0))
    files = np.repeat(listing.files, listing.counts)
    for start in range(0, len(blocks), _AT_ONCE):
        _add_units(units, blocks[start : start + _AT_ONCE], bits, files, sizes, loads, turns)
    return Division(shared, units)


def _add_units(
    units: list[Unit],
    blocks: Ints,
    bits: NDArray[np.uint8],
    files: Ints,
    sizes: Ints,
    loads: Ints,
    turns: list[int],
) -> None:
    """Packs blocks of one file that the same ranks need into units, and gives each to a rank."""
    owners = bits[:, blocks >> 3] >> (7 - (blocks & 7)).astype(np.uint8) & 1
    differ = (owners[:, 1:] != owners[:, :-1]).any(axis=0) | (files[blocks[1:]] != files[blocks[:-1]])
    ends = np.cumsum(sizes[blocks])
    for run in np.split(np.arange(len(blocks)), np.flatnonzero(differ) + 1):
        begin, end = int(run[0]), int(run[-1]) + 1
        ranks = np.flatnonzero(owners[:, begin])
        while begin < end:
            before = int(ends[begin - 1]) if begin else 0
            after = min(max(int(np.searchsorted(ends, before + BLOCK, side="right")), begin + 1), end)
            reader = int(ranks[loads[ranks].argmin()])
            loads[reader] += int(ends[after - 1]) - before
            units.append(Unit(reader, turns[reader], tuple(ranks.tolist()), blocks[begin:after]))
            turns[reader] += 1
            begin = after
