"""Jobs that are killed in the middle of a save or a load, and launchers that start them again: the root stays good."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.distributed import jobs

from perdure.catalog.root import Root


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    (folder / "run.yaml").write_text(jobs.CONFIG)
    assert jobs.start(folder / "run.yaml", folder / "run").wait(100) == [0, 0]
    return folder / "run"


def partial(root: Path) -> bool:
    return root.exists() and any(".partial-" in name for name in os.listdir(root))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_save_and_of_a_load_it_comes_back(
    straight: Path, tmp_path: Path, victim: int
) -> None:
    text = jobs.CONFIG.replace("async_save: true", f"async_save: {str(victim == 0).lower()}")
    (tmp_path / "run.yaml").write_text(text)
    output = tmp_path / "run"
    # Files that are slow to write make the middle of a save easy to meet.
    slow = {"PERDURE_TEST_SLOW_WRITES": "0.3"}
    job = jobs.start(tmp_path / "run.yaml", output, module="tests.distributed.slow", **slow)
    jobs.until(lambda: partial(output / "checkpoint") and len(jobs.lines(output)) >= 8, job)
    job.ranks[victim].kill()
    codes = job.wait(100)
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1, job.told
    assert f"rank {victim}" in job.told[1 - victim]  # the store goes with rank 0, and may be missed first
    assert all(i.commit.ranks == 2 for i in Root(str(output / "checkpoint")).iterations())

    job = jobs.start(tmp_path / "run.yaml", output, module="tests.distributed.slow", PERDURE_TEST_SLOW_READS="0.3")
    jobs.until(lambda: (tmp_path / f"reading-{victim}").exists(), job)
    job.ranks[victim].kill()
    codes = job.wait(100)
    assert codes[1 - victim] == 1, job.told

    assert jobs.start(tmp_path / "run.yaml", output).wait(60) == [0, 0]
    assert jobs.same_run(output, straight)


def torchrun(folder: Path, output: Path, *options: str, **env: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "2"]
    words += ["-m", "perdure", "train", str(folder / "run.yaml"), f"output_dir={output}"]
    with (folder / f"{time.monotonic_ns()}.err").open("wb") as file:
        return subprocess.Popen(words, stderr=file, env=jobs.environment(**env), cwd=folder)


def test_torchrun_restarts_what_was_killed(straight: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    output, kills = tmp_path / "run", 0
    launcher = torchrun(tmp_path, output, "--max-restarts", "3")
    while launcher.poll() is None and kills < 2:
        if len(jobs.lines(output)) >= 3 + 4 * kills:
            os.kill(jobs.ranks_of(launcher.pid)[kills % 2], signal.SIGKILL)
            kills += 1
            before = len(list(output.glob("config-*.yaml")))
            end = time.monotonic() + 60
            while len(list(output.glob("config-*.yaml"))) == before and time.monotonic() < end:
                time.sleep(0.05)
        time.sleep(0.005)
    assert launcher.wait(60) == 0, [f.read_text() for f in tmp_path.glob("*.err")]
    assert kills == 2
    assert jobs.same_run(output, straight)


def test_a_launcher_that_dies_takes_its_ranks_along(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG.replace("steps: 12", "steps: 100000"))
    launcher = torchrun(tmp_path, tmp_path / "run")
    end = time.monotonic() + 60
    while len(jobs.lines(tmp_path / "run")) < 2:
        assert launcher.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    ranks = jobs.ranks_of(launcher.pid)
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ranks_that_do_not_see_one_directory_are_told_so_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    job = jobs.start(
        tmp_path / "run.yaml", tmp_path / "run", module="tests.distributed.apart", PERDURE_SHARED_DEADLINE="1"
    )
    assert job.wait(100) == [2, 2], job.told
    for told in job.told:
        assert f"{tmp_path}/run/checkpoint is not one directory for all ranks: rank 1 on " in told
    assert not jobs.lines(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
