"""Low-rank adapters: their arithmetic, which layers get one, and that nothing else is trained or renamed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from perdure.config.schema import LoraConfig
from perdure.importing import KeyFaults
from perdure.models.decoder import Decoder
from perdure.models.lora import add_adapters


def decoder(**keys: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, **keys)


def lora(**keys: Any) -> LoraConfig:
    return LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "lora_b_std": 0.02, **keys})


def test_the_output_is_that_of_the_sum_of_both_matrices() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    plain = copy.deepcopy(net).double()
    add_adapters(net, lora(target_modules=["0", "2"], lora_rank=2, lora_alpha=6.0, lora_a_std=0.5, lora_b_std=0.5))
    for number in (0, 2):
        layer, low = plain[number], net[number]
        assert isinstance(layer, nn.Linear)
        with torch.no_grad():
            layer.weight += 3.0 * low.get_parameter("lora_b").double() @ low.get_parameter("lora_a").double()
    x = torch.randn(4, 6)
    torch.testing.assert_close(net(x).double(), plain(x.double()))


def test_a_new_adapter_changes_nothing_and_only_adapters_are_trained() -> None:
    model, tokens = decoder(), torch.arange(11)[None]
    before, names = model(tokens), set(model.state_dict())
    chosen = add_adapters(model, lora(lora_b_std=0.0))
    assert chosen == [f"layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qv"]
    assert torch.equal(model(tokens), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{name}.lora_{each}" for name in chosen for each in "ab"}
    assert set(model.state_dict()) == names | trained
    assert model.layers["0"].self_attn.q_proj.lora_a.shape == (8, 16)
    assert not model.layers["0"].self_attn.q_proj.lora_b.any()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"target_modules": ["layers.1.mlp.up_proj"]}, ["layers.1.mlp.up_proj"]),
        ({"target_modules": ["*.mlp.*"], "exclude_layers": ["layers.0"]},
         [f"layers.1.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]),
        ({"target_modules": ["o_proj"], "exclude_layers": ["*.1.*"]}, ["layers.0.self_attn.o_proj"]),
        ({"target_modules": ["lm_head", "k_proj"], "exclude_layers": ["k_proj", "x"]}, None),
    ],
)  # fmt: skip
def test_targets_and_exclusions_go_by_name(keys: dict[str, Any], expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(KeyFaults, match="`k_proj` is excluded"):
            add_adapters(decoder(), lora(**keys))
    else:
        assert add_adapters(decoder(), lora(**keys)) == expected


def test_a_target_that_matches_nothing_is_told_with_the_nearest_name() -> None:
    with pytest.raises(KeyFaults, match="did you mean q_proj") as raised:
        add_adapters(decoder(), lora(target_modules=["v_proj", "q_prj"]))
    assert [key for key, _ in raised.value.faults] == ["lora_config.target_modules[1]"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_take_the_layers_dtype_and_the_draws_of_float32(dtype: str) -> None:
    models = [decoder(), decoder(params_dtype=dtype)]
    for model in models:
        torch.manual_seed(5)
        add_adapters(model, lora())
    wide, low = (m.layers["1"].self_attn.v_proj.lora_b for m in models)
    assert low.dtype == getattr(torch, dtype)
    assert torch.equal(wide.to(low.dtype), low)


def test_dropout_is_for_training_alone_and_drawn_anew() -> None:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(8, 8))
    add_adapters(net, lora(target_modules=["0"], lora_dropout=0.5, lora_a_std=1.0, lora_b_std=1.0))
    x = torch.randn(2, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
