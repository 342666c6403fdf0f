"""No kill and no power cut inside a whole run of the engine loses a checkpoint, or leaves one that is not itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crash.tally import Tally

HERE = Path(__file__).resolve().parents[2]
FULL = os.environ.get("PERDURE_CRASH_SWEEP") == "full"
SAMPLE = 31
"""A plain run makes every 31st try, on one path of each scenario; PERDURE_CRASH_SWEEP=full makes them all."""


@pytest.mark.timeout(7200 if FULL else 600)
def test_cut_off_anywhere_a_run_resumes_from_the_old_or_the_new_truth_and_ends_as_if_it_had_not_been() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.engine_sweep", "--every", "1" if FULL else str(SAMPLE)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "src"), str(HERE)]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    tally = Tally.decode(done.stdout)
    assert tally.faults == []
    assert len(tally.operations) == (22 if FULL else 11)
    assert tally.tried.total() >= tally.operations.total() // (1 if FULL else SAMPLE)
