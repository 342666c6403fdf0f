"""The guide to a loop of one's own: every program in it runs, and goes on when it is run again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import Checkpoint
from perdure.cli.main import run

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "own-loop.md").read_text(encoding="utf-8")
WHOLE, REGISTERED, OPTIMIZERS, SEVERAL, SIGNAL, LOOKING = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def start(code: str) -> None:
    exec(compile(code, "own-loop.md", "exec"), {"__name__": "__main__"})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reached(root: str = "out") -> tuple[int | None, int]:
    checkpoint = Checkpoint(root)
    assert checkpoint.common is not None
    return checkpoint.iteration, checkpoint.common.consumed_samples


def test_the_whole_loop_goes_on_and_is_the_loop_that_was_never_stopped() -> None:
    start(WHOLE.replace('save_path="out"', 'save_path="straight"'))
    assert reached("straight") == (40, 320)
    start(WHOLE.replace("STEPS, BATCH, SEED = 40,", "STEPS, BATCH, SEED = 17,"))
    assert reached() == (17, 136)
    start(WHOLE)
    assert reached() == (40, 320)
    assert run(["diff", "straight", "out"]) == 0


def test_another_batch_size_scales_the_step_and_leaves_no_sample_out() -> None:
    start(WHOLE.replace("STEPS, BATCH, SEED = 40, 8", "STEPS, BATCH, SEED = 10, 8"))
    start(WHOLE.replace("STEPS, BATCH, SEED = 40, 8", "STEPS, BATCH, SEED = 8, 16"))
    assert reached() == (8, 80 + 3 * 16)


def test_registered_objects() -> None:
    start(REGISTERED.replace("take(10 -", "take(7 -"))
    start(REGISTERED)
    assert reached() == (10, 40)


def test_several_optimizers_go_on_exactly() -> None:
    start(OPTIMIZERS.replace('save_path="out"', 'save_path="straight"'))
    start(OPTIMIZERS.replace("global_step < 10", "global_step < 5"))
    start(OPTIMIZERS)
    assert run(["diff", "straight", "out"]) == 0


@pytest.mark.timeout(180)
def test_several_ranks(here: Path) -> None:
    def launch(code: str, ranks: int) -> None:
        (here / "loop.py").write_text(code, encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run([sys.executable, *launcher, "loop.py"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    launch(SEVERAL, 2)
    assert reached() == (10, 80)
    launch(SEVERAL.replace("take(10 -", "take(15 -"), 1)
    assert reached() == (15, 120)


def test_a_signal_and_a_look(request: pytest.FixtureRequest) -> None:
    before = signal.getsignal(signal.SIGTERM)
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    start(SIGNAL)
    assert reached() == (3, 3)
    start(SIGNAL.replace("== 3", "== 5"))
    assert reached() == (5, 5)
    start(LOOKING)
