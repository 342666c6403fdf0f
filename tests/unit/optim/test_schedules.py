"""Each schedule against its formula as the key reference writes it, at and around every boundary."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.config.schema import LRSchedulerConfig
from perdure.errors import UsageError
from perdure.importing import KeyFaults
from perdure.optim.schedules import SCHEDULES, build_schedule

TOTAL = 100
COMMON: dict[str, Any] = {"learning_rate": 4e-3, "warmup_steps": 10, "warmup_lr_init": 1e-3}


def halved(turn: float) -> float:
    """½(1 + cos(π·turn))"""
    return 0.5 * (1 + math.cos(math.pi * turn))


def rates(steps: list[int] | range, **section: Any) -> list[float]:
    schedule = build_schedule(section, TOTAL)
    return [schedule(step) for step in steps]


AFTER: dict[str, tuple[dict[str, Any], dict[int, float]]] = {
    # type: further keys, {step: rate} after a warm-up of 10 steps to 4e-3
    "ConstantWarmUpLR": ({}, {10: 4e-3, 99: 4e-3, 500: 4e-3}),
    "LinearWithWarmUpLR": ({}, {10: 4e-3, 55: 2e-3, 91: 4e-3 * 9 / 90, 99: 4e-3 / 90, 100: 0.0, 500: 0.0}),
    "CosineWithWarmUpLR": (
        {"lr_end": 1e-3},
        {10: 4e-3, 40: 1e-3 + 3e-3 * 0.75, 55: 2.5e-3, 70: 1e-3 + 3e-3 * 0.25, 100: 1e-3, 500: 1e-3},
    ),
    "CosineWithRestartsAndWarmUpLR": (
        {"num_cycles": 3, "lr_end": 1e-3},
        {10: 4e-3, 25: 2.5e-3, 39: 1e-3 + 3e-3 * halved(29 / 30), 40: 4e-3, 55: 2.5e-3, 85: 2.5e-3, 100: 1e-3},
    ),
    "PolynomialWithWarmUpLR": (
        {"power": 2, "lr_end": 1e-3},
        {10: 4e-3, 55: 1e-3 + 3e-3 * 0.25, 82: 1e-3 + 3e-3 * 0.04, 100: 1e-3, 101: 1e-3},
    ),
    "ConstantWithCoolDownLR": (
        {"keep_steps": 20, "decay_steps": 40, "final_steps": 15, "lr_end1": 1e-3, "lr_end2": 5e-4},
        {10: 4e-3, 29: 4e-3, 30: 4e-3, 50: 2.5e-3, 70: 1e-3, 84: 1e-3, 85: 5e-4, 900: 5e-4},
    ),
    "WarmUpStableDecayLR": (
        {"decay_start_steps": 60, "lr_end": 1e-3},
        {10: 4e-3, 59: 4e-3, 60: 4e-3, 80: 2.5e-3, 99: 4e-3 - 3e-3 * 39 / 40, 100: 1e-3, 101: 1e-3},
    ),
    "StepMilestonesLR": (
        {"milestones": [50, 30], "gamma": 0.5},
        {10: 4e-3, 29: 4e-3, 30: 2e-3, 49: 2e-3, 50: 1e-3, 900: 1e-3},
    ),
}


@pytest.mark.parametrize("name", AFTER)
def test_warm_up_and_what_follows(name: str) -> None:
    keys, expected = AFTER[name]
    section = {"type": name, **COMMON, **keys}
    assert rates(range(10), **section) == pytest.approx([1e-3 + 3e-3 * s / 10 for s in range(10)], rel=1e-12)
    assert rates(list(expected), **section) == pytest.approx(list(expected.values()), rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("name", AFTER)
def test_without_warm_up_the_first_rate_is_the_peak(name: str) -> None:
    section = {"type": name, **AFTER[name][0], "learning_rate": 4e-3}
    assert rates([0], **section) == pytest.approx([4e-3])


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("warm_up", [TOTAL, TOTAL + 50])
def test_a_warm_up_as_long_as_the_run_divides_nothing_by_zero(name: str, warm_up: int) -> None:
    section = {"type": name, **AFTER[name][0], "learning_rate": 4e-3, "warmup_steps": warm_up}
    assert all(0 <= rate <= 4e-3 for rate in rates([0, 99, 100, 149, 150, 151, 10**6], **section))


def test_annealing() -> None:
    section = {"type": "CosineAnnealingLR", "base_lr": 3e-3, "t_max": 40, "eta_min": 1e-3}
    assert rates([0, 20, 40, 60, 80], **section) == pytest.approx([3e-3, 2e-3, 1e-3, 2e-3, 3e-3])
    assert rates([0, 50, 100], type="CosineAnnealingLR", learning_rate=2e-3) == pytest.approx([2e-3, 1e-3, 0])


def test_annealing_with_restarts_of_growing_periods() -> None:
    section = {"type": "CosineAnnealingWarmRestarts", "learning_rate": 2e-3, "t_0": 10}
    assert rates([0, 5, 10, 15, 20], **section) == pytest.approx([2e-3, 1e-3, 2e-3, 1e-3, 2e-3])
    # Periods of 10, 30, 90, …: they begin at 0, 10, 40, 130, 400.
    starts = {0: 10, 10: 30, 40: 90, 130: 270, 400: 810}
    expected = [2e-3 * halved(part) for _ in starts for part in (0, 0.5, 0.9)]
    steps = [start + round(period * part) for start, period in starts.items() for part in (0, 0.5, 0.9)]
    assert rates(steps, **section, t_mult=3) == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 10**9), st.integers(1, 5000), st.integers(2, 5))
def test_a_restart_begins_exactly_at_its_boundary(number: int, first: int, factor: int) -> None:
    number %= 12
    boundary = first * (factor**number - 1) // (factor - 1)
    schedule = build_schedule(
        {"type": "CosineAnnealingWarmRestarts", "learning_rate": 1.0, "t_0": first, "t_mult": factor}, TOTAL
    )
    assert schedule(boundary) == 1.0


def test_ratios_of_the_total_replace_steps() -> None:
    by_ratio = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "warmup_ratio": 0.29, "decay_ratio": 0.57}
    by_steps = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "warmup_steps": 29, "decay_steps": 57}
    assert rates(range(120), **by_ratio, warmup_steps=3) == rates(range(120), **by_steps)
    stable = {"type": "WarmUpStableDecayLR", "learning_rate": 1.0}
    assert rates(range(120), **stable, decay_start_ratio=0.7) == rates(range(120), **stable, decay_start_steps=70)


def test_a_total_of_its_own_wins_over_the_runs() -> None:
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 1.0}
    assert rates([0, 25, 50, 60], **section, total_steps=50) == [1.0, 0.5, 0.0, 0.0]


def test_a_cool_down_takes_what_the_other_phases_leave() -> None:
    section = {"type": "ConstantWithCoolDownLR", "learning_rate": 1.0, "keep_steps": 40, "final_steps": 20}
    assert rates([39, 60, 80, 99, 200], **section) == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0])


def test_by_samples_follows_the_samples_and_by_steps_the_step() -> None:
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 1.0}
    place = {"global_step": 20, "consumed_samples": 330, "global_batch_size": 8}
    assert build_schedule(section, TOTAL).rate(**place) == 0.8
    assert build_schedule({**section, "by": "samples"}, TOTAL).rate(**place) == float(1 - Fraction(330, 800))


@given(st.sampled_from(sorted(AFTER)), st.floats(0, 1000), st.integers(0, 150), st.integers(1, 150))
def test_any_rate_lies_between_its_ends_and_is_a_plain_float(name: str, step: float, warm_up: int, total: int) -> None:
    keys = {**AFTER[name][0], "learning_rate": 4e-3, "warmup_lr_init": 1e-3, "warmup_steps": warm_up}
    schedule = build_schedule({"type": name, **keys}, total)
    assert type(schedule(step)) is float
    assert 0.0 <= schedule(step) <= 4e-3 * (1 + 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_settings_are_plain_and_tell_runs_of_other_lengths_apart(name: str) -> None:
    needed = {"StepMilestonesLR": {"milestones": [3]}, "CosineAnnealingWarmRestarts": {"t_0": 3}}
    section = {"type": name, **needed.get(name, {}), **({"decay_start_ratio": 0.5} if "Stable" in name else {})}
    first, second = build_schedule(section, 10).settings, build_schedule(section, 20).settings
    assert json.loads(json.dumps(first)) == first
    assert first != second
    assert first == build_schedule(section, 10).settings


def test_a_section_object_passes_what_was_written() -> None:
    section = LRSchedulerConfig(type="ConstantWarmUpLR", learning_rate=3e-4, warmup_ratio=0.5)
    assert build_schedule(section, 10)(5) == 3e-4
    assert build_schedule(LRSchedulerConfig(type="CosineAnnealingLR"), 10)(0) == 1e-5


def of_my_own(learning_rate: float, total_steps: int, slope: float = 1.0) -> Callable[[float], float]:
    return lambda step: learning_rate * (1 - slope * step / total_steps)


def test_a_function_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "my_rates", __import__("types").SimpleNamespace(own=of_my_own))
    schedule = build_schedule({"type": "my_rates:own", "learning_rate": 1.0, "slope": 0.5}, TOTAL)
    assert schedule(50) == 0.75
    with pytest.raises(KeyFaults, match=r"lr_scheduler.slop: unknown key.*did you mean slope"):
        build_schedule({"type": "my_rates:own", "learning_rate": 1.0, "slop": 0.5}, TOTAL)
    with pytest.raises(UsageError, match="not a function of the step"):
        build_schedule({"type": "fractions:Fraction"}, TOTAL)


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        ({"type": "CosineWarmUpLR"}, {"type"}),
        ({"type": "ConstantWarmUpLR", "warmup_step": 3}, {"warmup_step"}),
        ({"type": "ConstantWarmUpLR", "lr_end": 0.0, "by": "epochs"}, {"lr_end", "by"}),
        ({"type": "WarmUpStableDecayLR"}, {"decay_start_steps"}),
        ({"type": "StepMilestonesLR"}, {"milestones"}),
        ({"type": "StepMilestonesLR", "milestones": [-1]}, {"milestones"}),
        ({"type": "CosineAnnealingWarmRestarts", "t_0": 0}, {"t_0"}),
        ({"type": "LinearWithWarmUpLR", "warmup_ratio": 1.5, "learning_rate": -1.0}, {"warmup_ratio", "learning_rate"}),
        ({"type": "LinearWithWarmUpLR", "lr_end": 1, "warmup_steps": "3"}, {"lr_end", "warmup_steps"}),
        ({"type": "ConstantWarmUpLR", "learning_rate": math.nan}, {"learning_rate"}),
    ],
)  # fmt: skip
def test_faults_are_told_at_their_keys(section: dict[str, Any], keys: set[str]) -> None:
    with pytest.raises(KeyFaults) as caught:
        build_schedule(section, TOTAL)
    assert {key for key, _ in caught.value.faults} == {f"lr_scheduler.{key}" for key in keys}
