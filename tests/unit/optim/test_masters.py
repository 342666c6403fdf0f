"""FP32 masters: the arithmetic is float32's, the model holds the rounding, nothing is guessed."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.errors import UsageError
from perdure.optim.build import build_optimizer
from perdure.optim.masters import MixedPrecisionOptimizer

LOW = [torch.bfloat16, torch.float16]
OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "AdamW"},
    {"type": "AdamW", "foreach": True},
    {"type": "AdamW", "fused": True},
    {"type": "SGD", "momentum": 0.9},
    {"type": "Adafactor"},
    {"type": "Muon"},
]


class Mixed(nn.Module):
    """Low-precision matrices around a float32 norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 5, dtype=dtype)
        self.norm = nn.LayerNorm(5)
        self.down = nn.Linear(5, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x).float()).to(x.dtype))
        return out


def build(dtype: torch.dtype = torch.bfloat16, lr: float = 1e-3, **keys: Any) -> tuple[Mixed, MixedPrecisionOptimizer]:
    model = Mixed(dtype)
    optimizer = build_optimizer({"weight_decay": 0.1, **keys}, model, lr)
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    return model, optimizer


def backward(model: Mixed, at: int, micro_batches: int = 1) -> None:
    generator = torch.Generator().manual_seed(at)
    for _ in range(micro_batches):
        x = torch.randn(4, 6, generator=generator).to(model.up.weight.dtype)
        model(x).float().square().sum().backward()


def bits(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("keys", OPTIMIZERS, ids=str)
def test_masters_take_the_very_steps_of_a_float32_optimizer(dtype: torch.dtype, keys: dict[str, Any]) -> None:
    model, optimizer = build(dtype, **keys)
    twin = Mixed(dtype).float()
    plain = build_optimizer({"weight_decay": 0.1, **keys}, twin, 1e-3)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    for at in range(4):
        backward(model, at, micro_batches=2)
        for parameter, reference in pairs:
            master = optimizer.main_param_of(parameter)
            gradient = parameter.grad if master is None else master.grad
            assert gradient is not None
            reference.grad = gradient.clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        for parameter, reference in pairs:
            master = optimizer.main_param_of(parameter)
            if master is not None:
                assert torch.equal(master, reference)
            assert torch.equal(parameter, reference.to(parameter.dtype))
        assert optimizer.check_alignment() == []


def test_updates_smaller_than_a_rounding_step_are_not_lost() -> None:
    model, optimizer = build(lr=1e-5, weight_decay=0.0)
    careless = Mixed(torch.bfloat16)
    without = build_optimizer({"weight_decay": 0.0}, careless, 1e-5, master_weights=False)
    start = bits(model)
    for at in range(200):
        for net, each in ((model, optimizer), (careless, without)):
            backward(net, at)
            each.step()
            each.zero_grad()
    moved = [(a - b).abs().max().item() for a, b in zip(bits(model), start, strict=True)]
    stuck = [(a - b).abs().max().item() for a, b in zip(bits(careless), start, strict=True)]
    assert moved[0] > 5e-4
    assert stuck[0] < moved[0] / 4


@pytest.mark.parametrize("hooks", [True, False])
def test_gradients_of_micro_batches_are_summed_in_float32(hooks: bool) -> None:
    model = Mixed(torch.bfloat16)
    groups = [{"params": list(model.parameters())}]
    optimizer = MixedPrecisionOptimizer(groups, lambda inner: torch.optim.SGD(inner, lr=0.1), hooks=hooks)
    exact = torch.zeros(5, 6, dtype=torch.float64)
    for at in range(40):
        probe = Mixed(torch.bfloat16)
        backward(probe, at)
        assert probe.up.weight.grad is not None
        exact += probe.up.weight.grad.double()
        backward(model, at)
        if hooks:
            assert model.up.weight.grad is None
        optimizer.accumulate_grads()
        assert model.up.weight.grad is None
    master = optimizer.main_param_of(model.up.weight)
    assert master is not None
    assert master.grad is not None
    torch.testing.assert_close(master.grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_what_is_clipped_is_what_the_step_uses() -> None:
    model, optimizer = build(type="SGD", weight_decay=0.0, lr=1.0)
    backward(model, 0)
    before = {p: (m.detach().clone()) for p, m in optimizer.main_params().items()}
    assert len(optimizer.grads()) == len(list(model.parameters()))
    for gradient in optimizer.grads():
        gradient.zero_().add_(0.25)
    optimizer.step()
    for parameter, master in optimizer.main_params().items():
        assert torch.equal(master, before[parameter] - 0.25)
    optimizer.zero_grad()
    assert optimizer.grads() == []


def test_a_parameter_without_gradient_stays_and_has_no_state() -> None:
    model, optimizer = build()
    model.up(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum().backward()
    before = model.down.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.down.weight, before)
    assert model.down.weight not in optimizer.state
    assert optimizer.state.get(model.down.weight) is None
    assert model.up.weight in optimizer.state
    assert len(optimizer.state) == 2


def test_state_and_groups_are_those_of_the_models_parameters() -> None:
    model, optimizer = build()
    backward(model, 0)
    optimizer.step()
    listed = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    assert {id(p) for p in listed} == {id(p) for p in model.parameters()}
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}
    for parameter in model.parameters():
        moments = optimizer.state[parameter]["exp_avg"]
        assert moments.shape == parameter.shape
        assert moments.dtype == torch.float32
    assert optimizer.main_param_of(model.norm.weight) is None
    assert set(optimizer.main_params()) == {
        model.up.weight, model.up.bias, model.down.weight, model.down.bias
    }  # fmt: skip


def test_settings_changed_from_outside_reach_the_inner_optimizer() -> None:
    model, optimizer = build()
    before = bits(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    backward(model, 0)
    optimizer.step()
    assert same(bits(model), before)


def test_weights_only_loading_refreshes_masters_and_takes_the_documented_step() -> None:
    model, optimizer = build(type="SGD", weight_decay=0.0, lr=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    assert "up.weight" in optimizer.check_alignment()
    optimizer.reload_main_params_from_model()
    assert optimizer.check_alignment() == []
    loaded = bits(model)
    backward(model, 0)
    optimizer.step()
    assert same(bits(model), loaded)

    for group in optimizer.param_groups:
        group["lr"] = 0.125
    optimizer.zero_grad()
    backward(model, 1)
    master = optimizer.main_param_of(model.up.weight)
    assert master is not None
    assert master.grad is not None
    expected = loaded[0].double() - 0.125 * master.grad.double()
    optimizer.step()
    torch.testing.assert_close(master.double(), expected, rtol=1e-7, atol=1e-9)
    assert torch.equal(model.up.weight, master.bfloat16())


def test_only_the_named_masters_are_refreshed() -> None:
    model, optimizer = build()
    with torch.no_grad():
        model.up.weight.fill_(1.0)
        model.down.weight.fill_(1.0)
    optimizer.reload_main_params_from_model([model.up.weight, model.norm.weight])
    assert optimizer.check_alignment() == ["down.weight"]
    optimizer.copy_main_params_to_model()
    assert optimizer.check_alignment() == []
    assert not torch.equal(model.down.weight, torch.ones(3, 5, dtype=torch.bfloat16))


def test_alignment_sees_a_single_bit_and_not_the_rest_of_a_master() -> None:
    model, optimizer = build()
    master = optimizer.main_param_of(model.up.weight)
    assert master is not None
    master[0, 0] = torch.nextafter(master[0, 0], torch.tensor(9.0))
    assert optimizer.check_alignment() == []
    with torch.no_grad():
        master[0, 0] = 0.0
        model.up.weight[0, 0] = -0.0
    assert optimizer.check_alignment() == ["up.weight"]


@pytest.mark.parametrize("keys", OPTIMIZERS, ids=str)
def test_it_goes_on_exactly_from_a_state_dictionary(keys: dict[str, Any]) -> None:
    model, optimizer = build(**keys)
    for at in range(3):
        backward(model, at)
        optimizer.step()
        optimizer.zero_grad()
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again, second = build(**keys)
    again.load_state_dict(weights)
    second.load_state_dict(saved)
    assert second.check_alignment() == []
    for at in (3, 4):
        for net, each in ((model, optimizer), (again, second)):
            backward(net, at)
            each.step()
            each.zero_grad()
    assert same(bits(model), bits(again))
    for one, other in zip(optimizer.main_params().values(), second.main_params().values(), strict=True):
        assert torch.equal(one, other)


def test_unfrozen_parameters_can_be_added() -> None:
    model = Mixed(torch.bfloat16)
    model.down.requires_grad_(False)
    optimizer = build_optimizer({}, model, 1e-3)
    assert isinstance(optimizer, MixedPrecisionOptimizer)
    model.down.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.down.parameters()), "name": "late", "param_names": ["w", "b"]})
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)
    before = bits(model)
    backward(model, 0)
    optimizer.step()
    assert not same(bits(model)[-2:], before[-2:])
    assert optimizer.check_alignment() == []


def test_a_closure_is_refused() -> None:
    with pytest.raises(UsageError, match="closure"):
        build()[1].step(lambda: 1.0)
