"""The guide to parts of one's own in the Trainer: its programs run, and go on when they are run again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perdure.train.history import read_lines, superseded

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "trainer.md").read_text(encoding="utf-8")
OBJECTS, CALLBACK, JOINING = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(code: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "trainer.md", "exec"), space)
    return space


def losses(output: str) -> list[float]:
    return [line["loss"] for line in superseded(read_lines(f"{output}/metrics.jsonl"))]


def test_passed_objects_train_and_go_on_exactly() -> None:
    elsewhere = OBJECTS.replace("config = {", 'config = {\n    "output_dir": "straight",')
    assert start(elsewhere)["state"].global_step == 20
    start(
        OBJECTS.replace('"steps": 20', '"steps": 13').replace(
            '"warmup_steps": 2', '"warmup_steps": 2, "total_steps": 20'
        )
    )
    state = start(OBJECTS)["state"]
    assert state.eval_loss > 0
    assert losses("output") == losses("straight")
    assert len(losses("output")) == 20


def test_a_run_that_has_stopped_early_stays_stopped() -> None:
    code = CALLBACK + OBJECTS.replace("compute_loss_func=loss", "compute_loss_func=loss, callbacks=[EarlyStop(1)]")
    # Evaluations that only become worse.
    code = code.replace('"learning_rate": 0.01', '"learning_rate": 0.0')
    assert start(code)["state"].global_step == 10
    before = Path("output/metrics.jsonl").read_text().count('"loss"')
    assert start(code)["state"].global_step == 10
    assert Path("output/metrics.jsonl").read_text().count('"loss"') == before


def test_joining_is_python() -> None:
    compile(JOINING, "trainer.md", "exec")
