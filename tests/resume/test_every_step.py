"""A run that is stopped anywhere and started again is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure import Trainer
from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    DataError,
    MismatchError,
    RootLockedError,
    UsageError,
)
from perdure.train.history import read_lines, superseded

STEPS, LENGTH = 12, 37
EVAL = {"num_parallel_workers": 0, "dataloader": {"type": "Text"}}  # the object that is passed wins


class Noisy(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that carry their index and some noise of their own."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.full((4,), index / self.length) + 0.1 * torch.randn(4)
        return index, x, x.sum(0, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[1]), batch[2])


def config(output: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 4, "seed": 3},
        "lr_scheduler": {
            "type": "CosineWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 3, "total_steps": STEPS
        },
        "train_dataset": {"num_parallel_workers": 0, "dataloader": {"shuffle": True}},
        "checkpoint": {"auto_resume": True, "save_interleaved_steps": 5, "save_max": 3},
    }  # fmt: skip
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return {**base, "output_dir": str(output)}


def trainer(output: Path, length: int = LENGTH, **sections: dict[str, Any]) -> Trainer:

    torch.manual_seed(int(sections.get("training", {}).get("seed", 3)))
    return Trainer(config(output, **sections), model=Net(), train_dataset=Noisy(length), compute_loss_func=loss_of)


def trace(output: Path) -> list[tuple[Any, ...]]:
    metrics = superseded(read_lines(str(output / "metrics.jsonl")))
    ledger = superseded(read_lines(str(output / "ledger.jsonl")))
    keys = ("step", "loss", "learning_rate", "grad_norm", "samples", "consumed_samples")
    return [(*(m[k] for k in keys), row["ids"]) for m, row in zip(metrics, ledger, strict=True)]


def state(output: Path, iteration: int) -> dict[str, str]:
    found = Root(str(output / "checkpoint")).find(iteration)
    assert found is not None
    metadata = json.loads((Path(found.path) / "metadata.json").read_text())
    return {
        f"{section}:{name}": record["shards"][0][3]
        for section in ("model", "optimizer")
        for name, record in metadata[section].items()
    }


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    trainer(output).train()
    return output


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopped_after_any_step_the_rest_is_the_same(straight: Path, tmp_path: Path, stop: int) -> None:
    workers = {"num_parallel_workers": 2} if stop == 7 else {}
    trainer(tmp_path, training={"steps": stop}, checkpoint={"async_save": stop % 2 == 0}).train()
    reached = trainer(tmp_path, train_dataset=workers, checkpoint={"async_save": stop % 2 == 1}).train()
    assert reached.global_step == STEPS
    assert trace(tmp_path) == trace(straight)
    assert state(tmp_path, STEPS) == state(straight, STEPS)


def test_a_finished_run_launched_again_changes_nothing(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    watched = [p for p in tmp_path.rglob("*") if p.is_file() and p.name not in ("events.jsonl", "lock")]
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in watched}
    assert trainer(tmp_path).train().global_step == STEPS
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in watched} == before
    assert trainer(tmp_path, training={"steps": 8}).train().global_step == STEPS
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in watched} == before


@pytest.mark.parametrize(("batch", "step"), [(8, 6), (2, 24), (6, 8)])
def test_a_changed_batch_size_scales_the_step_and_keeps_the_position(tmp_path: Path, batch: int, step: int) -> None:
    trainer(tmp_path).train()
    more = {"steps": step + 2, "global_batch_size": batch}
    trainer(tmp_path, training=more, lr_scheduler={"total_steps": 99}).train()
    lines = [line for line in read_lines(str(tmp_path / "metrics.jsonl")) if "samples" in line][-2:]
    assert [line["step"] for line in lines] == [step + 1, step + 2]
    assert [line["samples"] for line in lines] == [[48, 48 + batch], [48 + batch, 48 + 2 * batch]]
    newest = max(Root(str(tmp_path / "checkpoint")).iterations(), key=lambda i: i.commit.sequence)
    common = json.loads((Path(newest.path) / "common.json").read_text())
    assert (common["global_step"], common["global_batch_size"]) == (step + 2, batch)
    assert common["consumed_samples"] == 48 + 2 * batch
    assert common["epoch_num"] == common["consumed_samples"] // LENGTH
    assert common["step_num"] == common["consumed_samples"] % LENGTH // batch


def test_weights_only_leaks_nothing_of_the_old_run(straight: Path, tmp_path: Path) -> None:
    loading = {"load_path": str(straight / "checkpoint"), "no_load_optim": True}
    run = trainer(tmp_path, training={"steps": 1, "global_batch_size": 6}, checkpoint=loading)
    reached = run.train()
    assert (reached.global_step, reached.consumed_samples) == (1, 6)
    first = trace(tmp_path)[0]
    assert (first[0], first[2], first[4]) == (1, 0.0, [0, 6])
    # The rate of the first warm-up step is 0: the weights are those that were loaded.
    old, new = state(straight, STEPS), state(tmp_path, 1)
    assert {k: v for k, v in new.items() if k.endswith(("weight", "bias")) and k.startswith("model")} == {
        k: v for k, v in old.items() if k.endswith(("weight", "bias")) and k.startswith("model")
    }


def test_a_damaged_iteration_is_set_aside_and_its_parent_taken(straight: Path, tmp_path: Path) -> None:
    trainer(tmp_path, training={"steps": 10}).train()
    newest = tmp_path / "checkpoint" / "iteration_00000010"
    shard = next(newest.glob("*-model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        trainer(tmp_path, checkpoint={"on_corrupt": "error"}).train()
    trainer(tmp_path).train()
    events = [e["event"] for e in read_events(Root(str(tmp_path / "checkpoint")))]
    assert "damage" in events
    assert trace(tmp_path) == trace(straight)
    assert state(tmp_path, STEPS) == state(straight, STEPS)


def test_what_cannot_be_meant_is_refused_before_anything_changes(straight: Path, tmp_path: Path) -> None:
    root = str(straight / "checkpoint")
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        trainer(tmp_path / "a", checkpoint={"load_path": str(tmp_path / "nothing")}).train()
    with pytest.raises(UsageError, match="already holds iteration"):
        trainer(straight, checkpoint={"auto_resume": False}).train()
    with pytest.raises(MismatchError, match="seed"):
        trainer(tmp_path / "b", training={"seed": 4, "steps": 20}, checkpoint={"load_path": root}).train()
    with pytest.raises(DataError, match="training data"):
        trainer(tmp_path / "c", length=50, training={"steps": 20}, checkpoint={"load_path": root}).train()
    small = Trainer(
        config(tmp_path / "d", checkpoint={"load_path": root}),
        model=nn.Sequential(nn.Linear(4, 1)),
        train_dataset=Noisy(),
        compute_loss_func=loss_of,
    )
    before = [p.clone() for p in small.model.parameters()] if small.model is not None else []
    with pytest.raises(MismatchError, match="nothing was loaded"):
        small.train()
    assert small.model is not None
    assert all(torch.equal(a, b) for a, b in zip(before, small.model.parameters(), strict=True))


def test_data_skips_are_applied_once(tmp_path: Path) -> None:
    trainer(tmp_path, training={"steps": 5}).train()
    skip = {"data_skip_steps": 2}
    trainer(tmp_path, training={**skip, "steps": 7}).train()
    trainer(tmp_path, training={**skip, "steps": 9}).train()
    lines = superseded(read_lines(str(tmp_path / "metrics.jsonl")))
    assert [line["samples"][0] for line in lines] == [0, 4, 8, 12, 16, 28, 32, 36, 40]


def test_a_second_writer_is_refused_and_named(tmp_path: Path) -> None:
    first = trainer(tmp_path)

    class Start(UsageError):
        pass

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with pytest.raises(RootLockedError, match="by this process itself"):
            trainer(tmp_path).train()
        raise Start("seen")

    first._loss = loss
    with pytest.raises(Start):
        first.train()
    assert trainer(tmp_path).train().finished


def test_nothing_is_made_without_saving(tmp_path: Path) -> None:
    trainer(tmp_path, checkpoint={"enable_save": False}).train()
    assert not (tmp_path / "checkpoint").exists()


QUICK = """
training: {steps: 60, local_batch_size: 2, global_batch_size: 4, seed: 42}
model: {type: decoder, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, dropout: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 1e-3, warmup_ratio: 0.1}
train_dataset: {num_parallel_workers: 1, dataloader: {type: Text, path: python-docs, seq_length: 32, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 3, save_max: 2}
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_random_moments_the_run_ends_the_same(tmp_path: Path, background: bool) -> None:
    (tmp_path / "run.yaml").write_text(QUICK)

    def start(output: Path) -> subprocess.Popen[bytes]:
        words = ["-m", "perdure", "train", str(tmp_path / "run.yaml"), f"output_dir={output}"]
        words.append(f"checkpoint.async_save={str(background).lower()}")
        return subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL, start_new_session=True)

    def lines(output: Path) -> int:
        path = output / "metrics.jsonl"
        return len([line for line in read_lines(str(path)) if "samples" in line]) if path.exists() else 0

    assert start(tmp_path / "straight").wait(100) == 0
    rng, output = random.Random(7 + background), tmp_path / "killed"
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process, goal = start(output), lines(output) + rng.randint(4, 15)
        while process.poll() is None and lines(output) < goal:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.03))
        os.killpg(process.pid, number)
        assert process.wait(60) in (-9, 143)
    last = start(output)
    assert last.wait(100) == 0
    assert trace(output) == trace(tmp_path / "straight")
    assert state(output, 60) == state(tmp_path / "straight", 60)
    hidden = [name for name in os.listdir(output / "checkpoint") if name.startswith(".")]
    assert hidden == []


def test_evaluation_leaves_training_alone_also_across_a_resume(straight: Path, tmp_path: Path) -> None:
    def evaluated(steps: int) -> Trainer:
        run = trainer(tmp_path, training={"steps": steps, "eval_interleaved_steps": 3}, eval_dataset=EVAL)
        run.eval_dataset = Noisy(11)
        return run

    evaluated(5).train()
    evaluated(STEPS).train()
    assert trace(tmp_path) == trace(straight)
    assert state(tmp_path, STEPS) == state(straight, STEPS)
    lines = [line for line in read_lines(str(tmp_path / "metrics.jsonl")) if "eval_loss" in line]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    straight_again = trainer(tmp_path / "again", training={"eval_interleaved_steps": 3})
    straight_again.eval_dataset = Noisy(11)
    straight_again.train()
    again = [line for line in read_lines(str(tmp_path / "again" / "metrics.jsonl")) if "eval_loss" in line]
    assert [line["eval_loss"] for line in again] == [line["eval_loss"] for line in lines]
