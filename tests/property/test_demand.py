"""Who reads which block for whom, against sets of bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine import demand
from perdure.engine.demand import blocks_needed, divide, list_shards
from perdure.engine.reader import Fill
from perdure.format.box import Box, intersect, runs, whole
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
    listed = list_shards(metadata)
    needs = [blocks_needed(listed, each) for each in fills]
    for rank, each in enumerate(fills):
        for shard in listed:
            itemsize = shard.size // shard.shard.box.numel
            expected = set()
            for fill in each:
                for piece in fill.pieces if fill.name == shard.name else ():
                    both = intersect(shard.shard.box, piece.box) if shard.shard.shape else shard.shard.box
                    for start, count in runs(shard.shard.box, both) if both else ():
                        expected |= {b // BLOCK for b in range(start * itemsize, (start + count) * itemsize)}
            found = np.flatnonzero(needs[rank][shard.first : shard.first + shard.blocks])
            assert set(found.tolist()) == expected
    shared, units = divide(listed, [np.packbits(each).tobytes() for each in needs])
    of_units: Counter[tuple[int, int, int]] = Counter()
    for unit in units:
        assert unit.reader in unit.needed_by
        assert unit.size <= BLOCK
        assert len({part.shard.shard.file for part in unit.parts}) == 1
        for part in unit.parts:
            block = part.shard.first + part.start // BLOCK
            assert part.size == min(BLOCK, part.shard.size - part.start)
            for rank in range(len(fills)):
                assert bool(needs[rank][block]) == (rank in unit.needed_by)
            of_units[part.shard.first, part.start, part.size] += 1
    assert set(of_units.values()) <= {1}
    counts = sum(each.astype(int) for each in needs) if needs else np.zeros(0)
    for number, shard in enumerate(listed):
        own = counts[shard.first : shard.first + shard.blocks]
        assert (number in shared) == bool((own > 1).any())
        passed = sum(key[0] == shard.first for key in of_units)
        assert passed == (int((own > 0).sum()) if number in shared else 0)
