"""Runs whose precision, parameters or names change between starts: what is exact stays exact, the rest is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from perdure import Trainer
from perdure.optim.build import build_optimizer

Told = pytest.CaptureFixture[str]


def root_of(output: Path) -> Path:
    return output / "checkpoint"


def of(dtype: torch.dtype) -> Any:
    return lambda: tiny.Net().to(dtype)


def without_masters(model: nn.Module) -> Any:
    return build_optimizer({}, model, lr=0.01, master_weights=False)


def masters(made: Any) -> dict[str, Tensor]:
    names = {p: name for name, p in made.model.named_parameters()}
    return {names[p]: master for p, master in made.optimizer.main_params().items()}


class Look(tiny.Callback):
    """What there is right after the load."""

    def on_train_begin(self, trainer: Any, state: Any) -> None:
        self.weights = tiny.weights(trainer.model)
        held = masters(trainer) if hasattr(trainer.optimizer, "main_params") else {}
        self.masters = {name: value.clone() for name, value in held.items()}


def goes_on(output: Path, steps: int, **keys: Any) -> Look:
    look = Look()
    tiny.trainer(output, steps, callbacks=(look,), **keys).train()
    return look


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_from_float32_masters_take_the_exact_weights(tmp_path: Path, capfd: Told, dtype: torch.dtype) -> None:
    first = tiny.trainer(tmp_path, 5)
    first.train()
    exact = tiny.weights(first.model)  # type: ignore[arg-type]
    look = goes_on(tmp_path, 6, model=of(dtype))
    assert tiny.same(look.masters, exact)
    assert tiny.same(look.weights, {name: value.to(dtype) for name, value in exact.items()})
    assert "4 FP32 masters took the exact values of float32 weights: first.weight" in capfd.readouterr().err


def test_to_float32_parameters_take_the_exact_masters(tmp_path: Path, capfd: Told) -> None:
    first = tiny.trainer(tmp_path, 5, model=of(torch.bfloat16))
    first.train()
    exact = {name: value.clone() for name, value in masters(first).items()}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in exact.values())
    look = goes_on(tmp_path, 6)
    assert tiny.same(look.weights, exact)
    assert "4 float32 parameters took the exact values of FP32 masters" in capfd.readouterr().err


def test_from_one_half_to_the_other_parameters_are_the_rounding_of_their_masters(tmp_path: Path, capfd: Told) -> None:
    first = tiny.trainer(tmp_path, 5, model=of(torch.bfloat16))
    first.train()
    exact = {name: value.clone() for name, value in masters(first).items()}
    look = goes_on(tmp_path, 6, model=of(torch.float16))
    assert tiny.same(look.masters, exact)
    assert tiny.same(look.weights, {name: value.half() for name, value in exact.items()})
    assert "rounded anew from their FP32 masters" in capfd.readouterr().err


def test_what_was_never_kept_exactly_is_told(tmp_path: Path, capfd: Told) -> None:
    low = of(torch.bfloat16)
    first = tiny.trainer(tmp_path, 5, model=low, given_optimizer=without_masters)
    first.train()
    rounded = tiny.weights(first.model)  # type: ignore[arg-type]
    second = goes_on(tmp_path, 6)
    assert tiny.same(second.weights, {name: value.float() for name, value in rounded.items()})
    assert "come from rounded weights without FP32 masters" in capfd.readouterr().err


def test_masters_that_are_not_in_the_checkpoint_take_the_weights_and_are_named(tmp_path: Path, capfd: Told) -> None:
    low = of(torch.bfloat16)
    first = tiny.trainer(tmp_path, 5, model=low, given_optimizer=without_masters)
    first.train()
    rounded = tiny.weights(first.model)  # type: ignore[arg-type]
    look = goes_on(tmp_path, 6, model=low)
    assert tiny.same(look.masters, {name: value.float() for name, value in rounded.items()})
    assert "4 FP32 masters were not in the checkpoint and took the weights: first.weight" in capfd.readouterr().err


def test_a_frozen_parameters_master_comes_back_in_every_bit(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        net = of(torch.bfloat16)()
        net.get_submodule("first").requires_grad_(False)
        return net  # type: ignore[no-any-return]

    first = tiny.trainer(tmp_path, 5, model=of(torch.bfloat16))
    first.train()
    exact = masters(first)["first.weight"].clone()
    tiny.trainer(tmp_path, 7, model=frozen).train()
    look = goes_on(tmp_path, 8, model=of(torch.bfloat16))
    assert torch.equal(look.masters["first.weight"], exact)


def test_a_parameter_that_moved_between_groups_is_told(tmp_path: Path, capfd: Told) -> None:
    tiny.trainer(tmp_path, 5).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, 6, optimizer={"weight_decay_exclude": ["last.weight"]}).train()
    told = capfd.readouterr().err
    assert "1 parameters are in another group than before: last.weight (decay -> no_decay)" in told
    tiny.trainer(tmp_path, 7, optimizer={"weight_decay_exclude": ["last.weight"]}).train()
    assert "in another group" not in capfd.readouterr().err


class Renamed(nn.Module):
    """The tiny network after its author has given its first layer another name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.encoder.first(x))))
        return out


@pytest.mark.parametrize("verify", ["inline", "first"])
def test_renamed_parameters_go_on_by_a_rule_exactly(tmp_path: Path, verify: str) -> None:
    tiny.trainer(tmp_path / "a", 12, callbacks=(tiny.Recorder(),)).train()
    tiny.trainer(tmp_path / "b", 5, callbacks=(tiny.Recorder(),)).train()
    rule = {"rename": [["^first\\.", "encoder.first."]], "verify_on_load": verify}
    for stop in (8, 12):
        tiny.trainer(tmp_path / "b", stop, model=Renamed, checkpoint=rule, callbacks=(tiny.Recorder(),)).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    a, b = (tiny.state(tiny.newest(root_of(tmp_path / name))) for name in "ab")
    assert {name.replace("encoder.", ""): digest for name, digest in b.items()} == a
    described = json.loads((Path(tiny.newest(root_of(tmp_path / "b")).path) / "metadata.json").read_text())
    assert "encoder.first.weight" in str(described["training"]["optimizer"]["groups"])


def compiled() -> Any:
    return torch.compile(tiny.Net().bfloat16(), backend="aot_eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_resumes_in_every_bit_under_the_bare_ones_names(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 9, model=compiled).train()
    for stop in (4, 9):
        tiny.trainer(tmp_path / "b", stop, model=compiled).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    a, b = (tiny.state(tiny.newest(root_of(tmp_path / name))) for name in "ab")
    assert a == b
    assert not any("_orig_mod" in name for name in a)
    tiny.trainer(tmp_path / "b", 10, model=of(torch.bfloat16)).train()


DECODER = {
    "type": "decoder", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.2,
    "params_dtype": "bfloat16",
}  # fmt: skip


def decoder_run(output: Path, steps: int, recompute: dict[str, Any]) -> None:
    data = {"type": "Text", "path": "python-docs", "seq_length": 16, "shuffle": True}
    config = {
        **tiny.config(output, steps),
        "model": DECODER,
        "train_dataset": {"num_parallel_workers": 0, "dataloader": data},
        "recompute": recompute,
    }
    Trainer(config).train()


def test_recomputed_activations_change_no_bit_of_a_run(tmp_path: Path) -> None:
    decoder_run(tmp_path / "a", 8, {})
    decoder_run(tmp_path / "b", 3, {"mode": "full", "full_recompute_layer": [0, 1]})
    decoder_run(tmp_path / "b", 5, {})
    decoder_run(tmp_path / "b", 8, {"mode": "full", "full_recompute_layer": [0, 1]})
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    a, b = (tiny.state(tiny.newest(root_of(tmp_path / name))) for name in "ab")
    assert a == b
