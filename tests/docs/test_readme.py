"""What the README shows is true: its YAML is a configuration, its loop trains and resumes."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from perdure.cli.main import run
from perdure.config.load import load_config
from perdure.train.trainer import Trainer

ROOT = Path(__file__).parents[2]


def blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def test_the_yaml_is_a_configuration(tmp_path: Path) -> None:
    (shown,) = blocks("yaml")
    path = tmp_path / "run.yaml"
    path.write_text(shown, encoding="utf-8")
    assert load_config(str(path)).checkpoint.auto_resume


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("yaml")
    for large, small in (
        ("steps: 2000", "steps: 2"),
        ("hidden_size: 256, num_hidden_layers: 4", "hidden_size: 16, num_hidden_layers: 1"),
        ("seq_length: 256", "seq_length: 16"),
    ):
        assert large in shown
        shown = shown.replace(large, small)
    Path("run.yaml").write_text(shown, encoding="utf-8")
    Trainer("run.yaml").train()
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("perdure ")]
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [c[0] for c in commands] == ["train", "train", "explain", "ls", "verify", "data", "bench", "export"]
    for command in commands:
        if command[0] not in ("train", "bench"):  # a real model, and a minute
            assert run(command) == 0, command


def test_the_loop_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = blocks("python")
    dataset = [torch.tensor([float(i)]) for i in range(100)]
    positions: list[int] = []

    def run(total_steps: int) -> None:
        model = nn.Linear(1, 1)
        names: dict[str, object] = {
            "dataset": dataset,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "total_steps": total_steps,
            "train_step": lambda batch: positions.append(batch.first),
        }
        exec(shown, names)

    run(1001)  # saves at 1000
    run(1003)
    assert positions == [*(64 * step for step in range(1001)), 64 * 1000, 64 * 1001, 64 * 1002]


def test_the_own_loop_of_the_examples_resumes(tmp_path: Path) -> None:
    train = runpy.run_path(str(ROOT / "examples" / "minimal.py"))["train"]
    first = train(str(tmp_path / "out"))
    assert (tmp_path / "out" / "iteration_00000200" / "commit.json").exists()
    assert first < 1.0
