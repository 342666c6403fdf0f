"""ResumableLoader: every position's sample once, in any split over ranks, workers and passes."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from perdure.data.loader import ResumableLoader, StepBatch
from perdure.data.order import EpochOrder
from perdure.engine.progress import Progress
from perdure.errors import DataError, UsageError

LONG = 11


class Numbers(Dataset[int]):
    """`length` virtual samples that count how often they are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Noisy(Numbers):
    """Samples with one draw from each global stream."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(())


class Broken(Numbers):
    """Sample 5 misbehaves in the way asked for."""

    def __init__(self, how: str) -> None:
        super().__init__(12)
        self.how = how

    def whereabouts(self, index: int) -> str:
        return f"numbers.txt line {index}"

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            if self.how == "raise":
                raise KeyError("no such column")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "unsendable":
                return lambda: None
        return index


def ids_of(step: StepBatch) -> list[int]:
    return [index for micro_batch in step.micro_batches for index in micro_batch.ids]


def all_ids(loader: ResumableLoader, steps: int) -> list[list[int]]:
    return [ids_of(step) for step in loader.take(steps)]


@pytest.mark.parametrize("num_workers", [0, 3])
def test_delivered_samples_are_those_of_the_stream(num_workers: int) -> None:
    with ResumableLoader(
        Numbers(37), global_batch_size=8, local_batch_size=2, seed=3, num_workers=num_workers
    ) as loader:
        stream = EpochOrder(37, 3)
        for number, step in enumerate(loader.take(12)):
            assert (step.first, step.last) == (number * 8, number * 8 + 8)
            assert loader.consumed_samples == step.last
            assert ids_of(step) == stream.slice(step.first, step.last)
            assert [batch.tolist() for batch in step] == [micro_batch.ids for micro_batch in step.micro_batches]
            assert [micro_batch.first for micro_batch in step.micro_batches] == list(range(step.first, step.last, 2))
            assert step.micro_batches[1].positions == range(step.first + 2, step.first + 4)


def test_stop_anywhere_and_resume_with_other_workers_equals_the_whole() -> None:
    whole = all_ids(ResumableLoader(Numbers(37), global_batch_size=4), 28)
    for stop, num_workers in ((1, 0), (9, 2), (10, 0), (19, 1)):
        with ResumableLoader(Numbers(37), global_batch_size=4, num_workers=num_workers) as loader:
            loader.set_init_step(stop)
            assert loader.consumed_samples == 4 * stop
            assert all_ids(loader, 28 - stop) == whole[stop:]


def test_epochs_are_complete_and_differ() -> None:
    ids = [index for step in all_ids(ResumableLoader(Numbers(37), global_batch_size=4), 37) for index in step]
    epochs = [ids[start : start + 37] for start in range(0, 148, 37)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    whole = all_ids(ResumableLoader(Numbers(10), global_batch_size=12, local_batch_size=2), 5)
    shares = [
        all_ids(ResumableLoader(Numbers(10), global_batch_size=12, local_batch_size=2, rank=rank, ranks=ranks), 5)
        for rank in range(ranks)
    ]
    for step, expected in enumerate(whole):
        assert Counter(index for share in shares for index in share[step]) == Counter(expected)
        assert {len(share[step]) for share in shares} == {12 // ranks}


def test_batch_size_change_goes_on_at_the_consumed_samples() -> None:
    stream = EpochOrder(64, 0)
    for batch, steps in ((16, 6), (4, 24), (5, 3)):
        loader = ResumableLoader(Numbers(64), global_batch_size=batch)
        loader.seek(96)
        assert [i for step in all_ids(loader, steps) for i in step] == stream.slice(96, 96 + batch * steps)
    loader = ResumableLoader(Numbers(64), global_batch_size=16)
    loader.set_init_step(6)
    assert loader.consumed_samples == 96


def test_resume_reads_progress() -> None:
    class Progress:
        global_step = 7
        global_batch_size = 4
        stretches = ()
        consumed_samples: int | None = 30

    loader = ResumableLoader(Numbers(37), global_batch_size=4)
    loader.resume(Progress())
    assert loader.consumed_samples == 30
    assert loader.counters == (0, 7)
    unknown = Progress()
    unknown.consumed_samples = None
    loader.resume(unknown)
    assert loader.consumed_samples == 28


def test_resume_brings_progress_in_line_with_the_loader() -> None:
    fresh = Progress()
    ResumableLoader(Numbers(37), global_batch_size=4).resume(fresh)
    fresh.advance()
    assert (fresh.global_step, fresh.consumed_samples, fresh.stretches) == (1, 4, ((0, 37),))
    halved = Progress(12, 96, 8)
    ResumableLoader(Numbers(64), global_batch_size=16).resume(halved)
    halved.advance()
    assert (halved.global_step, halved.consumed_samples, halved.epoch_num) == (7, 112, 1)
    uneven = Progress(7, 28, 4)
    loader = ResumableLoader(Numbers(64), global_batch_size=3)
    with pytest.warns(UserWarning, match=r"step 7 x 4 / 3 is not whole; it was rounded down to 9.*sample 28"):
        loader.resume(uneven)
    assert (uneven.global_step, loader.consumed_samples) == (9, 28)
    along = Progress(5, 10, 2)
    ramp = ResumableLoader(Numbers(64), global_batch_size=8, local_batch_size=2, rampup=[2, 2, 30])
    ramp.resume(along)
    assert (along.global_step, along.global_batch_size) == (5, ramp.plan.batch_at(10))


def test_a_registered_loader_knows_its_place_and_its_stream() -> None:
    def loader(length: int = 37, **settings: Any) -> ResumableLoader:
        return ResumableLoader(Numbers(length), global_batch_size=4, **{"seed": 3, **settings})

    first = loader()
    ids = all_ids(first, 3)
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)
    assert again.consumed_samples == 12
    assert all_ids(again, 5) == all_ids(first, 5) != ids
    for other, said in (
        (loader(seed=4), "seed: 3 -> 4"),
        (loader(shuffle=False), "shuffle: True -> False"),
        (loader(36), "length: 37 -> 36"),
    ):
        with pytest.raises(DataError, match=said):
            other.load_state_dict(state)
        assert other.consumed_samples == 0


def test_a_far_jump_reads_nothing() -> None:
    for shuffle in (True, False):
        dataset = Numbers(20_000_000)
        loader = ResumableLoader(dataset, global_batch_size=4, shuffle=shuffle)
        loader.set_init_step(4_000_000)
        assert dataset.reads == 0
        step = next(loader.take(1))
        assert dataset.reads == 4
        assert ids_of(step) == EpochOrder(20_000_000, 0, shuffle=shuffle).slice(16_000_000, 16_000_004)
    loader = ResumableLoader(Numbers(10**12), global_batch_size=1000)
    loader.set_init_step(10**9)
    assert loader.consumed_samples == 10**12
    assert loader.counters == (1, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_abandoned_passes_lose_nothing_and_old_ones_are_ended(num_workers: int) -> None:
    whole = all_ids(ResumableLoader(Numbers(20), global_batch_size=2), 12)
    with ResumableLoader(Numbers(20), global_batch_size=2, num_workers=num_workers) as loader:
        old = loader.take()
        assert [ids_of(next(old)), ids_of(next(old))] == whole[:2]
        assert all_ids(loader, 3) == whole[2:5]
        with pytest.raises(UsageError, match="ended"):
            next(old)
        live = loader.take(4)
        next(live)
        loader.seek(2)
        with pytest.raises(UsageError, match="ended"):
            next(live)
        assert all_ids(loader, 2) == whole[1:3]
        loader.close()
        assert all_ids(loader, 2) == whole[3:5]
        assert list(loader.take(0)) == []


def test_random_streams_follow_the_position_and_the_callers_stay() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples, random.random(), float(np.random.rand()), float(torch.rand(()))

    def run(num_workers: int, first: int, steps: int) -> list[Any]:
        with ResumableLoader(
            Noisy(10), global_batch_size=4, local_batch_size=2, num_workers=num_workers, collate_fn=collate, seed=9
        ) as loader:
            loader.set_init_step(first)
            return [str(data) for step in loader.take(steps) for data in step]

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), float(np.random.rand()), float(torch.rand(()))
    for num_workers in (0, 2):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        run(num_workers, 0, 2)
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == expected
    whole = run(0, 0, 6)
    assert run(2, 0, 6) == whole
    assert run(1, 4, 2) == whole[8:]
    assert len(set(whole)) == len(whole)


class SeldomNoisy(Numbers):
    """Draws for some samples only, the first of them late."""

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if index < 40 or index % 7:
            return index, 0.0, 0.0, 0.0
        stream = index % 3
        return (
            index,
            random.gauss(0, 1) if stream == 0 else 0.0,
            float(np.random.randn()) if stream == 1 else 0.0,
            float(torch.randn(())) if stream == 2 else 0.0,
        )


def test_draws_that_come_late_follow_the_position_too() -> None:
    def run(num_workers: int, first: int, steps: int) -> list[str]:
        with ResumableLoader(
            SeldomNoisy(150), global_batch_size=3, num_workers=num_workers, shuffle=False, collate_fn=list
        ) as loader:
            loader.seek(first)
            return [str(data) for step in loader.take(steps) for data in step]

    random.gauss(0, 1)
    np.random.randn()
    torch.randn(())
    whole = run(0, 0, 48)
    assert run(3, 0, 48) == whole
    for first in (48, 63, 84, 96, 120):
        assert run(0, first, 3) == whole[first // 3 : first // 3 + 3]
    dataset = Numbers(100)
    list(ResumableLoader(dataset, global_batch_size=5).take(20))
    assert dataset.reads == 100


def test_skip_ranges_and_ramp() -> None:
    stream = EpochOrder(50, 0)
    loader = ResumableLoader(Numbers(50), global_batch_size=4, local_batch_size=4, skip_ranges=[[6, 10]])
    steps = list(loader.take(3))
    assert [(step.first, step.last) for step in steps] == [(0, 4), (4, 12), (12, 16)]
    assert steps[1].micro_batches[0].positions == (4, 5, 10, 11)
    assert ids_of(steps[1]) == stream.slice(4, 6) + stream.slice(10, 12)
    loader = ResumableLoader(Numbers(50), global_batch_size=6, rampup=[2, 2, 8])
    assert [step.global_batch_size for step in loader.take(5)] == [2, 2, 4, 6, 6]
    assert loader.local_batch_size == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_is_named(num_workers: int) -> None:
    with ResumableLoader(Broken("raise"), global_batch_size=2, shuffle=False, num_workers=num_workers) as loader:
        passing = loader.take()
        next(passing)
        next(passing)
        with pytest.raises(
            DataError, match=r"Broken, sample 5 \(numbers.txt line 5\), stream position 5: KeyError"
        ) as caught:
            next(passing)
        assert "no such column" in str(caught.value.__cause__)
        assert loader.consumed_samples == 4
        loader.seek(6)
        assert all_ids(loader, 1) == [[6, 7]]


def test_a_killed_worker_ends_in_an_error_that_names_the_sample() -> None:
    with ResumableLoader(Broken("kill"), global_batch_size=2, shuffle=False, num_workers=2) as loader:
        with pytest.raises(DataError, match=r"Broken: .* near sample 5 \(numbers.txt line 5\), stream position 5"):
            list(loader.take(6))
        loader.seek(6)
        assert all_ids(loader, 3) == [[6, 7], [8, 9], [10, 11]]


def test_what_cannot_leave_a_worker_is_an_error_and_no_hang() -> None:
    with (
        ResumableLoader(
            Broken("unsendable"), global_batch_size=2, shuffle=False, num_workers=1, collate_fn=list
        ) as loader,
        pytest.raises(DataError, match="handing over stream positions"),
    ):
        list(loader.take(6))


def test_a_failing_collate_function_is_named() -> None:
    loader = ResumableLoader([1, "a"], global_batch_size=2, shuffle=False)
    with pytest.raises(DataError, match=r"collating the samples at stream positions \[0, 2\)"):
        next(loader.take())


class Interrupted(Numbers):
    """Sample 5 is interrupted when it is read first."""

    def __getitem__(self, index: int) -> int:
        self.reads += index == 5
        if index == 5 and self.reads == 1:
            raise KeyboardInterrupt
        return index


def test_an_interrupted_step_ends_its_pass_and_is_not_left_out() -> None:
    loader = ResumableLoader(Interrupted(9), global_batch_size=3, shuffle=False)
    passing = loader.take()
    next(passing)
    with pytest.raises(KeyboardInterrupt):
        next(passing)
    with pytest.raises(UsageError, match="has ended"):
        next(passing)
    assert all_ids(loader, 2) == [[3, 4, 5], [6, 7, 8]]


class Signalled(Numbers):
    """Tells the workers' process ids."""

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def test_workers_survive_the_signals_that_stop_a_run_and_end_on_close() -> None:
    loader = ResumableLoader(Signalled(50), global_batch_size=2, num_workers=2)
    steps = loader.take()
    pids = {int(next(steps).micro_batches[0].data[0]) for _ in range(4)}
    assert os.getpid() not in pids
    assert len(pids) == 2
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
    assert {int(next(steps).micro_batches[0].data[0]) for _ in range(8)} == pids
    again = loader.take(4)
    assert {int(step.micro_batches[0].data[0]) for step in again} == pids
    loader.close()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_death_between_steps_waits_for_the_next_one() -> None:
    with ResumableLoader(Signalled(500), global_batch_size=2, num_workers=1) as loader:
        steps = loader.take()
        pid = int(next(steps).micro_batches[0].data[0])
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        for _ in range(1000):
            pass
        with pytest.raises(DataError, match="killed"):
            list(steps)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Stream(), "no random access"),
        (iter([1, 2]), "no random access"),
        ({1, 2}, "no random access"),
        ("text", "no random access"),
        ({"train": [1]}, "mapping"),
        ([], "is empty"),
        (Numbers(2**60 + 1), "2\\^60"),
        (Numbers(-1), "does not know its length"),
    ],
)
def test_unsuitable_data_sets_are_refused(dataset: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ResumableLoader(dataset, global_batch_size=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"global_batch_size": 7, "local_batch_size": 2}, "nearest possible sizes are 6 and 8"),
        ({"global_batch_size": 4, "rank": 0, "ranks": 3}, "not a multiple of 3 ranks"),
        ({"global_batch_size": 8, "rank": 0, "ranks": 2, "rampup": [2, 3, 10]}, "multiple of 2"),
        ({"global_batch_size": 4, "rank": 2, "ranks": 2}, "rank"),
        ({"global_batch_size": 4, "rank": 0}, "together"),
        ({"global_batch_size": 4, "local_batch_size": 0}, "local_batch_size"),
        ({"global_batch_size": 4, "seed": -1}, "seed"),
        ({"global_batch_size": 4, "num_workers": -1}, "num_workers"),
        ({"global_batch_size": 4, "skip_ranges": [[4, 4]]}, "skip range"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ResumableLoader(Numbers(10), **settings)


def test_impossible_positions_are_refused() -> None:
    loader = ResumableLoader(Numbers(10), global_batch_size=2)
    for call in (loader.seek, loader.set_init_step, loader.take):
        with pytest.raises(UsageError, match="negative"):
            call(-1)


def test_identity_and_other_kinds_of_data_sets() -> None:
    loader = ResumableLoader([10, 20, 30], global_batch_size=7, shuffle=False)
    assert loader.identity() == {"type": "list", "length": 3, "fingerprint": None}
    assert next(loader.take()).micro_batches[0].data.tolist() == [10, 20, 30, 10, 20, 30, 10]
    tensors = TensorDataset(torch.arange(6).reshape(3, 2))
    loader = ResumableLoader(tensors, global_batch_size=2, shuffle=False)
    assert next(loader.take()).micro_batches[0].data[0].tolist() == [[0, 1], [2, 3]]
    assert loader.identity()["type"] == "torch.utils.data.dataset.TensorDataset"
    single = ResumableLoader([5], global_batch_size=3)
    assert all_ids(single, 2) == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("position", [0, LONG - 1, LONG, LONG + 1, 10 * LONG + 3])
def test_a_jump_is_the_same_as_so_many_steps(position: int) -> None:
    walked = ResumableLoader(Numbers(LONG), global_batch_size=1)
    for _ in walked.take(position):
        pass
    jumped = ResumableLoader(Numbers(LONG), global_batch_size=1)
    jumped.set_init_step(position)
    assert jumped.counters == walked.counters
    assert all_ids(jumped, 3) == all_ids(walked, 3)


def test_an_uneven_tail_leaves_all_ranks_with_the_same_steps_and_no_sample_out() -> None:
    def epochs(*stops: int) -> list[list[int]]:
        steps: list[list[int]] = [[] for _ in range(15)]
        for rank in range(3):
            at = 0
            for stop in (*stops, 15):
                loader = ResumableLoader(Numbers(10), global_batch_size=6, local_batch_size=2, rank=rank, ranks=3)
                loader.set_init_step(at)
                for step in loader.take(stop - at):
                    steps[at] += ids_of(step)
                    at += 1
        return steps

    whole = epochs()
    samples = Counter(index for step in whole for index in step)
    assert set(samples.values()) == {9}
    assert {len(step) for step in whole} == {6}
    assert epochs(1, 7, 12) == whole


class Batched(Numbers):
    """Can read many samples at once, and draws for some of them."""

    def __init__(self) -> None:
        super().__init__(60)
        self.calls: list[list[int]] = []

    def __getitem__(self, index: int) -> Any:
        if index == 59:
            raise KeyError("no such row")
        return index, float(torch.rand(())) if index > 40 else 0.0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [self[index] for index in indices]


def test_samples_are_read_at_once_where_the_data_can_and_each_is_still_itself() -> None:
    def run(kind: Any) -> list[str]:
        loader = ResumableLoader(kind, global_batch_size=4, shuffle=False)
        return [str(data) for step in loader.take(14) for data in step]

    dataset, plain = Batched(), Batched()
    plain.__class__ = type("Plain", (Numbers,), {"__getitem__": Batched.__getitem__})
    assert run(dataset) == run(plain)
    assert [4, 5, 6, 7] in dataset.calls
    loader = ResumableLoader(dataset, global_batch_size=4, shuffle=False)
    loader.seek(52)
    passing = loader.take()
    next(passing)
    with pytest.raises(DataError, match="sample 59, stream position 59: KeyError"):
        next(passing)
