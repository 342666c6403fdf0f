"""SIGTERM, SIGINT and SIGUSR1 at any time, to one rank or to all: a bounded end, and a root that goes on exactly."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.distributed import jobs

from perdure.catalog.root import Root
from perdure.format.names import LOCK

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138}
MOMENTS = ("import", "join", "load", "first step", "data", "step", "evaluation", "save", "end")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    (folder / "run.yaml").write_text(jobs.CONFIG)
    assert jobs.start(folder / "run.yaml", folder / "run").wait(100) == [0, 0]
    return folder / "run"


def at(moment: str, output: Path, job: jobs.Job) -> None:
    """Waits until a job is there, more or less."""
    if moment == "import":
        time.sleep(0.4)
    elif moment == "join":
        time.sleep(1.5)
    elif moment == "load":
        jobs.until(lambda: (output / "checkpoint" / LOCK).exists(), job)
    elif moment == "first step":
        jobs.until(lambda: any(output.glob("config-*.yaml")), job)
    else:
        jobs.until(lambda: len(jobs.lines(output)) >= 3 + MOMENTS.index(moment), job)


def goes_on(folder: Path, straight: Path) -> None:
    commits = (
        [i.commit for i in Root(str(folder / "run" / "checkpoint")).iterations()] if (folder / "run").exists() else []
    )
    assert all(commit.ranks == 2 for commit in commits)
    assert jobs.start(folder / "run.yaml", folder / "run").wait(100) == [0, 0]
    assert jobs.same_run(folder / "run", straight)


@pytest.mark.parametrize("moment", ["join", "step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all(straight: Path, tmp_path: Path, rank: int, moment: str) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    number = (signal.SIGTERM, signal.SIGUSR1)[rank]
    # A rank that ends before it has joined is waited for as long as that.
    deadline = "6" if moment == "join" else "20"
    job = jobs.start(tmp_path / "run.yaml", tmp_path / "run", PERDURE_RANK_DEADLINE=deadline)
    at(moment, tmp_path / "run", job)
    job.ranks[rank].send_signal(number)
    codes = job.wait(100)
    if moment == "join":
        # Perhaps so early that nobody listened yet.
        assert codes[rank] in (CODES[number], -number), job.told
        assert codes[1 - rank] in (CODES[number], 1), job.told
    else:
        assert codes == [CODES[number]] * 2, job.told
        newest = Root(str(tmp_path / "run" / "checkpoint")).iterations()[-1].iteration
        assert newest == jobs.lines(tmp_path / "run")[-1]["step"]
    goes_on(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("background", [False, True])
def test_signals_at_random_moments_to_one_rank_or_to_all(straight: Path, tmp_path: Path, background: bool) -> None:
    rng = random.Random(3 + background)
    more = "eval_dataset: {dataloader: {type: Text, path: some.txt, seq_length: 32}}\n"
    text = jobs.CONFIG.replace("seed: 42", "seed: 42, eval_interleaved_steps: 3")
    text = text.replace("async_save: true", f"async_save: {str(background).lower()}") + more
    ends: list[list[int]] = []
    for turn in range(5):
        folder = tmp_path / str(turn)
        folder.mkdir()
        (folder / "run.yaml").write_text(text)
        (folder / "some.txt").write_text("What is trained is evaluated. " * 40)
        job = jobs.start(folder / "run.yaml", folder / "run", PERDURE_RANK_DEADLINE="20")
        at(rng.choice(MOMENTS), folder / "run", job)
        time.sleep(rng.random() * 0.3)
        number = rng.choice(list(CODES))
        for rank in rng.choice([(0,), (1,), (0, 1)]):
            if job.ranks[rank].poll() is None:
                job.ranks[rank].send_signal(number)
        codes = job.wait(100)
        ends.append(codes)
        assert set(codes) <= {0, 1, CODES[number], -number}, job.told
        goes_on(folder, straight)
    assert any(set(codes) <= set(CODES.values()) for codes in ends)


def test_a_second_signal_ends_a_rank_that_is_stuck_in_cpp(tmp_path: Path) -> None:
    # No rank fails here: rank 1 sleeps, and rank 0 waits for it in a collective, where no Python runs.
    trouble = "callbacks: [{type: 'tests.distributed.trouble:Trouble', kind: hang}]\n"
    (tmp_path / "run.yaml").write_text(jobs.CONFIG + trouble)
    job = jobs.start(tmp_path / "run.yaml", tmp_path / "run")
    jobs.until(lambda: (tmp_path / "hangs").exists(), job)
    job.ranks[0].send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert job.ranks[0].poll() is None
    assert "SIGTERM: stopping after this step; once more stops at once" in job.told[0]
    job.ranks[0].send_signal(signal.SIGTERM)
    assert job.ranks[0].wait(20) == 143
    assert job.ranks[1].wait(20) == 1
    assert "rank 0 on " in job.told[1]


def test_a_step_that_never_ends_is_left_after_a_bounded_time(tmp_path: Path) -> None:
    trouble = "callbacks: [{type: 'tests.distributed.trouble:Trouble', kind: hang, rank: 0}]\n"
    (tmp_path / "run.yaml").write_text(jobs.CONFIG + trouble)
    job = jobs.start(tmp_path / "run.yaml", tmp_path / "run", size=1, PERDURE_STOP_DEADLINE="1")
    jobs.until(lambda: (tmp_path / "hangs").exists(), job)
    os.kill(job.ranks[0].pid, signal.SIGUSR1)
    assert job.wait(20) == [138]
    assert "the step has not ended for 1 s: stopping without saving it" in job.told[0]
