"""The network of the fixtures, in torch: five bfloat16 tensors and one float32 norm; and roots to load from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.optim.build import build_optimizer

FIXTURES = Path(__file__).parents[1] / "golden" / "mindformers"
SHAPES = {
    "embedding.word_embeddings.weight": (32, 16),
    "decoder.layers.0.input_layernorm.weight": (16,),
    "decoder.layers.0.mlp.linear_fc1.weight": (24, 16),
    "decoder.layers.0.mlp.linear_fc1.bias": (24,),
    "decoder.layers.0.mlp.linear_fc2.weight": (16, 24),
    "output_layer.weight": (32, 16),
}
ADAMW = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


class Toy(nn.Module):
    """Parameters by their dotted names; `low` names the dtype of all but the norm."""

    def __init__(self, low: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            dtype = torch.float32 if "layernorm" in name else low
            place: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(place, step):
                    place.add_module(step, nn.Module())
                place = getattr(place, step)
            place.register_parameter(last, nn.Parameter(torch.full(shape, 7.0, dtype=dtype)))

    def forward(self, input_ids: Tensor) -> Tensor:
        tensors = {name: parameter.float() for name, parameter in self.named_parameters()}
        x = tensors["embedding.word_embeddings.weight"][input_ids] * tensors["decoder.layers.0.input_layernorm.weight"]
        up = x @ tensors["decoder.layers.0.mlp.linear_fc1.weight"].T + tensors["decoder.layers.0.mlp.linear_fc1.bias"]
        x = x + torch.tanh(up) @ tensors["decoder.layers.0.mlp.linear_fc2.weight"].T
        return x @ tensors["output_layer.weight"].T


class Words(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Forty samples of eight token ids, each a function of its index."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (torch.arange(8) * 5 + index) % 32
        return {"input_ids": ids, "labels": ids.roll(-1)}


def optimizer_of(model: nn.Module, lr: float = 0.01) -> Any:
    return build_optimizer(ADAMW, model, lr=lr)


def truth(folder: str, iteration: str = "iteration_00000006") -> dict[str, Tensor]:
    """The unsharded tensors of the single-device fixture, read by a parser of its own: name -> tensor."""
    found: dict[str, Tensor] = {}
    for file in (FIXTURES / folder / iteration).glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            raw = bytearray(data[8 + length + begin : 8 + length + end])
            dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}[entry["dtype"]]
            found[name] = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(entry["shape"])
    return found


def copied(folder: str, target: Path) -> Path:
    """A fixture's root, to be spoilt."""
    return Path(shutil.copytree(FIXTURES / folder, target / "root"))


def hazard(name: str, tmp_path: Path) -> Path:
    """A root as a bad situation left it, with the folders that were empty."""
    if not (FIXTURES / "hazards" / name).exists():
        (tmp_path / "root").mkdir()
    else:
        shutil.copytree(FIXTURES / "hazards" / name, tmp_path / "root")
    empty = {"sync_save_failed_swallowed": (2, 4), "overwrite_failed_good_copy_gone": (4,)}
    for number in empty.get(name, ()):
        (tmp_path / "root" / f"iteration_{number:08d}").mkdir()
    return tmp_path / "root"


def load(path: Path | str, model: nn.Module, optimizer: Any, tmp_path: Path, **settings: Any) -> Any:
    """A checkpointer that has loaded `path`, with (progress, warnings)."""
    said: list[str] = []
    config = CheckpointConfig(load_path=str(path), save_path=str(tmp_path / "out"), **settings)
    options: dict[str, Any] = {"restore_settings": False, "tell_loads": False, "say": said.append}
    with Checkpointer(config, model=model, optimizer=optimizer, **options) as keeper:
        progress = keeper.load()
        return progress, keeper.loaded, said


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.detach().cpu(), b.detach().cpu())


def adamw_by_hand(
    weight: np.ndarray[Any, Any],
    gradient: np.ndarray[Any, Any],
    m: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    step: int,
    *,
    lr: float,
    decay: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Their AdamW in float64: decay first, then moments, bias correction, update; `step` counts from 1."""
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    weight = weight * (1 - lr * decay)
    m = beta1 * m + (1 - beta1) * gradient
    v = beta2 * v + (1 - beta2) * gradient * gradient
    corrected = np.sqrt(v) / np.sqrt(1 - beta2**step) + eps
    return weight - lr / (1 - beta1**step) * m / corrected, m, v
