"""Who reads which block for whom, against sets of bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine import demand
from perdure.engine.demand import Listing, divide
from perdure.engine.reader import Fill
from perdure.format.box import Box, intersect, runs, whole
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord, TensorRecord
from perdure.state.shards import Piece

BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "BLOCK", BLOCK)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor cut along one dimension, some runs maybe empty."""
    if not shape:
        return [whole(shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    marks = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    found = []
    for low, high in zip([0, *marks], [*marks, shape[dim]], strict=True):
        offset, extent = [0] * len(shape), list(shape)
        offset[dim], extent[dim] = low, high - low
        found.append(Box(tuple(offset), tuple(extent)))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[CheckpointMetadata, list[list[Fill]]]:
    ranks = draw(st.integers(1, 4))
    metadata = CheckpointMetadata(files=[FileRecord(f"f{n}", 0, "") for n in range(3)])
    fills: list[list[Fill]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(["F32", "BF16", "U8"]))
        stored = [ShardRecord(draw(st.integers(0, 2)), b.offset, b.shape, "") for b in draw(cuts(shape)) if b.numel]
        record = metadata.model[f"t{number}"] = TensorRecord(dtype, shape, stored)
        wanted = draw(cuts(shape))
        for rank in range(ranks):
            held = draw(st.lists(st.sampled_from(wanted), max_size=2))
            pieces = tuple(Piece(box, torch.zeros(box.shape)) for box in held)
            fills[rank].append(Fill("model", f"t{number}", record, pieces))
    return metadata, fills


@given(cases())
def test_units_are_what_several_need_and_everything_is_read_once(
    case: tuple[CheckpointMetadata, list[list[Fill]]],
) -> None:
    metadata, fills = case
    listing = Listing(metadata)
    needs = [listing.needed(each) for each in fills]
    parts = listing.parts(np.arange(listing.blocks))
    assert [part.size for part in parts] == listing.block_sizes().tolist()
    stored = sum(record.nbytes for record in metadata.model.values())
    assert sum(part.size for part in parts) == stored
    for rank, each in enumerate(fills):
        for block, part in enumerate(parts):
            itemsize = BY_SAFETENSORS[part.record.dtype].itemsize
            bytes_needed = set()
            for fill in each:
                for piece in fill.pieces if fill.name == part.name else ():
                    both = intersect(part.shard.box, piece.box) if part.shard.shape else part.shard.box
                    for start, count in runs(part.shard.box, both) if both else ():
                        bytes_needed |= set(range(start * itemsize, (start + count) * itemsize))
            own = set(range(part.start, part.start + part.size))
            assert bool(needs[rank][block]) == bool(own & bytes_needed)
    division = divide(listing, [np.packbits(each).tobytes() for each in needs])
    passed: Counter[int] = Counter()
    read = [0] * len(fills)
    turns: Counter[int] = Counter()
    for unit in division.units:
        assert unit.turn == turns[unit.reader]
        turns[unit.reader] += 1
        assert unit.reader in unit.needed_by
        own_parts = [parts[block] for block in unit.blocks]
        assert sum(part.size for part in own_parts) <= BLOCK
        assert len({part.shard.file for part in own_parts}) == 1
        for block in unit.blocks:
            assert [rank for rank in range(len(fills)) if needs[rank][block]] == list(unit.needed_by)
        passed.update(unit.blocks.tolist())
        read[unit.reader] += sum(part.size for part in own_parts)
    # A shard of which several need a block is passed on; others are read by those who need them.
    shards = np.repeat(np.arange(len(listing.firsts)), listing.counts)
    for block in range(listing.blocks):
        alike = [b for b in range(listing.blocks) if shards[b] == shards[block]]
        several = any(sum(bool(need[b]) for need in needs) > 1 for b in alike)
        wanted = any(need[block] for need in needs)
        assert bool(division.shared[shards[block]]) == several
        assert passed[block] == int(several and wanted)
        if several:
            continue
        for rank, each in enumerate(fills):
            alone = listing.alone(each, division.shared)
            found = any(parts[block].shard in fill.record.shards for fill in alone if fill.name == parts[block].name)
            assert found or not needs[rank][block]


@given(st.integers(1, 5), st.integers(1, 30))
def test_replicas_share_the_reading_evenly(ranks: int, count: int) -> None:
    metadata = CheckpointMetadata(files=[FileRecord("f", 0, "")])
    for number in range(count):
        shard = ShardRecord(0, (0,), (BLOCK,), "")
        metadata.model[f"t{number}"] = TensorRecord("U8", (BLOCK,), [shard])
    listing = Listing(metadata)
    everything = np.packbits(np.ones(listing.blocks, dtype=bool)).tobytes()
    division = divide(listing, [everything] * ranks)
    times = Counter(unit.reader for unit in division.units)
    assert len(division.units) == (count if ranks > 1 else 0)
    assert ranks == 1 or max(times.values()) - min(times.get(rank, 0) for rank in range(ranks)) <= 1
