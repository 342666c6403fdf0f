"""Who writes what: the same everywhere, everything once, nobody overloaded."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine.columns import encode_held
from perdure.engine.plan import Planner, SavePlan, ShardId, make_plan
from perdure.engine.ranks import Ranks
from perdure.errors import UnsupportedStateError
from perdure.format.box import Box, whole
from perdure.format.metadata import SECTIONS
from perdure.state.shards import NamedTensor, Piece

Held = list[list[NamedTensor]]
"""What each rank holds."""

MEMORY = torch.zeros(())


def named(
    name: str,
    shape: tuple[int, ...],
    *boxes: Box,
    dtype: str = "F32",
    section: str = "model",
    also: tuple[str, ...] = (),
) -> NamedTensor:
    pieces = tuple(Piece(box, MEMORY.expand(box.shape)) for box in boxes)
    return NamedTensor(section, name, dtype, "", shape, pieces, also)  # type: ignore[arg-type]


def plan_of(held: Held, remove_redundancy: bool = True) -> SavePlan:
    return make_plan([encode_held(tensors) for tensors in held], remove_redundancy)


def writes(plan: SavePlan, ranks: int) -> list[set[ShardId]]:
    listed = [plan.writes_of(rank) for rank in range(ranks)]
    assert all(len(set(shards)) == len(shards) for shards in listed)
    return [set(shards) for shards in listed]


def greedy(held: Held) -> list[set[ShardId]]:
    """The rule one box at a time: fewest owners first, then largest; the least loaded owner, then the lower rank."""
    owners: dict[ShardId, list[int]] = {}
    sizes: dict[ShardId, int] = {}
    for rank, tensors in enumerate(held):
        for tensor in tensors:
            for piece in tensor.pieces:
                shard = ShardId(tensor.section, tensor.name, piece.box)
                owners.setdefault(shard, []).append(rank)
                sizes[shard] = piece.box.numel * {"F32": 4, "BF16": 2}[tensor.dtype]
    loads, found = [0] * len(held), [set[ShardId]() for _ in held]
    order = sorted(owners, key=lambda s: (len(owners[s]), -sizes[s], SECTIONS.index(s.section), s.name, s.box))
    for shard in order:
        rank = min(owners[shard], key=lambda r: (loads[r], r))
        loads[rank] += sizes[shard]
        found[rank].add(shard)
    return found


def edges(draw: st.DrawFn, size: int, parts: int) -> list[tuple[int, int]]:
    """A range cut in `parts` runs, some maybe empty, as (begin, count)."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [(a, b - a) for a, b in zip([0, *inner], [*inner, size], strict=True)]


@st.composite
def layouts(draw: st.DrawFn) -> Held:
    """Ranks on a grid; each tensor is cut along some of its axes and repeated along the others, on some stages only."""
    mesh = draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 3, 2), (2, 1, 3), (2, 3, 2)]))
    places = list(product(*map(range, mesh)))
    held: Held = [[] for _ in places]
    for number in range(draw(st.integers(0, 8))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype, section = draw(st.sampled_from(["F32", "BF16"])), draw(st.sampled_from(SECTIONS))
        stage = draw(st.sampled_from([None, *range(mesh[0])]))
        by = {axis: draw(st.sampled_from([None, *range(len(shape))])) for axis in (1, 2)}
        if by[1] == by[2]:
            by[2] = None
        cuts = {axis: edges(draw, shape[dim], mesh[axis]) for axis, dim in by.items() if dim is not None}
        order = draw(st.booleans())
        for rank, place in enumerate(places):
            if stage is not None and place[0] != stage:
                continue
            offset, extent = [0] * len(shape), list(shape)
            for axis, runs in cuts.items():
                offset[by[axis]], extent[by[axis]] = runs[place[axis]]
            box = Box(tuple(offset), tuple(extent))
            pieces = () if cuts and box.numel == 0 else (box,)
            held[rank].insert(
                0 if order else len(held[rank]), named(f"t{number}", shape, *pieces, dtype=dtype, section=section)
            )
    return held


@given(layouts())
def test_the_plan_is_the_rule_taken_one_box_at_a_time(held: Held) -> None:
    plan = plan_of(held)
    expected = greedy(held)
    assert writes(plan, len(held)) == expected
    sizes = {(t.section, t.name): {"F32": 4, "BF16": 2}[t.dtype] for tensors in held for t in tensors}
    loads = [sum(s.box.numel * sizes[s.section, s.name] for s in shards) for shards in expected]
    assert [plan.bytes_of(rank) for rank in range(len(held))] == loads
    assert plan.total_bytes == sum(
        prod(t.shape) * sizes[t.section, t.name]
        for t in {(t.section, t.name): t for tensors in held for t in tensors}.values()
    )


@given(layouts())
def test_with_redundancy_everybody_writes_what_it_holds(held: Held) -> None:
    plan = plan_of(held, remove_redundancy=False)
    for rank, tensors in enumerate(held):
        mine = {ShardId(t.section, t.name, p.box) for t in tensors for p in t.pieces}
        assert writes(plan, len(held))[rank] == mine
        assert plan.bytes_of(rank) == sum(
            p.box.numel * {"F32": 4, "BF16": 2}[t.dtype] for t in tensors for p in t.pieces
        )


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_replicas_are_spread_evenly(sizes: list[int], ranks: int) -> None:
    """The greedy bound: no rank has more than its share and one tensor."""
    tensors = [named(f"t{n}", (size,), whole((size,))) for n, size in enumerate(sizes)]
    plan = plan_of([tensors] * ranks)
    assert max(map(plan.bytes_of, range(ranks))) <= 4 * (sum(sizes) / ranks + max(sizes, default=0))


def test_several_pieces_on_one_rank() -> None:
    """A rank with two boxes of a tensor that others have too: nothing is given twice."""
    quarters = [Box((n,), (1,)) for n in range(4)]
    held = [
        [named("x", (4,), *quarters[:3])],
        [named("x", (4,), *quarters[1:])],
        [named("x", (4,), quarters[0], quarters[3])],
    ]
    assert writes(plan_of(held), 3) == greedy(held)


HALVES = Box((0,), (2,)), Box((2,), (2,))


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        (named("x", (4,), HALVES[0]), "whole tensor.*in no shard"),
        (named("x", (4,)), "whole tensor.*in no shard"),
        (named("x", (4,), Box((1,), (3,))), "overlap"),
        (named("x", (5,), HALVES[1]), r"rank 1 has F32 \[5\], another rank F32 \[4\]"),
        (named("x", (4,), HALVES[1], dtype="BF16"), "rank 1 has BF16"),
        (named("x", (4,), HALVES[1], also=("tied",)), r"rank 1 has .*also tied"),
    ],
)
def test_ranks_that_don_t_fit_together_are_refused_by_name(theirs: NamedTensor, what: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"model: x: .*{what}"):
        plan_of([[named("x", (4,), HALVES[0])], [theirs]])


def test_boxes_that_are_no_grid_are_compared_one_by_one() -> None:
    """Two columns of which one is cut in two: a cover, though not a grid; then the same with a gap."""
    boxes = [Box((0, 0), (2, 1)), Box((0, 1), (1, 1)), Box((1, 1), (1, 1))]
    held = [[named("x", (2, 2), box)] for box in boxes]
    assert [len(shards) for shards in writes(plan_of(held), 3)] == [1, 1, 1]
    with pytest.raises(UnsupportedStateError, match="in no shard"):
        plan_of(held[:2])


class Exchange:
    """Several ranks in threads, whose messages are counted."""

    def __init__(self, count: int) -> None:
        self.count, self.told, self.exchanges = count, [b""] * count, 0
        self.barrier = threading.Barrier(count)

    def rank(self, number: int) -> Ranks:
        ranks = Ranks()
        ranks.rank, ranks.size = number, self.count

        def gather(value: object, doing: str) -> list[object]:
            self.told[number] = msgspec.msgpack.encode(value)
            if self.barrier.wait(20) == 0:
                self.exchanges += 1
            heard = [msgspec.msgpack.decode(text) for text in self.told]
            self.barrier.wait(20)
            return heard

        ranks.gather = gather  # type: ignore[assignment, method-assign]
        return ranks

    def plan(self, planners: Sequence[Planner], held: Held) -> list[SavePlan]:
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda planner, tensors: planner.plan(tensors), planners, held))


def test_ranks_come_to_the_same_plan_and_keep_it_while_nothing_changes() -> None:
    shared = [named(f"layers.{n}.weight", (6, 4), Box((0, 0), (6, 4))) for n in range(20)]
    held = [[*shared, named("cut", (6,), Box((2 * rank,), (2,)))] for rank in range(3)]
    exchange = Exchange(3)
    planners = [Planner(exchange.rank(number)) for number in range(3)]
    plans = exchange.plan(planners, held)
    assert [writes(plan, 3) for plan in plans] == [greedy(held)] * 3
    assert exchange.exchanges == 2
    again = exchange.plan(planners, held)
    assert all(a is b for a, b in zip(again, plans, strict=True))
    assert exchange.exchanges == 3
    # One rank's layout changes: all plan anew.
    other = [*held[:2], [*held[2], named("more", (1,), Box((0,), (1,)))]]
    assert [writes(plan, 3) for plan in exchange.plan(planners, other)] == [greedy(other)] * 3
