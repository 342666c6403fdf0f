"""`perdure train`: exit codes, signals, and what is on the two streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import tiny

from perdure.cli.main import run
from perdure.train.history import read_lines

REPOSITORY = Path(__file__).parents[2]

RUN = """
training: {steps: STEPS, local_batch_size: 2, global_batch_size: 4}
model: {type: decoder, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, dropout: 0.1}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 1e-3, warmup_steps: 2}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: text.txt, seq_length: 16, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 5}
output_dir: out
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"line {n} of some text, {n * n} of them\n" for n in range(200)))
    (tmp_path / "run.yaml").write_text(RUN.replace("STEPS", "12"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*overrides: str) -> list[str]:
    return ["train", "run.yaml", *overrides]


def start(*overrides: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which finds what this one finds."""
    paths = f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"
    return subprocess.Popen(
        [sys.executable, "-m", "perdure", *words(*overrides)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.005)


def test_a_run_says_what_it_did_and_is_silent_on_stdout(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words()) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "step 12 of 12" in err
    assert tiny.numbers(here / "out" / "checkpoint") == [5, 10, 12]
    (config,) = (here / "out").glob("config-*.yaml")
    assert "steps: 12" in config.read_text()
    header, *steps = read_lines(str(here / "out" / "metrics.jsonl"))
    assert header["resumed"] is None
    expected = {
        "step", "loss", "learning_rate", "grad_norm", "global_batch_size", "consumed_samples", "samples",
        "tokens_per_second", "attempt",
    }  # fmt: skip
    assert all(expected <= set(line) for line in steps)


def test_a_finished_run_started_again_changes_no_byte_and_says_why(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(words()) == 0
    before = tiny.tree(here / "out", but=("lock", "events.jsonl"))
    capfd.readouterr()
    assert run(words()) == 0
    assert "nothing to do: step 12 of 12 is reached" in capfd.readouterr().err
    assert tiny.tree(here / "out", but=("lock", "events.jsonl")) == before


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["checkpoint.auto_resume=false", "checkpoint.load_path=nowhere"], 10, "nowhere does not exist"),
        (["checkpoint.auto_resume=false", "checkpoint.load_path=text.txt"], 10, "text.txt is a file"),
        (["checkpoint.auto_resume=false"], 2, "already holds iteration 12"),
        (["training.seed=1", "training.steps=20"], 1, "training.seed"),
        (["model.hidden_size=32", "training.steps=20"], 1, "does not fit the model"),
        (["optimizer.type=SGD", "training.steps=20"], 1, "AdamW"),
        (["train_dataset.dataloader.seq_length=8", "training.steps=20"], 1, "ignore_data_skip"),
        (["checkpoint.save_interleave_steps=3"], 2, "save_interleaved_steps"),
        (["checkpoint.save_path=text.txt"], 2, "text.txt"),
        (["output_dir=text.txt/x"], 2, "text.txt"),
    ],
)
def test_an_error_is_a_sentence_a_hint_and_an_exit_code(
    here: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], code: int, said: str
) -> None:
    assert run(words()) == 0
    before = tiny.tree(here / "out", but=("lock", "events.jsonl"))
    capfd.readouterr()
    assert run(words(*overrides)) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert "hint:" in err or "did you mean" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 40
    assert tiny.tree(here / "out", but=("lock", "events.jsonl")) == before


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: expected a number from 1 on, found 'two'"),
        ({"WORLD_SIZE": "2"}, "RANK: expected a number from 0 on, it is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "WORLD_SIZE is 2, but RANK is 2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "WORLD_SIZE is 2, but MASTER_ADDR is not set"),
    ],
    ids=repr,
)
def test_half_of_a_launchers_environment_is_told(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
    told: str,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "run.yaml"]) == 2
    assert told in capfd.readouterr().err
    assert not (here / "out").exists()


def test_damage_without_a_parent_is_exit_1_each_time(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words("training.steps=5")) == 0
    (shard,) = (here / "out" / "checkpoint" / "iteration_00000005").glob("*-model-*")
    os.truncate(shard, shard.stat().st_size - 1)
    for _ in range(3):
        capfd.readouterr()
        assert run(words()) == 1
        err = capfd.readouterr().err
        assert shard.name in err or "marked as damaged" in err
        assert "perdure verify --read-data" in err


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)],
    ids=["TERM", "INT", "USR1"],
)
def test_a_signal_saves_the_step_and_gives_its_exit_code(
    here: Path, capfd: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    with open("run.yaml", "a") as file:
        file.write(f"callbacks: [{{type: 'tests.tiny:SignalAt', step: 6, number: {int(number)}}}]\n")
    assert run(words()) == code
    err = capfd.readouterr().err
    assert "stopping at step 7: saving (the last save took" in err
    assert tiny.numbers(here / "out" / "checkpoint") == [5, 7]
    (here / "run.yaml").write_text(RUN.replace("STEPS", "12"))
    assert run(words()) == 0
    assert tiny.numbers(here / "out" / "checkpoint") == [5, 7, 10, 12]


def test_a_later_second_signal_stops_at_once_and_the_root_is_free(here: Path) -> None:
    callbacks = "callbacks: [{type: 'tests.tiny:Stubborn'}]\n"
    (here / "run.yaml").write_text(RUN.replace("STEPS", "12") + callbacks)
    process = start()
    until(lambda: (here / "stuck").exists(), process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # at once: the same request
    time.sleep(2.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    (here / "run.yaml").write_text(RUN.replace("STEPS", "12"))
    assert run(words()) == 0


@pytest.mark.parametrize("delay", [0.3, 1.2])
def test_a_signal_during_start_up_ends_it_cleanly(here: Path, delay: float) -> None:
    process = start("training.steps=100000")
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=60)[1]
    assert process.returncode in (143, -signal.SIGTERM)
    assert "Traceback" not in err
    assert run(words("training.steps=100000", "training.steps=3")) == 0


def test_a_second_writer_is_refused_with_who_holds_the_root(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "run.yaml").write_text(RUN.replace("STEPS", "12") + "callbacks: [{type: 'tests.tiny:Stubborn'}]\n")
    process = start()
    until(lambda: (here / "stuck").exists(), process)
    try:
        assert run(words("training.seed=9", "output_dir=out2", "checkpoint.save_path=out/checkpoint")) == 12
        err = capfd.readouterr().err
        assert str(process.pid) in err
        assert "hint:" in err
    finally:
        process.kill()
        process.communicate()
    # The holder is dead: the next start is not refused.
    (here / "run.yaml").write_text(RUN.replace("STEPS", "12"))
    assert run(words()) == 0


def test_metrics_are_json_whatever_the_numbers(here: Path) -> None:
    assert run(words("lr_scheduler.learning_rate=1e30", "training.steps=4", "training.max_norm=1000")) == 0
    lines = [json.loads(line) for line in (here / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 4


def test_what_is_wrong_with_data_says_with_which_and_what_would_help(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(words("train_dataset.dataloader.path=nowhere.txt")) == 1
    assert "error: train_dataset.dataloader: nowhere.txt: No such file or directory" in capfd.readouterr().err
    assert run(words("training.steps=2", "eval_dataset.dataloader.type=Text")) == 0
    assert "eval_dataset is never used: training.eval_interleaved_steps is 0" in capfd.readouterr().err
    assert run(words("training.steps=3", "train_dataset.dataloader.seq_length=8")) == 1
    err = capfd.readouterr().err
    assert "seq_length: " in err
    # More windows, but of other samples.
    assert "accept_data_growth" not in err
