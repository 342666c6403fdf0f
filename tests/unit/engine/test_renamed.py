"""Parts and joins of tensors that have digests: the right rows, each block checked, whoever asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.catalog.root import Root
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.errors import DamagedCheckpointError

ROWS, WIDTH = 24, 200_000  # a tensor of several digest blocks


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.zeros(ROWS // 2, WIDTH))
        self.k = nn.Parameter(torch.zeros(ROWS // 4, WIDTH))
        self.v = nn.Parameter(torch.zeros(ROWS // 4, WIDTH))


SPLIT: dict[str, Any] = {"split": "qkv", "into": ["q", "k", "v"], "rows": [2, 1, 1]}
JOIN: dict[str, Any] = {"join": ["q", "k", "v"], "into": "qkv", "rows": [2, 1, 1]}


def save(root: Path, model: nn.Module) -> Path:
    with Checkpointer(CheckpointConfig(save_path=str(root)), model=model, say=lambda line: None) as keeper:
        keeper.save(Progress(1, 1, 1), wait=True)
    (iteration,) = Root(root).iterations()
    return Path(iteration.path)


def load(path: Path, model: nn.Module, rule: dict[str, Any], tmp_path: Path) -> None:
    config = CheckpointConfig(
        load_path=str(path), no_load_optim=True, save_path=str(tmp_path / "new"), rename=[rule], enable_save=False
    )
    with Checkpointer(config, model=model, say=lambda line: None) as keeper:
        keeper.load()


def parts_of(fused: Tensor) -> dict[str, Tensor]:
    """Groups of four rows: two of queries, one of keys, one of values."""
    groups = fused.detach().reshape(ROWS // 4, 4, WIDTH)
    return {name: groups[:, rows].reshape(-1, WIDTH) for name, rows in (("q", [0, 1]), ("k", [2]), ("v", [3]))}


def test_a_tensor_of_ours_is_split_and_every_block_of_it_checked(tmp_path: Path) -> None:
    fused = Fused()
    iteration = save(tmp_path / "fused", fused)
    model = Parts()
    load(iteration, model, SPLIT, tmp_path)
    assert all(torch.equal(model.get_parameter(n), want) for n, want in parts_of(fused.qkv).items())
    (file,) = iteration.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match="is not what was written"):
        load(iteration, Parts(), SPLIT, tmp_path)


def test_tensors_of_ours_are_joined_group_by_group(tmp_path: Path) -> None:
    want = Fused()
    parts = Parts()
    for name, value in parts_of(want.qkv).items():
        parts.get_parameter(name).data.copy_(value)
    iteration = save(tmp_path / "parts", parts)
    model = Fused()
    model.qkv.data.zero_()
    load(iteration, model, JOIN, tmp_path)
    assert torch.equal(model.qkv, want.qkv)
