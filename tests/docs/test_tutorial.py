"""The tutorial runs as it is written, kill included, and what it shows is said; the tour names what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.train.history import read_lines

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text(encoding="utf-8")
TOUR = (DOCS / "design" / "tour.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "perdure"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perdure "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    work = tmp_path / "work"
    work.mkdir()
    said = ""
    for kind, text in re.findall(r"```(\w+)\n(.*?)\n```", TUTORIAL, re.S):
        if kind == "yaml":
            (work / "run.yaml").write_text(text)
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-e", "-c", text], cwd=work, env=environment, capture_output=True, text=True, timeout=120
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, f"{text}\n{said[-3000:]}"
        else:
            assert all(line in said for line in text.splitlines()), f"{text}\nis not in\n{said[-3000:]}"
    rows = read_lines(str(work / "output" / "metrics.jsonl"))
    losses: dict[tuple[int, int], set[float]] = {}
    for row in rows:
        if "loss" in row:
            losses.setdefault(tuple(row["samples"]), set()).add(row["loss"])
    assert len(losses) == 420
    assert {len(values) for values in losses.values()} == {1}
    assert len([row for row in rows if "loss" in row]) > 420


def test_the_tour_names_what_there_is() -> None:
    """Each name is defined in a file that the same section links."""
    for section in TOUR.split("\n## ")[1:]:
        links = re.findall(r"\]\(\.\./\.\./(src/[\w/.]+)\)", section)
        sources = [(DOCS.parent / link).read_text(encoding="utf-8") for link in links]
        keys = {"async_save", "load_balanced"}  # of the configuration
        names = set(re.findall(r"`(_?[A-Za-z]\w+)`", section)) - keys
        missing = {n for n in names if not any(re.search(rf"\b(def|class) {n}\b", text) for text in sources)}
        # Of the save's record and the plan, the section before says where they are.
        assert missing <= {"CheckpointMetadata"}, section[:30]
        assert names
