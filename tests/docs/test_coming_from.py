"""The guide about other programs: every command in it runs, every configuration in it is one."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tests.foreign.toy import FIXTURES
from torch.distributed.checkpoint.state_dict import get_state_dict

from perdure.cli.main import run
from perdure.config.load import load_config
from perdure.format.rename import READY
from perdure.models.decoder import Decoder
from perdure.train.trainer import Trainer

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
RUN = """
training: {steps: 2, local_batch_size: 2, global_batch_size: 2}
model: {type: decoder, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 0.001}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 16, shuffle: true}}
checkpoint: {save_interleaved_steps: 2}
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)\n```", PAGE, re.S)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    Trainer("run.yaml").train()
    shutil.copytree(FIXTURES / "dist4_fsdp2_tp2", "theirs")
    model = Decoder(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save(model.state_dict(), "model.pt")
    weights: Any = get_state_dict(model, optimizer)
    dcp.save({"model": weights[0], "optimizer": weights[1]}, checkpoint_id="dcp", no_dist=True)
    Path("hf").mkdir()
    named = {(n if n.startswith("lm_head") else f"model.{n}"): p.detach() for n, p in model.named_parameters()}
    save_file(named, "hf/model.safetensors", {"format": "pt"})
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert len(lines) >= 8
    for line in lines:
        program, *words = shlex.split(line)
        assert program == "perdure"
        assert run(words) == 0, line


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_is_one(text: str, tmp_path: Path) -> None:
    lines = ["lr_scheduler: {type: ConstantWarmUpLR}", text]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    load_config(tmp_path / "run.yaml")


def test_every_ready_map_is_listed() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.M)) == set(READY)
