"""Cursor arithmetic equals plain counting, at any mixture of ramp, skips and batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.data.cursor import BatchPlan, SkipRanges, scale_step
from perdure.data.growth import GrownOrder, counters, grown
from perdure.errors import UsageError

ranges = st.lists(
    st.tuples(st.integers(0, 120), st.integers(1, 30)).map(lambda pair: [pair[0], pair[0] + pair[1]]), max_size=5
)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    start, increment, count = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(0, 5))
    rampup = draw(st.one_of(st.none(), st.just([start, increment, draw(st.integers(0, 90))])))
    return BatchPlan(start + increment * count, rampup=rampup, skip_ranges=draw(ranges))


@given(given_ranges=ranges, first=st.integers(0, 160), span=st.integers(0, 80))
def test_skips_match_a_plain_set(given_ranges: list[list[int]], first: int, span: int) -> None:
    skips = SkipRanges(given_ranges)
    skipped = {position for low, high in given_ranges for position in range(low, high)}
    kept = [position for position in range(400) if position not in skipped]
    assert skips.kept_before(first) == sum(position < first for position in kept)
    assert skips.position_of(span) == kept[span]
    wanted = [position for position in range(first, first + span) if position not in skipped]
    assert [position for run in skips.runs(first, first + span) for position in run] == wanted


@given(plan=plans(), steps=st.integers(0, 40))
def test_steps_and_positions_match_walking(plan: BatchPlan, steps: int) -> None:
    position = 0
    for step in range(steps):
        assert plan.consumed_at(step) == position
        step_range = plan.step_range(position)
        samples = [p for run in plan.skips.runs(step_range.first, step_range.last) for p in run]
        assert len(samples) == step_range.global_batch_size
        assert step_range.first == position
        position = step_range.last
    assert plan.consumed_at(steps) == position


@given(plan=plans(), position=st.integers(0, 200), steps=st.integers(0, 40))
def test_so_many_steps_further_match_walking(plan: BatchPlan, position: int, steps: int) -> None:
    walked = position
    for _ in range(steps):
        walked = plan.step_range(walked).last
    assert plan.after(position, steps) == walked


def test_a_billion_steps_are_arithmetic() -> None:
    plan = BatchPlan(4096, rampup=[256, 256, 10**9], skip_ranges=[[10**11, 10**11 + 5], [7, 9]])
    step = plan.step_range(plan.consumed_at(10**9 - 1))
    assert step.last == plan.consumed_at(10**9)
    # All but the ramp's 10^9 samples at a smaller size, and the 7 left out, are steps of 4096.
    assert 10**9 * 4096 - 10**10 < step.last < 10**9 * 4096
    assert step.last - step.first == 4096
    assert plan.after(0, 10**9) == step.last


def test_ramp_follows_consumed_samples() -> None:
    plan = BatchPlan(8, rampup=[2, 2, 30])
    sizes = []
    position = 0
    while len(sizes) < 10:
        step = plan.step_range(position)
        sizes.append(step.global_batch_size)
        position = step.last
    assert sizes == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6]
    assert plan.batch_at(9) == 2
    assert plan.batch_at(10) == 4
    assert plan.batch_at(30) == 8


def test_skipped_positions_count_as_consumed() -> None:
    plan = BatchPlan(4, skip_ranges=[[6, 10]])
    assert plan.step_range(4) == (4, 12, 4)
    assert plan.skips.runs(4, 12) == [range(4, 6), range(10, 12)]
    assert plan.consumed_at(2) == 12


def test_counters_and_scaling_follow_the_rules() -> None:
    assert counters(((0, 37),), 96, 4) == (2, 22 // 4)
    assert scale_step(1000, 64, 128) == (500, True)
    assert scale_step(7, 10, 4) == (17, False)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=4), st.integers(1, 4))
def test_epochs_of_data_that_grow_count_whatever_their_lengths(growth: list[tuple[int, int]], batch: int) -> None:
    stretches, position = ((0, 3),), 0
    for later, more in growth:
        position += later
        stretches = grown(stretches, stretches[-1][1] + more, position)
    order = GrownOrder(stretches, seed=1)
    epoch = index = 0
    seen: set[int] = set()
    for place, (sample,) in enumerate(order.gather([(at, at + 1)]) for at in range(position + 40)):
        assert counters(stretches, place, batch) == (epoch, index // batch)
        assert sample not in seen
        seen.add(sample)
        index += 1
        # An epoch is over when every sample of the length that it began with was had.
        length = max(length for start, length in stretches if start <= place)
        if index == length:
            assert seen == set(range(length))
            epoch, index, seen = epoch + 1, 0, set()


@pytest.mark.parametrize("bad", [[3, 3], [5, 2], [-1, 4], [1], [1, 2, 3], "ab", [0, 1.5]])
def test_impossible_skip_ranges_are_refused(bad: list[int]) -> None:
    with pytest.raises(UsageError, match="skip range"):
        SkipRanges([bad])


@pytest.mark.parametrize("rampup", [[2, 4, 100], [16, 2, 100], [0, 2, 10], [2, 0, 10], [2, 2, -1], [2, 2]])
def test_impossible_ramps_are_refused(rampup: list[int]) -> None:
    with pytest.raises(UsageError, match="rampup_batch_size"):
        BatchPlan(8, rampup=rampup)
