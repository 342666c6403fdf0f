"""A run stops on one layout and goes on, exactly, on another: real processes over gloo."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.catalog.root import Root
from perdure.train.history import read_lines, superseded

CONFIG = """
training: {steps: 8, local_batch_size: 1, global_batch_size: 12, seed: 42}
model: {type: decoder, hidden_size: 36, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 50}
optimizer: {type: AdamW, betas: [0.9, 0.95], weight_decay: 0.01}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 1e-3}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 32, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 4}
"""

TENSOR = ("parallelism.tensor_parallel=2", "parallelism.sequence_parallel=true")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "replicate 2": (2, ("parallelism.data_parallel_replicate=2",)),
    "shard 2": (2, ()),
    "shard 3, uneven": (3, ()),
    "tensor 2, one reader": (
        2,
        (*TENSOR, "train_dataset.use_distribute_dataset=true", "train_dataset.num_parallel_workers=1"),
    ),
    "replicate 2 x shard 2": (4, ("parallelism.data_parallel_replicate=2",)),
    "shard 2 x tensor 2": (4, TENSOR),
}


def train(folder: Path, output: Path, ranks: int, *overrides: str) -> str:
    words = ["-m", "perdure", "train", str(folder / "run.yaml"), f"output_dir={output}", *overrides]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def steps(output: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return superseded(read_lines(str(output / name)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    (folder / "run.yaml").write_text(CONFIG)
    train(folder, folder / "straight", 1)
    train(folder, folder / "half", 1, "training.steps=4")
    return folder


# Every pair of layouts is in test_pairs.py; one here goes through the command in a plain run.
@pytest.mark.parametrize(
    "layout", [name if "x tensor" in name else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_run_goes_on_in_another_layout_and_back(folder: Path, tmp_path: Path, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    output = tmp_path / "run"
    shutil.copytree(folder / "half", output)
    told = train(folder, output, ranks, "training.steps=6", *overrides)
    assert "resumed from" in told
    commits = [i.commit for i in Root(str(output / "checkpoint")).iterations()]
    assert [c.ranks for c in commits] == [1, ranks]
    train(folder, output, 1)

    straight, moved = steps(folder / "straight"), steps(output)
    assert [s["samples"] for s in moved] == [s["samples"] for s in straight]
    ids = [[s["ids"] for s in steps(where, "ledger.jsonl")] for where in (folder / "straight", output)]
    assert ids[0] == ids[1]
    for here, there in zip(moved, straight, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=2e-6)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=2e-5)
    checked = subprocess.run(
        [sys.executable, "-m", "perdure", "verify", "--read-data", str(output / "checkpoint")],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
