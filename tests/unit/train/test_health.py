"""The health monitor against its own definition: what is a spike, what isn't, and that it goes on from its state."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.config.schema import HealthCheckpointConfig
from perdure.train.health import FEWEST, SETTLED_AFTER, WIDTH, WINDOW, HealthMonitor, Verdict, is_spike
from perdure.train.rollback import LeftOut


def monitor(**limits: Any) -> HealthMonitor:
    return HealthMonitor(HealthCheckpointConfig(**limits))


def never() -> float:
    raise AssertionError("the embedding's norm was computed without need")


def calm(watched: HealthMonitor, steps: int, seed: int = 1) -> list[Verdict]:
    """So many ordinary steps: a loss near 3, norms spread as norms are."""
    draws = random.Random(seed)
    return [
        watched.judge(4 * step, draws.gauss(3.0, 0.05), math.exp(draws.gauss(0.0, 0.3)), never) for step in range(steps)
    ]


def test_an_ordinary_run_is_healthy_throughout() -> None:
    assert all(verdict == Verdict() for verdict in calm(monitor(on_spike="rollback"), 2000))


@pytest.mark.parametrize(
    "falling", [lambda s: 11.0 / (1 + s / 20) + 1.5, lambda s: 3.0, lambda s: 0.0, lambda s: -s / 9]
)
def test_a_loss_that_falls_or_stands_is_never_a_spike(falling: Callable[[int], float]) -> None:
    watched = monitor(on_spike="skip")
    assert not any(watched.judge(s, falling(s), 1.0, never).why for s in range(500))


@pytest.mark.parametrize(
    ("loss", "norm", "word"),
    [(8.0, 1.0, "loss 8"), (3.0, 80.0, "norm 80"), (math.nan, 1.0, "loss is nan"), (3.0, math.inf, "norm is inf")],
)
@pytest.mark.parametrize("what", ["mark", "skip", "rollback"])
def test_a_spike_is_named_and_acted_upon_as_asked(loss: float, norm: float, word: str, what: str) -> None:
    watched = monitor(on_spike=what)
    calm(watched, 50)
    verdict = watched.judge(1000, loss, norm, never)
    assert word in verdict.why
    assert (verdict.hold, verdict.go_back) == (what != "mark", what == "rollback")
    assert (verdict.onset, verdict.ckpt_status) == (1000, 1)


def test_nothing_is_a_spike_before_enough_was_seen() -> None:
    watched = monitor()
    calm(watched, FEWEST - 1)
    assert not watched.judge(0, 50.0, 90.0, never).why


def test_weights_that_took_a_spike_are_abnormal_until_training_has_settled() -> None:
    watched = monitor(on_spike="mark")
    calm(watched, 50)
    watched.judge(0, 9.0, 1.0, never)
    after = [verdict.ckpt_status for verdict in calm(watched, SETTLED_AFTER + 5, seed=2)]
    assert after == [1] * SETTLED_AFTER + [0] * 5


def test_weights_that_were_spared_are_healthy_right_after() -> None:
    watched = monitor(on_spike="skip")
    calm(watched, 50)
    assert watched.judge(0, 9.0, 1.0, never).ckpt_status == 1
    assert calm(watched, 1, seed=2)[0].ckpt_status == 0


def test_a_level_that_changed_for_good_is_accepted() -> None:
    watched = monitor(on_spike="skip")
    calm(watched, WINDOW)
    told = [bool(watched.judge(s, 6.0 + 0.01 * (s % 3), 1.0, never).why) for s in range(WINDOW)]
    assert told[0]
    assert not any(told[WINDOW // 2 + 1 :])


def test_an_overflow_that_the_loss_scale_answers_is_no_fault() -> None:
    watched = monitor(on_spike="rollback")
    assert watched.judge(0, 3.0, math.inf, never, overflow=True) == Verdict()
    assert watched.judge(0, math.nan, math.inf, never, overflow=True).go_back


def test_a_norm_above_the_threshold_counts_when_it_stays_there() -> None:
    watched = monitor(global_norm_skip_threshold=5.0, global_norm_skip_time=3, on_spike="rollback")
    norms = [1.0, 6.0, 6.0, 1.0, 6.0, 6.0, 6.0]
    verdicts = [watched.judge(10 * step, 3.0, norm, never) for step, norm in enumerate(norms)]
    assert [verdict.go_back for verdict in verdicts] == [False] * 6 + [True]
    assert verdicts[-1].onset == 40
    assert "above 5 for 3 steps in a row" in verdicts[-1].why


def test_the_embedding_has_a_threshold_of_its_own() -> None:
    watched = monitor(embedding_local_norm_threshold=5.0, global_norm_skip_time=2)
    assert not watched.judge(0, 3.0, 6.0, lambda: 4.0).why
    assert not watched.judge(0, 3.0, 6.0, lambda: 5.5).why
    assert "embedding was above 5" in watched.judge(0, 3.0, 6.0, lambda: 5.5).why


@settings(max_examples=50, deadline=None)
@given(
    figures=st.lists(
        st.tuples(st.sampled_from([3.0, 3.1, 2.9, 9.0, math.nan]), st.sampled_from([0.0, 1.0, 1.5, 200.0, math.inf])),
        min_size=1,
        max_size=120,
    ),
    data=st.data(),
)
def test_it_goes_on_exactly_from_its_state(figures: list[tuple[float, float]], data: st.DataObject) -> None:
    limits = {"global_norm_skip_time": 2, "on_spike": data.draw(st.sampled_from(["mark", "skip", "rollback"]))}
    stop = data.draw(st.integers(0, len(figures)))
    whole, first, second = (monitor(**limits) for _ in range(3))
    expected = [whole.judge(i, *pair, lambda: 0.0) for i, pair in enumerate(figures)]
    found = [first.judge(i, *pair, lambda: 0.0) for i, pair in enumerate(figures[:stop])]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    found += [second.judge(stop + i, *pair, lambda: 0.0) for i, pair in enumerate(figures[stop:])]
    assert found == expected
    assert second.state_dict() == whole.state_dict()


@given(usual=st.lists(st.floats(-100, 100), min_size=FEWEST, max_size=WINDOW), value=st.floats(-1000, 1000))
def test_a_spike_is_what_the_median_and_its_deviation_say(usual: list[float], value: float) -> None:
    middle = statistics.median(usual)
    spread = statistics.median([abs(each - middle) for each in usual]) * 1.4826
    assert is_spike(value, usual, 0.5) == (value - middle > WIDTH * max(spread, 0.5)) or math.isclose(
        value - middle, WIDTH * max(spread, 0.5)
    )


def test_what_is_left_out_grows_backwards_where_it_goes_wrong_again() -> None:
    left = LeftOut().with_next(40, 44)
    assert left.ranges == ((40, 44),)
    # The step after a range that is left out begins where that range does.
    left = left.with_next(40, 48)
    assert left.ranges[-1] == (36, 48)
    assert left.with_next(80, 84).ranges[-1] == (80, 84)
    assert LeftOut().with_next(0, 4).with_next(0, 8).ranges[-1] == (0, 8)


def test_what_is_left_out_is_recorded_and_joined() -> None:
    left = LeftOut(((4, 8), (20, 24)))
    assert LeftOut.of(json.loads(json.dumps({"left_out": left.record()}))) == left
    assert (LeftOut(((4, 8),)) | left).ranges == left.ranges
    assert LeftOut.of({}) == LeftOut()


def test_a_row_that_began_in_other_data_goes_on_in_the_present_ones() -> None:
    watched = monitor(global_norm_skip_threshold=5.0, global_norm_skip_time=2, on_spike="rollback")
    watched.judge(31000, 3.0, 6.0, never)
    afresh = monitor(global_norm_skip_threshold=5.0, global_norm_skip_time=2, on_spike="rollback")
    afresh.load_state_dict(watched.state_dict())
    verdict = afresh.judge(0, 3.0, 6.0, never)
    assert (verdict.go_back, verdict.onset) == (True, 0)
