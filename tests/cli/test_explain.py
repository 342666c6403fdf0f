"""explain: what it says is what train then does, and nothing is touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.foreign.toy import FIXTURES

from perdure.catalog.root import Root
from perdure.cli.main import run
from perdure.config.load import load_config
from perdure.models.decoder import Decoder
from perdure.train.explain import explain
from perdure.train.history import read_lines
from perdure.train.trainer import Trainer

CONFIG = """
training: {steps: 12, local_batch_size: 1, global_batch_size: 4}
model: {type: decoder, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 0.001, warmup_steps: 2, total_steps: 12}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 16, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 3}
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run stopped at step 8, with saves at 3, 6 and 8."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Trainer(load_config("run.yaml", ["training.steps=8"])).train()
    return tmp_path / "output" / "checkpoint"


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below, with the time of its last change."""
    return {
        str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))
    }


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert run(["explain", "run.yaml", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.global_batch_size=8"],
        ["training.global_batch_size=3", "training.local_batch_size=3"],
        ["lr_scheduler.learning_rate=0.5", "lr_scheduler.by=samples"],
        ["checkpoint.auto_resume=false", "checkpoint.load_path=output/checkpoint/iteration_00000003",
         "checkpoint.save_path=new", "output_dir=new"],
        ["checkpoint.auto_resume=false", "checkpoint.load_path=output/checkpoint", "checkpoint.no_load_optim=true",
         "checkpoint.save_path=new", "output_dir=new"],
        ["output_dir=new"],
    ],
    ids=["plain", "twice the batch", "not whole", "by samples", "one named", "weights", "fresh"],
)  # fmt: skip
def test_a_start_does_what_was_said(
    words: list[str], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(tmp_path)
    said = told(capsys, *words)
    assert everything(tmp_path) == before
    trainer = Trainer(load_config("run.yaml", words))
    trainer.train()
    loaded = trainer.checkpointer.loaded
    assert said["problems"] == []
    assert said["source"] == ("" if loaded is None else loaded.path)
    assert said["reads"] == ([] if loaded is None else [loaded.bytes_read])
    lines = [line for line in read_lines(str(Path(trainer.config.output_dir) / "metrics.jsonl")) if "loss" in line]
    mine = [line for line in lines if line["attempt"] == trainer.state.attempt]
    assert mine[0]["step"] == said["step"] + 1
    assert mine[0]["samples"] == said["next_samples"]
    assert mine[0]["learning_rate"] == said["rate"]
    assert said["step"] + len(mine) == 12
    if words == []:
        (before_it,) = {line["learning_rate"] for line in lines if line["step"] == said["step"]}
        assert before_it == said["rate_before"]


def test_the_arithmetic_is_shown(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "run.yaml", "training.global_batch_size=8"]) == 0
    out, err = capsys.readouterr()
    for text in (
        "resume of",
        "iteration_00000008",
        "the tracker names it, and none was saved later",
        "4 of 12 done, 8 remain",
        "step 8 x 4 / 8 = 4",
        "samples 32 to 39 of the stream",
        "training.global_batch_size: 4 -> 8",
        "1 rank",
        "are free below",
    ):
        assert text in out
    assert "training.steps is not scaled" in err


def test_why_a_newer_one_is_not_taken(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rewind", "output/checkpoint", "--to", "6"]) == 0
    said = told(capsys)
    assert said["source"].endswith("iteration_00000006")
    assert "saved later and not taken was iteration_00000008" in said["why"]
    os.mkdir(trained / ".iteration_00000009.partial-ab-9")
    assert said["not_counted"] == []
    assert [name for name, _ in told(capsys)["not_counted"]] == [".iteration_00000009.partial-ab-9"]


def test_damage_that_shows_is_gone_round_as_a_start_would(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = (trained / "iteration_00000008").glob("*-model-*")
    file.write_bytes(file.read_bytes()[:-1])
    before = everything(trained)
    said = told(capsys)
    assert said["source"].endswith("iteration_00000006")
    assert any("goes back to iteration_00000006" in warning for warning in said["warnings"])
    assert everything(trained) == before
    assert told(capsys, "checkpoint.on_corrupt=error", code=1)["source"] == ""


@pytest.mark.parametrize(
    "words",
    [
        ["training.seed=3"],
        ["model.hidden_size=32"],
        ["optimizer.type=SGD"],
        ["train_dataset.dataloader.shuffle=false"],
        ["checkpoint.auto_resume=false"],
        ["checkpoint.auto_resume=false", "checkpoint.load_path=nowhere"],
        ["checkpoint.load_path=output/checkpoint/iteration_00000003"],
        ["train_dataset.dataloader.path=nowhere"],
        ["training.local_batch_size=3"],
    ],
    ids=lambda words: words[-1],
)
def test_what_would_fail_is_said_as_the_start_would_say_it(
    words: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["train", "run.yaml", *words])
    assert code not in (0, None)
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert run(["explain", "run.yaml", *words]) == code
    assert error.removeprefix("error: ") in capsys.readouterr().err


def test_ranks_are_told_apart(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = told(capsys)
    parts = told(capsys, "--ranks", "3", "training.global_batch_size=3")
    assert parts["layout"] == {"ranks": 3, "shard": 3}
    assert (parts["layout_before"], len(parts["reads"])) == ({"ranks": 1}, 3)
    assert sum(parts["held"]) == whole["held"][0]
    assert len(set(parts["held"])) > 1
    copies = told(capsys, "--ranks", "2", "parallelism.data_parallel_replicate=2")
    assert copies["held"] == whole["held"] * 2
    cut = told(capsys, "--ranks", "2", "parallelism.tensor_parallel=2", "parallelism.sequence_parallel=true")
    assert max(cut["held"]) < whole["held"][0] < sum(cut["held"])
    refused = told(capsys, "--ranks", "3", code=2)
    assert "global_batch_size" in refused["problems"][0]["message"]


def test_a_root_of_mindformers(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint.auto_resume=false", f"checkpoint.load_path={FIXTURES / 'dist4_fsdp2_tp2'}"]
    said = told(capsys, *words, "checkpoint.save_path=new", "training.global_batch_size=8", code=1)
    assert (said["made_by"], said["saved"]["ranks"]) == ("MindSpore Transformers", 4)
    # Of another model; the position is told all the same.
    assert "does not fit the model" in said["problems"][0]["message"]
    assert (said["step"], said["next_samples"]) == (3, [24, 32])


def test_a_directory_of_weights(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkdir("hf")
    model = Decoder(vocab_size=257, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    save_file(dict(model.named_parameters()), "hf/model.safetensors")
    words = ["checkpoint.auto_resume=false", "checkpoint.load_path=hf", "checkpoint.save_path=new"]
    assert "no optimizer state" in told(capsys, *words, code=1)["problems"][0]["message"]
    said = told(capsys, *words, "checkpoint.no_load_optim=true")
    assert (said["start"], said["made_by"], said["step"]) == ("weights only", "Hugging Face", 0)
    assert said["reads"] == said["held"] == [sum(p.numel() * p.element_size() for p in model.parameters())]
    renamed = {f"x.{name}": p for name, p in model.named_parameters()}
    save_file(renamed, "hf/model.safetensors")
    failed = told(capsys, *words, "checkpoint.no_load_optim=true", code=1)["problems"][0]
    assert "x.embed_tokens.weight" in failed["message"]
    renaming = told(capsys, *words, "checkpoint.no_load_optim=true", r"checkpoint.rename=[['^x\.', '']]")
    assert renaming["reads"] == said["reads"]


def test_a_large_model_costs_no_memory(trained: Path) -> None:
    config = load_config("run.yaml", ["model.hidden_size=16384", "model.num_attention_heads=128", "output_dir=new"])
    said = explain(config, ranks=2)
    assert said.problems == []
    assert min(said.held) > 8 << 30
    assert not torch.distributed.is_initialized()
    assert Root("new/checkpoint").iterations() == []


def test_steps_without_a_rate_are_told_beforehand(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not [w for w in told(capsys)["warnings"] if "rate is 0" in w]
    (warning,) = [w for w in told(capsys, "training.steps=20")["warnings"] if "rate is 0" in w]
    assert "from step 13 to the last, 20" in warning
