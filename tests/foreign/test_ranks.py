"""A run of theirs, saved by one device, goes on here on two ranks with the losses of the straight run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from perdure.catalog.root import Root
from perdure.convert.state import open_iteration
from perdure.train.history import read_lines, superseded

CONFIG = """
training: {steps: 6, local_batch_size: 1, global_batch_size: 4, seed: 42}
model: {type: decoder, hidden_size: 36, num_hidden_layers: 1, num_attention_heads: 2, params_dtype: bfloat16}
optimizer: {type: AdamW, betas: [0.9, 0.95], weight_decay: 0.01}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 1e-3}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 32, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 3}
"""


def train(folder: Path, output: Path, ranks: int, *overrides: str) -> str:
    words = ["-m", "perdure", "train", str(folder / "run.yaml"), f"output_dir={output}", *overrides]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def as_theirs(iteration: Path, root: Path) -> None:
    """An iteration of ours written as a single device of theirs writes it."""
    target = root / "iteration_00000003"
    target.mkdir(parents=True)
    with open_iteration(iteration, ["decoder-to-huggingface", "huggingface-to-mindformers"]) as state:
        for section, kind in (("model", "model"), ("optimizer", "opt")):
            tensors = {item.name: item.load() for item in state.items if item.section == section}
            if "adam_step" in tensors:
                tensors["global_step"] = tensors.pop("adam_step").to(torch.int64).reshape(1)
                tensors["learning_rate"] = torch.tensor(0.5)
            save_file(tensors, target / f"toy-{kind}-0000000-0000001.safetensors", {"format": "ms"})
    shutil.copy(iteration / "common.json", target)
    (root / "latest_checkpointed_iteration.txt").write_text("3")


def test_one_of_theirs_goes_on_upon_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    train(tmp_path, tmp_path / "straight", 1)
    as_theirs(tmp_path / "straight" / "checkpoint" / "iteration_00000003", tmp_path / "theirs")
    names = ("checkpoint.load_path=" + str(tmp_path / "theirs"), "checkpoint.rename=[mindformers-to-decoder]")
    told = train(tmp_path, tmp_path / "moved", 2, *names)
    assert "made by MindSpore Transformers" in told
    (last,) = Root(tmp_path / "moved" / "checkpoint").iterations()
    assert (last.iteration, last.commit.ranks, last.commit.consumed_samples) == (6, 2, 24)
    straight = superseded(read_lines(str(tmp_path / "straight" / "metrics.jsonl")))[3:]
    moved = superseded(read_lines(str(tmp_path / "moved" / "metrics.jsonl")))
    assert [s["samples"] for s in moved] == [s["samples"] for s in straight]
    assert [s["loss"] for s in moved] == pytest.approx([s["loss"] for s in straight], abs=1e-4)
    assert [s["learning_rate"] for s in moved] == [1e-3] * 3
