"""Real SIGKILLs at random times inside saves, of all ranks or one, again and again on one root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]


def kill(ranks: int, how: str, tries: int, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.sigkill", str(ranks), how, str(tries), str(seed)],
        capture_output=True,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "src"), str(HERE)]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    assert result["faults"] == []
    assert result["kills"] == tries
    assert result["saved"] > 0
    # A rank whose peer was killed ends by itself.
    assert result["stubborn"] == 0
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_few_kills(ranks: int, how: str) -> None:
    kill(ranks, how, 5 if ranks == 1 else 3, seed=ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("ranks", "tries"), [(1, 60), (2, 30)])
def test_many_kills(ranks: int, tries: int, how: str) -> None:
    assert kill(ranks, how, tries, seed=100 + ranks)["rewinds"] > 0
