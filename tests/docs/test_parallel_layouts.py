"""The guide to parallel layouts: its configurations load, and its model trains in a pipeline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import forked
from torch import Tensor, nn

from perdure import Trainer
from perdure.config.load import load_config, load_config_mapping

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "parallel-layouts.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_configuration_loads(tmp_path: Path, block: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"lr_scheduler: {{type: ConstantWarmUpLR}}\n{block}")
    load_config(str(path))


def test_the_model_trains_in_a_pipeline(tmp_path: Path) -> None:
    (block,) = blocks("python")
    names: dict[str, Any] = {}
    exec(block, names)
    torch.manual_seed(0)
    model = names["Tower"]()

    def work(rank: int) -> None:
        state = Trainer(configured, model=model, train_dataset=data, compute_loss_func=loss).train()
        assert state.global_step == 3

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    configured = load_config_mapping(
        {
            "training": {"steps": 3, "global_batch_size": 4},
            "lr_scheduler": {"type": "ConstantWarmUpLR"},
            "train_dataset": {"num_parallel_workers": 0},
            "parallelism": {"pipeline_parallel": 2},
            "output_dir": str(tmp_path / "output"),
        }
    )
    assert forked.job(tmp_path, 2, work) == [0, 0], forked.told(tmp_path)
