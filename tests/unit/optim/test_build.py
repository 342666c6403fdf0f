"""Optimizers by name: groups by parameter names, keys by signature, arithmetic as torch's."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.config.schema import OptimizerConfig
from perdure.errors import UsageError
from perdure.importing import KeyFaults
from perdure.models.decoder import Decoder
from perdure.optim.build import build_optimizer, decays
from perdure.optim.masters import MixedPrecisionOptimizer
from perdure.optim.muon import MuonWithAdamW


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(torch.tanh(self.body(self.embed(ids)))))
        return out


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def names_of(optimizer: torch.optim.Optimizer) -> dict[str, list[str]]:
    return {group["name"]: group["param_names"] for group in optimizer.param_groups}


def faults_of(section: Any) -> dict[str, str]:
    with pytest.raises(KeyFaults) as caught:
        build_optimizer(section, net(), 1e-3)
    return dict(caught.value.faults)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        ids = torch.randint(0, 7, (2, 5), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_vectors_and_biases_do_not_decay() -> None:
    optimizer = build_optimizer({"type": "AdamW"}, net(), 1e-3)
    assert names_of(optimizer) == {
        "decay": ["embed.weight", "body.weight", "lm_head.weight"],
        "no_decay": ["body.bias", "norm.weight", "norm.bias"],
    }
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert all(group["lr"] == 1e-3 for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("name", "shape", "include", "exclude", "expected"),
    [
        ("a.weight", (2, 2), (), (), True),
        ("a.weight", (2,), (), (), False),
        ("a.scale", (), (), (), False),
        ("a.bias", (2, 2), (), (), False),
        ("bias", (2, 2), (), (), False),
        ("a.unbias", (2, 2), (), (), True),
        ("embed.weight", (2, 2), (), ("embed",), False),
        ("embed.weight", (2, 2), (), ("emb",), False),
        ("embed.weight", (2, 2), ("embed.weight",), ("embed",), True),
        ("layers.3.norm.weight", (2,), ("layers.*.norm.weight",), (), True),
        ("layers.3.norm.weight", (2,), ("norm.*",), (), False),
        ("layers.3.mlp.weight", (2, 2), (), ("layers.[0-2].*",), True),
    ],
)
def test_include_beats_exclude_beats_the_rule(
    name: str, shape: tuple[int, ...], include: tuple[str, ...], exclude: tuple[str, ...], expected: bool
) -> None:
    assert decays(name, torch.zeros(shape), include, exclude) is expected


def test_patterns_of_the_section_decide_the_groups() -> None:
    section = OptimizerConfig(weight_decay_include=["norm.weight"], weight_decay_exclude=["embed", "norm"])
    assert names_of(build_optimizer(section, net(), 1e-3)) == {
        "decay": ["body.weight", "norm.weight", "lm_head.weight"],
        "no_decay": ["embed.weight", "body.bias", "norm.bias"],
    }
    assert "not a list" in faults_of({"weight_decay_include": "norm"})["optimizer.weight_decay_include"]


def test_frozen_parameters_are_left_out_and_tied_ones_come_once() -> None:
    model = net()
    model.embed.weight.requires_grad = False
    every = [name for names in names_of(build_optimizer({}, model, 1e-3)).values() for name in names]
    assert "embed.weight" not in every
    model = net()
    model.lm_head.weight = model.embed.weight
    every = [name for names in names_of(build_optimizer({}, model, 1e-3)).values() for name in names]
    assert every.count("embed.weight") == 1
    assert "lm_head.weight" not in every
    with pytest.raises(UsageError, match="no parameter"):
        build_optimizer({}, net().requires_grad_(False), 1e-3)


def test_names_carry_no_wrapper_prefix() -> None:
    compiled = torch.compile(net(), backend="eager")
    assert names_of(build_optimizer({}, compiled, 1e-3)) == names_of(build_optimizer({}, net(), 1e-3))


@pytest.mark.parametrize("as_object", [False, True])
def test_the_references_defaults_go_to_those_that_take_them(as_object: bool) -> None:
    def build(**keys: Any) -> dict[str, Any]:
        section = OptimizerConfig(**keys) if as_object else keys
        return build_optimizer(section, net(), 1e-3).param_groups[0]

    assert build()["betas"] == (0.9, 0.95)
    assert build(type="Adam")["eps"] == 1e-8
    assert build(type="SGD")["weight_decay"] == 0.01
    assert build(type="Adafactor")["eps"] == (None, 1e-3)
    assert build(type="AdamW", betas=[0.8, 0.9], eps=1e-6)["betas"] == (0.8, 0.9)
    assert names_of(build_optimizer({"type": "Rprop"}, net(), 1e-3)).keys() == {"all"}


@pytest.mark.parametrize(
    "name",
    [
        "AdamW", "Adam", "SGD", "Adafactor", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
        "Rprop", "Muon",
    ],
)  # fmt: skip
def test_every_class_of_torch_optim_trains(name: str) -> None:
    model = net()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    after = train(model, build_optimizer({"type": name}, model, 1e-2))
    assert all(torch.isfinite(value).all() for value in after)
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("variant", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}])
def test_the_arithmetic_is_torchs_own(variant: dict[str, bool]) -> None:
    ours, theirs = net(), net()
    decaying = [p for p in theirs.parameters() if p.ndim > 1]
    plain = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, **variant)
    built = build_optimizer({"type": "AdamW", "weight_decay": 0.1, **variant}, ours, 1e-2)
    for one, other in zip(train(ours, built), train(theirs, expected), strict=True):
        assert torch.equal(one, other)


def test_a_factor_on_the_rate_makes_a_group() -> None:
    optimizer = build_optimizer({"lr_scale": {"embed": 0.1, "*.weight": 2.0}}, net(), 1e-2)
    rates = {group["name"]: (group["lr"], group.get("lr_ratio", 1.0)) for group in optimizer.param_groups}
    assert rates == {
        "decay lr×0.1": (1e-3, 0.1),
        "decay lr×2": (2e-2, 2.0),
        "no_decay lr×2": (2e-2, 2.0),
        "no_decay": (1e-2, 1.0),
    }
    assert "does not map" in faults_of({"lr_scale": {"embed": "small"}})["optimizer.lr_scale"]


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"type": "AdmW"}, "type", "did you mean Adam"),
        ({"type": "LBFGS"}, "type", "not supported"),
        ({"type": "AdamW", "beta": [0.9, 0.95]}, "beta", "did you mean betas?"),
        ({"type": "AdamW", "momentum": 0.9}, "momentum", "AdamW does not take it"),
        ({"type": "SGD", "betas": [0.9, 0.95]}, "betas", "SGD does not take it"),
        ({"type": "Muon", "betas": [0.9, 0.95]}, "betas", "did you mean adamw_betas?"),
        ({"type": "AdamW", "lr": 1e-3}, "lr", "lr_scheduler.learning_rate"),
        ({"type": "AdamW", "params": []}, "params", "cannot be set here"),
        ({"type": "Rprop", "weight_decay_exclude": ["x"]}, "weight_decay_exclude", "takes no weight_decay"),
        ({"type": "torch.nn:Linear", "in_features": 1}, "out_features", "requires it"),
        ({"type": "math:pi"}, "type", "cannot be called"),
    ],
)
def test_faults_are_told_at_their_keys(section: dict[str, Any], key: str, words: str) -> None:
    assert words in faults_of(section)[f"optimizer.{key}"]


def test_a_list_stands_for_the_tuple_that_a_class_wants() -> None:
    optimizer = build_optimizer({"type": "Adafactor", "eps": [None, 1e-4]}, net(), 1e-3)
    assert optimizer.param_groups[0]["eps"] == (None, 1e-4)


def test_settings_that_a_class_refuses_are_told() -> None:
    assert "Invalid beta" in faults_of({"type": "AdamW", "betas": [1.5, 0.9]})["optimizer"]


class Signs(torch.optim.Optimizer):
    """A third party's optimizer: steps by the sign of the gradient."""

    def __init__(self, parameters: Any, lr: float, strength: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr, "strength": strength})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["strength"])


def test_a_third_partys_class_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "their_optim", types.SimpleNamespace(Signs=Signs))
    model = net()
    before = model.body.weight.detach().clone()
    optimizer = build_optimizer({"type": "their_optim:Signs", "strength": 2.0}, model, 0.5)
    train(model, optimizer, steps=1)
    assert set((model.body.weight.detach() - before).abs().round(decimals=5).unique().tolist()) <= {0.0, 1.0}
    assert "did you mean strength?" in faults_of({"type": "their_optim:Signs", "strenght": 1})["optimizer.strenght"]


def test_low_precision_models_get_masters_and_others_do_not() -> None:
    narrow = build_optimizer({}, net(dtype=torch.bfloat16), 1e-3)
    assert isinstance(narrow, MixedPrecisionOptimizer)
    assert names_of(narrow) == names_of(build_optimizer({}, net(), 1e-3))
    assert isinstance(build_optimizer({}, net(), 1e-3), torch.optim.AdamW)
    assert isinstance(build_optimizer({}, net(dtype=torch.bfloat16), 1e-3, master_weights=False), torch.optim.AdamW)


def test_muon_takes_the_matrices_between_hidden_states() -> None:
    torch.manual_seed(0)
    model = Decoder(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    optimizer = build_optimizer({"type": "Muon", "adamw_include": ["mlp.up_proj"]}, model, 1e-3)
    assert isinstance(optimizer, MuonWithAdamW)
    groups = names_of(optimizer)
    assert sorted(name.removeprefix("layers.0.") for name in groups["muon decay"]) == [
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    ]
    assert groups["adamw decay"] == ["embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"]
    assert "norm.weight" in groups["adamw no_decay"]
