"""Who writes what: the same everywhere, everything once, nobody overloaded."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.engine.plan import Planner, ShardId, assign
from perdure.engine.ranks import Ranks
from perdure.errors import UnsupportedStateError
from perdure.format.box import Box
from perdure.state.shards import NamedTensor, Piece


def shard(number: int, offset: int = 0) -> ShardId:
    return ShardId("model", f"t{number}", Box((offset,), (1,)))


@st.composite
def holdings(draw: st.DrawFn) -> tuple[dict[ShardId, list[int]], dict[ShardId, int], int]:
    ranks = draw(st.integers(1, 5))
    owners = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
    holders = {shard(n): draw(owners) for n in range(draw(st.integers(0, 20)))}
    sizes = {s: draw(st.sampled_from([0, 1, 1, 8, 100])) for s in holders}
    return holders, sizes, ranks


@given(holdings(), st.randoms(use_true_random=False))
def test_every_shard_goes_once_to_one_who_has_it(
    case: tuple[dict[ShardId, list[int]], dict[ShardId, int], int], random: object
) -> None:
    holders, sizes, ranks = case
    writes = assign(holders, sizes, ranks)
    assert len(writes) == ranks
    assert sorted(s.name for rank in writes for s in rank) == sorted(s.name for s in holders)
    for rank, shards in enumerate(writes):
        assert all(rank in holders[s] for s in shards)
    # The order in which things were told plays no part.
    shuffled = list(holders.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(dict(shuffled), sizes, ranks) == writes
    assert assign({s: owners[::-1] for s, owners in holders.items()}, sizes, ranks) == writes


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_replicas_are_spread_evenly(sizes: list[int], ranks: int) -> None:
    """The greedy bound: no rank has more than its share and one shard."""
    holders = {shard(n): list(range(ranks)) for n in range(len(sizes))}
    by_shard = {shard(n): size for n, size in enumerate(sizes)}
    loads = [sum(by_shard[s] for s in rank) for rank in assign(holders, by_shard, ranks)]
    assert max(loads, default=0) <= sum(sizes) / ranks + max(sizes, default=0)


def test_those_with_no_choice_come_first() -> None:
    """Rank 0 alone has a large piece; what both have then goes to rank 1."""
    holders = {shard(0): [0], shard(1): [0, 1], shard(2): [0, 1]}
    writes = assign(holders, {shard(0): 10, shard(1): 6, shard(2): 4}, 2)
    assert [[s.name for s in rank] for rank in writes] == [["t0"], ["t1", "t2"]]


def test_ties_go_to_the_lower_rank() -> None:
    writes = assign({shard(n): [1, 0, 2] for n in range(3)}, {shard(n): 5 for n in range(3)}, 3)
    assert [[s.name for s in rank] for rank in writes] == [["t0"], ["t1"], ["t2"]]


def named(name: str, tensor: torch.Tensor, shape: tuple[int, ...], *boxes: Box, dtype: str = "F32") -> NamedTensor:
    return NamedTensor("model", name, dtype, "", shape, tuple(Piece(b, tensor) for b in boxes))


class Together(Ranks):
    """Several ranks' answers at once: what each rank would have said."""

    def __init__(self, *others: list[NamedTensor]) -> None:
        super().__init__()
        self.size, self.others, self.full_exchanges = 1 + len(others), others, 0

    def gather(self, value: object, doing: str) -> list[object]:
        if isinstance(value, str):
            return [value, *(f"rank {n}" for n in range(len(self.others)))]
        self.full_exchanges += 1
        single = [Capture() for _ in self.others]
        for capture, tensors in zip(single, self.others, strict=True):
            capture.listen(tensors)
        return [value, *(capture.columns for capture in single)]


class Capture(Ranks):
    """Catches what a planner would tell the others."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: object = []

    def gather(self, value: object, doing: str) -> list[object]:
        if not isinstance(value, str):
            self.columns = value
            raise Heard
        return [value]

    def listen(self, tensors: list[NamedTensor]) -> None:
        with contextlib.suppress(Heard):
            Planner(self).plan(tensors)


class Heard(Exception):
    """What was to be caught has been."""


HALVES = Box((0,), (2,)), Box((2,), (2,))


def test_a_plan_of_two_halves_and_a_replica() -> None:
    whole = Box((0,), (4,))
    memory = torch.zeros(4)
    mine = [named("cut", memory[:2], (4,), HALVES[0]), named("both", memory, (4,), whole)]
    theirs = [named("cut", memory[2:], (4,), HALVES[1]), named("both", memory, (4,), whole)]
    plan = Planner(Together(theirs)).plan(mine)
    assert [[(s.name, s.box.offset) for s in rank] for rank in plan.writes] == [
        [("cut", (0,)), ("both", (0,))],
        [("cut", (2,))],
    ]
    assert [plan.bytes_of(rank) for rank in range(2)] == [24, 8]


def test_with_redundancy_everybody_writes_what_it_holds() -> None:
    memory = torch.zeros(4)
    tensors = [named("both", memory, (4,), Box((0,), (4,)))]
    plan = Planner(Together(tensors), remove_redundancy=False).plan(tensors)
    assert [len(rank) for rank in plan.writes] == [1, 1]


def test_a_tensor_of_one_rank_only_is_written_there() -> None:
    tensors = [named("mine", torch.zeros(4), (4,), Box((0,), (4,)))]
    plan = Planner(Together([])).plan(tensors)
    assert [len(rank) for rank in plan.writes] == [1, 0]


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        ([named("x", torch.zeros(2), (4,), HALVES[0])], "whole tensor.*in no shard"),
        ([named("x", torch.zeros(2), (4,), Box((1,), (3,)))], "overlap"),
        ([named("x", torch.zeros(2), (5,), HALVES[1])], "another rank"),
        ([named("x", torch.zeros(2), (4,), HALVES[1], dtype="BF16")], "another rank"),
    ],
)
def test_ranks_that_don_t_fit_together_are_refused_by_name(theirs: list[NamedTensor], what: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"model: x: .*{what}"):
        Planner(Together(theirs)).plan([named("x", torch.zeros(2), (4,), HALVES[0])])


def test_a_plan_is_kept_while_nothing_changes() -> None:
    ranks = Together([])
    planner = Planner(ranks)
    tensors = [named("x", torch.zeros(4), (4,), Box((0,), (4,)))]
    first = planner.plan(tensors)
    assert planner.plan(tensors) is first
    assert ranks.full_exchanges == 1
    assert planner.plan([named("y", torch.zeros(4), (4,), Box((0,), (4,)))]) is not first
