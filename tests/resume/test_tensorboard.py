"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from tests import tiny

from perdure.errors import ConfigError, UsageError
from perdure.train.history import read_lines

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def entries(folder: Path, tag: str) -> dict[int, float]:
    """step -> value, superseded entries left out as the program does."""
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0}).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def run(output: Path, steps: int, **keys: Any) -> Any:
    board = {"output_dir": str(output / "board"), **keys.pop("board", {})}
    made = tiny.trainer(output, steps, monitor={"tensorboard": board}, **keys)
    made.train()
    return made


@pytest.mark.parametrize("interval", [1, 3])
def test_each_step_has_its_figures_once_also_after_a_kill_and_a_resume(tmp_path: Path, interval: int) -> None:
    class Killed(tiny.Callback):
        def on_step_begin(self, trainer: Any, state: Any) -> None:
            if state.global_step == 8:
                tiny.kill_self()

    board = {"log_interval": interval, "queue_size": 1}
    assert tiny.in_child(lambda: run(tmp_path, 12, callbacks=(Killed(),), board=board)) == -9
    # Event files are read in the order of their names, which begin with the second they were made in.
    made = int(time.time())
    while int(time.time()) == made:
        time.sleep(0.01)
    run(tmp_path, 12, board=board)
    logged = [row[:4] for row in tiny.trace(tmp_path) if row[0] % interval == 0]
    for tag, column in (("train/loss", 1), ("train/learning_rate", 2), ("train/grad_norm", 3)):
        found = entries(tmp_path / "board", tag)
        assert list(found) == [row[0] for row in logged]
        for row in logged:
            assert found[row[0]] == pytest.approx(row[column], rel=1e-6)
    assert set(entries(tmp_path / "board", "speed/tokens_per_second")) == {row[0] for row in logged}


def test_evaluations_are_entered_where_they_are_made(tmp_path: Path) -> None:
    evaluating: dict[str, Any] = {
        "training": {"eval_interleaved_steps": 4},
        "eval_dataset": {"num_parallel_workers": 0, "dataloader": {"type": "tests.tiny:Noisy"}},
    }
    run(tmp_path, 9, **evaluating)
    rows = [r for r in read_lines(str(tmp_path / "metrics.jsonl")) if "eval_loss" in r]
    found = entries(tmp_path / "board", "eval/loss")
    assert list(found) == [4, 8]
    assert all(math.isclose(found[row["step"]], row["eval_loss"], rel_tol=1e-6) for row in rows)


def test_without_the_package_the_start_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises((UsageError, ConfigError), match="not installed") as raised:
        run(tmp_path, 2)
    assert "perdure[tensorboard]" in str(raised.value.hint)
