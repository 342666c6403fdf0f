"""The check that is run on machines with a GPU works: here on the CPU, and it says so where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.jobs import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "device_check.py"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_check_is_right_on_the_cpu(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--cpu", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert len(checks) >= 7
    assert all(check["right"] for check in checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment(), cwd=tmp_path
    )
    assert done.returncode == 2
    assert "no CUDA device here: nothing was checked" in done.stderr
    assert done.stdout == ""
