"""The reference's scenarios A, B and C, as written there, by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import tiny

from perdure.cli.main import run
from perdure.train.history import read_lines, superseded

REST = """
model: {type: decoder, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, dropout: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 1e-3, warmup_steps: 2, total_steps: 40}
train_dataset:
  num_parallel_workers: 0
  dataloader: {type: Text, path: text, seq_length: 16, shuffle: true}
"""

SAVING = """
checkpoint:
  enable_save: True
  save_path: "./output/ckpt"
  save_interleaved_steps: 5
  no_save_optim: False
  save_max: 5
"""

A = (
    SAVING
    + """
  load_path: "./output/ckpt"   # Use the root directory for saving.
  no_load_optim: False         # Restore the optimizer state, training step, and data cursor.
  load_balanced: False
"""
)

B = """
checkpoint:
  enable_save: True
  save_path: "./output/finetune_ckpt"
  save_interleaved_steps: 5
  no_save_optim: False
  save_max: 5

  load_path: "./output/ckpt"
  no_load_optim: True             # Start from step 0.
  load_balanced: False
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"line {n} of some text, {n * n} of them\n" for n in range(200)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(checkpoint: str, steps: int, batch: int = 4) -> int:
    training = f"training: {{steps: {steps}, local_batch_size: 2, global_batch_size: {batch}}}\n"
    Path("run.yaml").write_text(training + REST + checkpoint)
    return run(["train", "run.yaml"])


def lines(name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return superseded(read_lines(f"output/{name}"))


def test_a_standard_resumable_training(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(SAVING, 7) == 0
    assert train(A, 12) == 0
    resumed = [(line["step"], line["loss"], line["samples"], line["grad_norm"]) for line in lines()]
    ids = [line["ids"] for line in lines("ledger.jsonl")]
    final = tiny.state(tiny.newest(here / "output" / "ckpt"))
    assert tiny.numbers(here / "output" / "ckpt") == [5, 7, 10, 12]
    (here / "straight").mkdir()
    (here / "straight" / "text").symlink_to(here / "text")
    monkeypatch.chdir(here / "straight")
    assert train(SAVING, 12) == 0
    assert [(line["step"], line["loss"], line["samples"], line["grad_norm"]) for line in lines()] == resumed
    assert [line["ids"] for line in lines("ledger.jsonl")] == ids
    assert tiny.state(tiny.newest(here / "straight" / "output" / "ckpt")) == final


def test_b_weights_only(here: Path) -> None:
    assert train(SAVING, 7) == 0
    before = tiny.tree(here / "output" / "ckpt")
    assert train(B, 6) == 0
    assert [line["step"] for line in lines()] == [1, 2, 3, 4, 5, 6]
    assert lines()[0]["samples"] == [0, 4]
    assert tiny.numbers(here / "output" / "finetune_ckpt") == [5, 6]
    assert tiny.tree(here / "output" / "ckpt") == before
    # The same command again would start at step 0 into what it made: refused, with the ways on.
    assert train(B, 6) == 2


def test_c_another_global_batch_size(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train(SAVING, 10) == 0
    assert train(A, 8, batch=8) == 0
    told = capfd.readouterr().err
    assert "step 10 x 4 / 8 = 5" in told
    rows = [(line["step"], line["samples"]) for line in lines()][10:]
    assert rows == [(6, [40, 48]), (7, [48, 56]), (8, [56, 64])]
    assert tiny.common(tiny.newest(here / "output" / "ckpt")).consumed_samples == 64
