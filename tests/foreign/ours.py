"""Iterations of ours to be converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.foreign.toy import optimizer_of
from torch import nn

from perdure.cli.main import run
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.models.decoder import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def trained(low: bool = False, tied: bool = False) -> tuple[Decoder, Any]:
    """A model and an optimizer after two updates, with state."""
    torch.manual_seed(3)
    model = Decoder(**SIZES, tie_word_embeddings=tied, params_dtype="bfloat16" if low else "float32")
    optimizer = optimizer_of(model)
    for _ in range(2):
        model(torch.arange(6).reshape(1, 6)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(root: Path, model: nn.Module, optimizer: Any) -> Path:
    """One iteration of ours at step 2."""
    config = CheckpointConfig(save_path=str(root))
    with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as keeper:
        keeper.save(Progress(global_step=2, consumed_samples=14, global_batch_size=7), wait=True)
    return root / "iteration_00000002"


def perdure(*words: object) -> None:
    assert run([str(word) for word in words]) == 0
