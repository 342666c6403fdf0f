"""`perdure bench`: figures of this storage, advice from the root's own history, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import build_checkpoint, floats

from perdure.catalog.events import append_event
from perdure.catalog.root import Root
from perdure.cli.main import run
from perdure.engine.interval import best_interval, steps_between


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert run(["bench", *words, "--seconds", "0", "--json"]) == 0
    found: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_it_measures_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(capsys, str(tmp_path), "--gib", "0.002", "--step-seconds", "0.5", "--failures-per-day", "24")
    assert list(tmp_path.iterdir()) == []
    measured = found["measured"]
    assert abs(int(str(measured["bytes"])) - (2 << 20)) < 1 << 17
    assert all(float(str(measured[name])) > 0 for name in measured)
    advice = found["advice"]
    assert advice["mtbf_s"] == 3600
    assert advice["async_save"]["save_interleaved_steps"] >= 1  # type: ignore[index]


def test_what_the_root_tells_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Root(str(tmp_path))
    state = {"model": {"w": floats(*range(40), shape=(5, 8))}}
    build_checkpoint(root, 10, sequence=1, parent=0, attempt="0a", state=state)  # type: ignore[arg-type]
    for time, event, step in ((1000, "save", 10), (1020, "save", 20), (1040, "save", 30), (2000, "load", 30)):
        append_event(root, event, now=time, step=step, attempt="0a")
    before = sorted(p.name for p in tmp_path.iterdir())
    found = bench(capsys, str(tmp_path))
    assert found["observed"]["step_s"] == 2.0
    assert found["advice"]["mtbf_from"] == "observed"
    assert found["advice"]["mtbf_s"] == 1000.0
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_no_directory_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@given(st.floats(1e-3, 1e4), st.floats(1e-2, 1e9))
def test_no_other_interval_loses_less(cost: float, mtbf: float) -> None:
    """Exponential failures: expected time for a second's work at interval T, by Daly's own model."""
    from math import expm1

    best = best_interval(cost, mtbf)
    assert best > 0
    if cost > mtbf / 10:
        return  # the estimate is one for rare failures

    def expected(interval: float) -> float:
        return expm1(min((interval + cost) / mtbf, 500)) / interval

    assert expected(best) <= expected(best * 0.8) * 1.0001
    assert expected(best) <= expected(best * 1.25) * 1.0001


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e3), st.floats(0, 1e4))
def test_a_save_is_over_before_the_next(interval: float, step: float, save: float) -> None:
    steps = steps_between(interval, step, save)
    assert steps >= 1
    assert steps * step >= save * (1 - 1e-9)
