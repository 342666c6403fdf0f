"""Weights in Hugging Face's layout start a run here: one file or many, tied weights, names by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.foreign.toy import FIXTURES, Toy, equal, load, optimizer_of, truth
from torch import Tensor

from perdure.config.schema import CheckpointConfig
from perdure.errors import ConfigError, DamagedCheckpointError, MismatchError
from perdure.models.decoder import Decoder

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RULES = ["huggingface-to-decoder"]


def theirs(model: Decoder) -> dict[str, Tensor]:
    """A state dictionary under Hugging Face's names, tied weights once."""
    return {(n if n.startswith("lm_head") else f"model.{n}"): p.detach().clone() for n, p in model.named_parameters()}


def write(directory: Path, tensors: dict[str, Tensor], files: int = 1) -> Path:
    directory.mkdir()
    if files == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    places = {name: f"model-{n % files + 1:05d}-of-{files:05d}.safetensors" for n, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, directory / file, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_in_and_the_run_starts_at_step_0(files: int, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = Decoder(**SIZES, tie_word_embeddings=tied)
    directory = write(tmp_path / "hf", theirs(source), files)
    torch.manual_seed(2)
    model = Decoder(**SIZES, tie_word_embeddings=tied)
    progress, loaded, _ = load(directory, model, None, tmp_path, no_load_optim=True, rename=RULES)
    assert progress.global_step == 0
    assert loaded.weights_only
    for (name, parameter), (_, want) in zip(model.named_parameters(), source.named_parameters(), strict=True):
        assert equal(parameter, want), name


def test_without_rules_the_likely_cause_is_told(tmp_path: Path) -> None:
    model = Decoder(**SIZES)
    directory = write(tmp_path / "hf", theirs(model))
    with pytest.raises(MismatchError, match="does not fit the model; nothing was loaded"):
        load(directory, model, None, tmp_path, no_load_optim=True)


def test_a_full_resume_from_weights_is_refused_with_the_switch(tmp_path: Path) -> None:
    model = Decoder(**SIZES)
    directory = write(tmp_path / "hf", theirs(model))
    with pytest.raises(MismatchError, match="no optimizer state") as caught:
        load(directory, model, torch.optim.AdamW(model.parameters()), tmp_path, rename=RULES)
    assert "no_load_optim=True" in str(caught.value.hint)


def test_a_missing_file_of_many_is_named(tmp_path: Path) -> None:
    model = Decoder(**SIZES)
    directory = write(tmp_path / "hf", theirs(model), 3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"model-00002-of-00003\.safetensors: missing"):
        load(directory, model, None, tmp_path, no_load_optim=True, rename=RULES)


def test_pickled_weights_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    model = Decoder(**SIZES)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "hf", model, None, tmp_path, no_load_optim=True)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_fused_tensor_fills_its_parts_moments_and_masters_too(groups: int, tmp_path: Path) -> None:
    """Their toy's linear_fc1 of 24 rows read as gate and up, contiguous or kept together in groups."""
    half = 24 // groups // 2
    into = [r"\1gate.\2", r"\1up.\2"]
    rule = {"split": r"(.*\.mlp\.)linear_fc1\.(weight|bias)", "into": into, "rows": [half, half]}
    model = Toy()
    mlp = model.decoder.layers.get_submodule("0").mlp  # type: ignore[union-attr,operator]
    del mlp.linear_fc1
    for name in ("gate", "up"):
        part = torch.nn.Module()
        part.weight = torch.nn.Parameter(torch.zeros(12, 16, dtype=torch.bfloat16))
        part.bias = torch.nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
        mlp.add_module(name, part)
    optimizer = optimizer_of(model)
    load(FIXTURES / "dist4_fsdp2_tp2", model, optimizer, tmp_path, rename=[rule])
    tensors = truth("single_bf16_adamw")
    rows = torch.arange(24).reshape(groups, 2, half)
    for number, name in enumerate(("gate", "up")):
        for last in ("weight", "bias"):
            parameter = getattr(mlp.get_submodule(name), last)
            fused, picked = f"decoder.layers.0.mlp.linear_fc1.{last}", rows[:, number].flatten()
            assert equal(parameter, tensors[fused][picked])
            assert equal(optimizer.state[parameter]["exp_avg"], tensors[f"adam_m.{fused}"][picked])
            assert equal(optimizer.main_param_of(parameter), tensors[f"main_param.{fused}"][picked])


def test_a_rule_that_cannot_be_meant_is_a_fault_of_the_configuration() -> None:
    with pytest.raises((ConfigError, ValueError), match="rule 1"):
        CheckpointConfig(rename=[["(", "x"]])
