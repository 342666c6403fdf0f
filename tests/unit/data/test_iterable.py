"""IterableLoader: exact by the data set's own state, whatever is read ahead; refused or said where it cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from perdure.data.iterable import IterableLoader, is_iterable
from perdure.data.loader import ResumableLoader
from perdure.data.streaming import content_id
from perdure.errors import DataError, MismatchError, UsageError

LENGTH = 23


class Row:
    """Numbers in a row, epoch after epoch in another order, with a state: what torchdata's protocol asks for."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.epoch, self.at = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        while self.at < self.length:
            self.at += 1
            yield order[self.at - 1], float(torch.rand(())) + random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Eager(Row):
    """Looks for its next sample at once where a state was loaded, as the `Loader` of torchdata's nodes does."""

    loaded = False

    def __iter__(self) -> Iterator[tuple[int, float]]:
        row = super().__iter__()
        return chain(list(islice(row, 1)), row) if self.loaded else row

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = True


class Stateless:
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Own(Row):
    """Splits itself: the odd and the even numbers."""

    shards_itself = True

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return (sample for sample in super().__iter__() if sample[0] % 2 == self.rank)


class Broken(Row):
    def __iter__(self) -> Iterator[Any]:
        for number, sample in enumerate(super().__iter__()):
            if number == 5:
                raise KeyError("a damaged shard")
            yield sample


@dataclass
class Pair:
    first: Any
    second: int


def samples(loader: IterableLoader, steps: int) -> list[list[str]]:
    return [[str(data) for data in step] for step in loader.take(steps)]


@pytest.mark.parametrize("kind", [Row, Eager])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_chain_of_states_goes_through_every_epoch_as_one_run(num_workers: int, kind: type[Row]) -> None:
    whole = samples(IterableLoader(kind(), global_batch_size=4, local_batch_size=2, seed=5), 20)
    numbers = [
        int(data[0][i])
        for step in IterableLoader(Row(), global_batch_size=4).take(20)
        for data in step
        for i in range(4)
    ]
    assert sorted(numbers[:LENGTH]) == sorted(numbers[LENGTH : 2 * LENGTH]) == list(range(LENGTH))
    assert numbers[:LENGTH] != numbers[LENGTH : 2 * LENGTH]
    done: list[list[str]] = []
    state: dict[str, Any] | None = None
    for steps in (1, 3, 2, 7, 7):
        with IterableLoader(kind(), global_batch_size=4, local_batch_size=2, seed=5, num_workers=num_workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            assert loader.consumed_samples == 4 * len(done)
            done += samples(loader, steps)
            state = loader.state_dict()
    assert done == whole


def test_ranks_that_share_a_row_split_it_and_may_change() -> None:
    def numbers(ranks: int, batch: int, steps: int, state: Any = None) -> tuple[list[set[int]], Any]:
        taken: list[set[int]] = [set() for _ in range(steps)]
        states = []
        for rank in range(ranks):
            loader = IterableLoader(Row(), global_batch_size=batch, local_batch_size=1, rank=rank, ranks=ranks)
            if state is not None:
                loader.load_state_dict(state)
            for number, step in enumerate(loader.take(steps)):
                taken[number] |= {int(data[0]) for data in step}
            assert not loader.per_rank
            states.append(loader.state_dict())
        assert all(each == states[0] for each in states)
        return taken, states[0]

    whole, _ = numbers(1, 4, 5)
    first, state = numbers(2, 4, 3)
    assert first == whole[:3]
    second, state = numbers(4, 4, 1, state)
    assert second == whole[3:4]
    assert state["position"] == 16
    third, _ = numbers(3, 3, 1, state)
    assert third[0] < whole[4] | {0}


def test_a_seek_beyond_the_state_reads_and_drops_and_skips_are_read_over() -> None:
    whole = [step[0] for step in samples(IterableLoader(Row(), global_batch_size=1), 30)]
    for position in (0, 7, 25):
        loader = IterableLoader(Row(), global_batch_size=1)
        loader.seek(position)
        assert samples(loader, 3) == [[each] for each in whole[position : position + 3]]
        loader.seek(position + 4)
        assert samples(loader, 1) == [[whole[position + 4]]]
        loader.seek(1)
        assert samples(loader, 1) == [[whole[1]]]
    for ranks in (1, 2):
        ids = []
        for rank in range(ranks):
            loader = IterableLoader(
                Row(), global_batch_size=4, local_batch_size=2, skip_ranges=[[3, 5], [9, 10]], rank=rank, ranks=ranks
            )
            ids += [(micro.positions, str(micro.data)) for step in loader.take(3) for micro in step.micro_batches]
        kept = [position for position in range(15) if position not in (3, 4, 9)]
        assert sorted(position for positions, _ in ids for position in positions) == kept
        pairs = IterableLoader(Row(), global_batch_size=1, collate_fn=list)
        singles = {step.first: str(step.micro_batches[0].data[0]) for step in pairs.take(15)}
        for positions, text in ids:
            numbers = [singles[position].split(",")[0].strip("(") for position in positions]
            assert all(number in text for number in numbers)


def test_rows_of_their_own_need_the_same_ranks() -> None:
    loader = IterableLoader(Own(1), global_batch_size=4, rank=1, ranks=2)
    assert loader.per_rank
    got = [int(number) for step in loader.take(3) for data in step for number in data[0]]
    assert all(number % 2 for number in got)
    state = loader.state_dict()
    again = IterableLoader(Own(1), global_batch_size=4, rank=1, ranks=2)
    again.load_state_dict(state)
    assert samples(again, 2) == samples(loader, 2)
    with pytest.raises(MismatchError, match="split over 2 ranks when it was saved, and is over 1 now"):
        IterableLoader(Own(1), global_batch_size=4).load_state_dict(state)
    with pytest.raises(UsageError, match="skip_ranges"):
        IterableLoader(Own(0), global_batch_size=4, skip_ranges=[[1, 2]])
    with pytest.raises(UsageError, match="skip_ranges"):
        again.leave_out([(100, 104)])
    again = IterableLoader(Own(1), global_batch_size=4, rank=1, ranks=2)
    again.seek(8)
    with pytest.raises(MismatchError, match="no state of it for stream position 8"):
        next(again.take())


def test_what_cannot_say_where_it_stands_is_refused_or_accepted_with_a_warning() -> None:
    with pytest.raises(DataError, match="has no state_dict") as refused:
        IterableLoader(Stateless(), global_batch_size=2)
    assert "exact: False" in str(refused.value)
    with pytest.raises(DataError, match="cannot be iterated"):
        IterableLoader(5, global_batch_size=2)
    loader = IterableLoader(Stateless(), global_batch_size=2, exact=False)
    assert "not exact" in loader.warnings[0]
    assert samples(loader, 2) == [["tensor([0, 1])"], ["tensor([2, 3])"]]
    again = IterableLoader(Stateless(), global_batch_size=2, exact=False)
    again.load_state_dict(loader.state_dict())
    assert again.consumed_samples == 4
    assert samples(again, 1) == [["tensor([0, 1])"]]
    assert not IterableLoader(Row(), global_batch_size=2).warnings
    with pytest.raises(DataError, match="IterableLoader"):
        ResumableLoader(Row(), global_batch_size=2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(num_workers: int) -> None:
    with IterableLoader(Broken(), global_batch_size=2, num_workers=num_workers) as loader:
        steps = loader.take()
        next(steps)
        next(steps)
        with pytest.raises(DataError, match="Broken, reading the sample at stream position 5: KeyError"):
            next(steps)
    with pytest.raises(DataError, match="gives no sample when it is begun anew"):
        next(IterableLoader(Row(0), global_batch_size=2).take())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_generator_is_gone_through_once(num_workers: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(6)

    with IterableLoader(numbers(), global_batch_size=4, exact=False, num_workers=num_workers) as loader:
        passing = loader.take()
        assert next(passing).micro_batches[0].data.tolist() == [0, 1, 2, 3]
        with pytest.raises(DataError, match="stream position 6: it gives no sample when it is begun anew"):
            next(passing)


def test_a_state_that_is_not_taken_is_told_as_such() -> None:
    class Fickle(Row):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("shard 7 is gone")

    first = IterableLoader(Row(), global_batch_size=4)
    list(first.take(3))
    loader = IterableLoader(Fickle(), global_batch_size=4)
    loader.load_state_dict(first.state_dict())
    with pytest.raises(DataError, match="going on from its state at stream position 12: KeyError: 'shard 7 is gone'"):
        next(loader.take())


def test_torchs_iterable_data_sets_are_read_in_a_row_whatever_they_know_of_their_length() -> None:
    class Known(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

        def __len__(self) -> int:
            return LENGTH

    assert is_iterable(Known())
    assert not is_iterable(TensorDataset(torch.ones(3)))
    assert not is_iterable([1])


def test_a_state_in_the_middle_of_nothing_is_not_saved() -> None:
    loader = IterableLoader(Row(), global_batch_size=2)
    loader.seek(6)
    with pytest.raises(DataError, match="not at 6"):
        loader.state_dict()


def test_the_callers_random_streams_stay() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    np.random.randn()
    expected = float(torch.rand(())), random.random(), float(np.random.randn())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    np.random.randn()
    samples(IterableLoader(Row(), global_batch_size=2), 3)
    assert (float(torch.rand(())), random.random(), float(np.random.randn())) == expected


def test_samples_are_told_apart_by_content() -> None:
    one = {"a": torch.arange(3), "b": [1, "x", None, b"y", np.arange(2.0)]}
    same = {"a": torch.arange(3), "b": [1, "x", None, b"y", np.arange(2.0)]}
    assert content_id(one) == content_id(same)
    for other in ({**one, "a": torch.arange(3).float()}, {**one, "b": [1, "x"]}, {**one, "c": 1}, (1, 2), "text", 3.5):
        assert content_id(one) != content_id(other)
    assert 0 <= content_id(one) < 2**63
    kinds: list[Callable[[int], Any]] = [
        lambda n: torch.eye(3)[n].to_sparse(),
        lambda n: torch.full((2,), n * 1j).conj(),
        lambda n: Pair(torch.tensor(n), n),
        lambda n: (Pair(torch.tensor(1), n), None),
    ]
    for kind in kinds:
        assert content_id(kind(1)) == content_id(kind(1)) != content_id(kind(2))
