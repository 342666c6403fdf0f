"""No kill and no power cut at any storage operation of a save, retention, rewind or clean-up loses a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.tally import Tally

HERE = Path(__file__).resolve().parents[2]
SCENARIOS = ("first", "next-with-retention", "overwrite", "overwrite-without-exchange", "clean-up", "rewind")


@pytest.mark.parametrize("how", ["kill", "power"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_cut_off_at_any_operation_the_old_or_the_new_truth_is_left(scenario: str, how: str) -> None:
    path = os.pathsep.join([str(HERE / "src"), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.storage_sweep", scenario, how],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally = Tally.decode(done.stdout)
    assert tally.faults == []
    assert tally.tried.total() >= 2 * tally.operations.total() > 0
