"""Adapters over a base: what is saved, what a resume needs, and that it is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import tiny
from torch import nn

from perdure.errors import CheckpointNotFoundError, MismatchError, PerdureError

LORA: dict[str, Any] = {"target_modules": ["first", "last"], "lora_rank": 2, "lora_b_std": 0.1, "lora_dropout": 0.1}
BASE_WEIGHTS = {"model:first.weight", "model:first.bias", "model:last.weight", "model:last.bias"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose weights the adapters lie on."""
    output = tmp_path_factory.mktemp("base")
    tiny.trainer(output, 5).train()
    return output / "checkpoint"


def fresh() -> nn.Module:
    """A model whose own draws the base must replace."""
    torch.manual_seed(99)
    return tiny.Net()


def run(output: Path, base: Path | str, steps: int, *, model: Any = fresh, lora: Any = LORA, **checkpoint: Any) -> Any:
    keys = {"base_load_path": str(base), "save_trainable_only": True, **checkpoint}
    sections: dict[str, Any] = {"checkpoint": keys}
    if lora is not None:
        sections["lora_config"] = lora
    made = tiny.trainer(output, steps, model=model, **sections)
    made.train()
    return made


def metadata(output: Path) -> dict[str, Any]:
    newest = tiny.newest(output / "checkpoint")
    found: dict[str, Any] = json.loads((Path(newest.path) / "metadata.json").read_text())
    return found


def test_an_adapter_resumes_in_every_bit_and_costs_its_own_size(base: Path, tmp_path: Path) -> None:
    whole = run(tmp_path / "a", base, 12)
    for stop in (3, 8, 12):
        parts = run(tmp_path / "b", base, stop)
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    assert tiny.same(tiny.weights(whole.model), tiny.weights(parts.model))
    saved = tiny.state(tiny.newest(tmp_path / "b" / "checkpoint"), "model")
    assert set(saved) == {f"model:{layer}.lora_{each}" for layer in ("first", "last") for each in "ab"}
    held = {f"model:{name}": value for name, value in tiny.weights(parts.model).items()}
    assert set(held) - set(saved) == BASE_WEIGHTS
    described = metadata(tmp_path / "b")["training"]["base"]
    assert (described["path"], described["tensors"]) == (str(base / "iteration_00000005"), 4)


def test_the_base_is_what_is_trained_over(base: Path, tmp_path: Path) -> None:
    made = run(tmp_path, base, 2)
    for name, digest in tiny.state(tiny.newest(base), "model").items():
        other = tmp_path / "again"
        run(other, base, 2, save_trainable_only=False)
        assert tiny.state(tiny.newest(other / "checkpoint"), "model")[name] == digest
    assert not made.model.first.weight.requires_grad


def test_a_base_is_known_by_its_contents_wherever_and_however_it_lies(base: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", base, 3)
    model = fresh()
    from perdure import CheckpointConfig, Checkpointer

    given = CheckpointConfig(load_path=str(base), no_load_optim=True, enable_save=False)
    Checkpointer(given, model=model, say=lambda line: None).load()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    save_file(model.state_dict(), moved / "model.safetensors")
    (moved / "config.json").write_text("{}")
    run(tmp_path / "a", moved, 6)
    run(tmp_path / "b", base, 6)
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")

    with torch.no_grad():
        model.last.bias.add_(1e-3)
    save_file(model.state_dict(), moved / "model.safetensors")
    with pytest.raises(MismatchError, match="another base") as raised:
        run(tmp_path / "a", moved, 7)
    assert "base_load_path" in str(raised.value.hint)


def test_without_its_base_or_without_an_adapter_a_resume_says_what_is_missing(base: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", base, 3)
    with pytest.raises(MismatchError, match="an adapter without the weights below it") as raised:
        run(tmp_path / "a", "", 5, save_trainable_only=False)
    assert f"base_load_path={base}" in str(raised.value.hint)
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        run(tmp_path / "a", tmp_path / "gone", 5)
    with pytest.raises(MismatchError, match="4 tensors of the model are not in the checkpoint") as raised:
        run(tmp_path / "b", "", 5, save_trainable_only=False, load_path=str(base))
    assert "base_load_path" in str(raised.value.hint)
    with pytest.raises(PerdureError, match="base_load_path"):
        run(tmp_path / "c", "", 5)
    # An adapter is no base either.
    with pytest.raises(MismatchError, match="an adapter without"):
        run(tmp_path / "d", tmp_path / "a" / "checkpoint", 5)


def frozen_first() -> nn.Module:
    net = fresh()
    net.get_submodule("first").requires_grad_(False)
    return net


def test_plain_frozen_parameters_are_a_base_too(base: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", base, 9, model=frozen_first, lora=None)
    for stop in (4, 9):
        run(tmp_path / "b", base, stop, model=frozen_first, lora=None)
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    saved = tiny.state(tiny.newest(tmp_path / "b" / "checkpoint"), "model")
    assert set(saved) == {"model:last.weight", "model:last.bias"}


def test_what_was_trained_and_is_frozen_now_is_not_the_bases(base: Path, tmp_path: Path) -> None:
    trained = run(tmp_path, base, 4, model=frozen_first, lora=None)

    def all_frozen_but_bias() -> nn.Module:
        net = frozen_first()
        net.get_parameter("last.weight").requires_grad_(False)
        return net

    kept = tiny.weights(trained.model)["last.weight"]
    for stop in (6, 8):
        later = run(tmp_path, base, stop, model=all_frozen_but_bias, lora=None)
    assert torch.equal(tiny.weights(later.model)["last.weight"], kept)
    assert set(tiny.state(tiny.newest(tmp_path / "checkpoint"), "model")) == {"model:last.weight", "model:last.bias"}
    # And the other way round: a layer of the base that is trained from now on.
    more = run(tmp_path, base, 10, model=fresh, lora=None)
    assert not torch.equal(tiny.weights(more.model)["first.weight"], tiny.weights(later.model)["first.weight"])
    assert set(tiny.state(tiny.newest(tmp_path / "checkpoint"), "model")) == BASE_WEIGHTS
    assert "base" not in metadata(tmp_path)["training"]


def test_saving_all_and_saving_adapters_may_follow_each_other(base: Path, tmp_path: Path) -> None:
    straight = run(tmp_path / "a", base, 12)
    run(tmp_path / "b", base, 4)
    run(tmp_path / "b", base, 8, save_trainable_only=False)
    assert set(tiny.state(tiny.newest(tmp_path / "b" / "checkpoint"), "model")) > BASE_WEIGHTS
    last = run(tmp_path / "b", base, 12)
    assert BASE_WEIGHTS.isdisjoint(tiny.state(tiny.newest(tmp_path / "b" / "checkpoint"), "model"))
    assert tiny.same(tiny.weights(straight.model), tiny.weights(last.model))


def test_a_peft_model_trains_over_the_unwrapped_base(base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def wrapped() -> nn.Module:
        net = fresh()
        return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["first", "last"], lora_dropout=0.1))

    run(tmp_path / "a", base, 9, model=wrapped, lora=None)
    for stop in (4, 9):
        made = run(tmp_path / "b", base, stop, model=wrapped, lora=None)
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    saved = tiny.state(tiny.newest(tmp_path / "b" / "checkpoint"), "model")
    assert len(saved) == 4
    assert all("lora_" in name for name in saved)
    given = tiny.weights(made.model)["base_model.model.first.base_layer.weight"]
    assert not torch.equal(given, fresh().get_parameter("first.weight"))
