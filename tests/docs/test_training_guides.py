"""The guides to precision, health and adapters: every configuration in them is valid, every program runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.main import run
from perdure.config.load import load_config

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PAGES = ("precision.md", "health.md", "adapters.md")
BASE = "lr_scheduler: {type: ConstantWarmUpLR}\n"


def blocks(language: str) -> list[Any]:
    return [
        pytest.param(text, id=f"{page}-{number}")
        for page in PAGES
        for number, text in enumerate(
            re.findall(rf"```{language}\n(.*?)```", (GUIDES / page).read_text(encoding="utf-8"), re.S)
        )
    ]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + text)
    load_config(str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("code", blocks("python"))
def test_every_program_runs(code: str) -> None:
    exec(compile(code, "guide", "exec"), {"__name__": "__main__"})


def test_the_adapter_of_the_guide_trains_over_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "adapters.md").read_text(encoding="utf-8")
    lora, average = re.findall(r"```yaml\n(.*?)```", page, re.S)
    data = "{type: Text, path: python-docs, seq_length: 16, shuffle: true}"
    common = (
        BASE
        + "training: {steps: 2, local_batch_size: 2, global_batch_size: 2, eval_interleaved_steps: 1}\n"
        + f"train_dataset: {{num_parallel_workers: 0, dataloader: {data}}}\n"
        + f"eval_dataset: {{num_parallel_workers: 0, dataloader: {data}}}\n"
    )
    few = common.replace("eval_interleaved_steps: 1", "eval_interleaved_steps: 0")
    small = lora.replace("hidden_size: 256", "hidden_size: 16")
    base = "model: {type: decoder, hidden_size: 16}\ncheckpoint: {save_path: ./output/base}\n"
    Path("base.yaml").write_text(few + base)
    Path("adapter.yaml").write_text(few + small + average.replace("evaluate: true", "evaluate: false"))
    assert run(["train", "base.yaml"]) == 0
    assert run(["train", "adapter.yaml", "output_dir=./output/second"]) == 0
    assert run(["train", "adapter.yaml", "output_dir=./output/second", "training.steps=3"]) == 0
    assert Path("output/averaged/model.safetensors").is_file()
    assert run(["verify", "--read-data", "output/adapter"]) == 0
