"""The launch examples: they parse, the restart loop really restarts, and the batch script really requeues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from tests.distributed import jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOP = EXAMPLES / "restart-loop.sh"
TROUBLE = "callbacks: [{type: 'tests.distributed.trouble:Trouble', rank: 0, kind: KIND}]\n"


def run_yaml(folder: Path, kind: str = "", **changes: str) -> Path:
    text = jobs.CONFIG + (TROUBLE.replace("KIND", kind) if kind else "")
    for old, new in changes.items():
        text = text.replace(f"{old}: {12 if old == 'steps' else 4}", f"{old}: {new}")
    (folder / "run.yaml").write_text(text)
    return folder / "run.yaml"


def start(folder: Path, *words: str, **env: str) -> subprocess.Popen[bytes]:
    environment = jobs.environment(PAUSE="0", ROOT=str(folder / "output" / "checkpoint"), **env)
    with (folder / "told").open("wb") as file:
        return subprocess.Popen([*words], cwd=folder, env=environment, stdout=file, stderr=file)


def loop(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    return start(folder, str(LOOP), sys.executable, "-m", "perdure", "train", "run.yaml", *overrides)


def until(condition: Any, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("script", [LOOP, EXAMPLES / "slurm" / "train.sbatch"])
def test_scripts_parse(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_the_job_is_yaml_that_gives_ranks_the_time_they_need() -> None:
    service, job = YAML(typ="safe").load_all((EXAMPLES / "kubernetes" / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert pod["restartPolicy"] == "Never"
    words = container["args"][0].split()
    assert words[0] == "exec"
    assert words[words.index("-m") + 1 : words.index("-m") + 3] == ["perdure", "train"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_loop_starts_a_killed_run_again_until_it_is_done(tmp_path: Path) -> None:
    run_yaml(tmp_path, "kill-once", save_interleaved_steps="2", steps="6")
    assert loop(tmp_path, "checkpoint.async_save=false").wait(100) == 0, (tmp_path / "told").read_text()
    told = (tmp_path / "told").read_text()
    assert "exit code 137; try 2 of 100" in told
    assert "resumed from" in told
    assert [line["step"] for line in jobs.lines(tmp_path / "output")] == list(range(1, 7))


def test_the_loop_gives_up_where_no_try_gets_further_and_on_what_no_try_can_mend(tmp_path: Path) -> None:
    run_yaml(tmp_path, "kill")
    assert loop(tmp_path).wait(100) == 137
    assert "three tries in a row brought no new checkpoint" in (tmp_path / "told").read_text()
    assert loop(tmp_path, "training.stepps=3").wait(60) == 2
    assert "try 2" not in (tmp_path / "told").read_text()


def test_a_signal_stops_the_run_and_the_loop(tmp_path: Path) -> None:
    run_yaml(tmp_path, steps="100000")
    process = loop(tmp_path)
    until(lambda: len(jobs.lines(tmp_path / "output")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143, (tmp_path / "told").read_text()
    assert "try 2" not in (tmp_path / "told").read_text()


def test_the_batch_script_saves_at_the_warning_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    run_yaml(tmp_path, steps="100000")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nexec "${@:2}"\n')
    (tools / "scontrol").write_text('#!/bin/bash\n[ "$1" = show ] && echo localhost || echo "$@" >> scontrol.log\n')
    (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    place = {"SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    process = start(
        tmp_path,
        "bash",
        str(EXAMPLES / "slurm" / "train.sbatch"),
        "run.yaml",
        PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
        **place,
    )
    until(lambda: len(jobs.lines(tmp_path / "output")) >= 2, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0, (tmp_path / "told").read_text()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    saved = int((tmp_path / "output" / "checkpoint" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == jobs.lines(tmp_path / "output")[-1]["step"]
