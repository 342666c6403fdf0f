"""The time of a start is told phase by phase, and adds up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests import tiny

from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.engine.laps import Laps, process_age


def test_laps_add_up() -> None:
    clock = iter([100.0, 101.0, 105.0, 106.0])
    laps = Laps(age=2.0, now=lambda: next(clock))
    laps.end("start")
    laps.end("agree", {"find": 0.5, "read": 3.0})
    laps.end("start")
    assert laps.seconds == {"start": 4.0, "find": 0.5, "read": 3.0, "agree": 0.5}
    assert str(laps).startswith("8.00 s")


def test_a_process_knows_its_age() -> None:
    assert 0 < process_age() < 24 * 3600


def test_a_resume_is_accounted_from_process_to_first_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(tmp_path, 2).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, 4).train()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resumed from")]
    told = re.search(r"([\d.]+) s since the process began: (.*)\)$", line)
    assert told is not None, line
    parts = dict(part.split(" ") for part in told[2].split(", "))
    assert list(parts) == ["start", "build", "find", "plan", "read", "set", "agree"]
    assert sum(map(float, parts.values())) == pytest.approx(float(told[1]), abs=0.04)
    events = [e for e in read_events(Root(str(tmp_path / "checkpoint"))) if e["event"] == "first_step"]
    assert [e["step"] for e in events] == [1, 3]
    assert list(events[0]["seconds"]) == ["start", "build", "agree", "first step"]
    assert list(events[1]["seconds"]) == [*parts, "first step"]
