"""Two algorithms that look like one optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.errors import UsageError
from perdure.optim.composite import CompositeOptimizer
from perdure.optim.muon import MuonWithAdamW


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 3), (3,), (5, 4), (6,)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Muon and AdamW groups in turn, so that order is not an accident."""
    return [
        {"params": [params[0]], "algorithm": "muon", "name": "a"},
        {"params": [params[1]], "algorithm": "adamw", "name": "b", "weight_decay": 0.0},
        {"params": [params[2]], "algorithm": "muon", "name": "c"},
        {"params": [params[3]], "algorithm": "adamw", "name": "d"},
    ]


def step(params: list[nn.Parameter], *optimizers: torch.optim.Optimizer, at: int) -> None:
    generator = torch.Generator().manual_seed(at)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in params]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_it_does_what_its_parts_do() -> None:
    params, apart = parameters(), parameters()
    optimizer = MuonWithAdamW(groups(params), 1e-2, weight_decay=0.1)
    muon = torch.optim.Muon([apart[0], apart[2]], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [apart[1]], "weight_decay": 0.0}, {"params": [apart[3]]}],
        lr=1e-2,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for at in range(3):
        step(params, optimizer, at=at)
        step(apart, muon, adamw, at=at)
    assert same(values(params), values(apart))
    assert [group["name"] for group in optimizer.param_groups] == ["a", "b", "c", "d"]
    assert {id(each) for each in optimizer.state} == {id(each) for each in params}


def test_settings_changed_from_outside_are_the_parts_settings() -> None:
    params = parameters()
    optimizer = MuonWithAdamW(groups(params), 1e-2, weight_decay=0.0)
    before = values(params)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step(params, optimizer, at=0)
    assert same(values(params), before)


def test_it_goes_on_exactly_from_a_state_dictionary() -> None:
    params = parameters()
    optimizer = MuonWithAdamW(groups(params), 1e-2)
    for at in range(2):
        step(params, optimizer, at=at)
    saved, weights = copy.deepcopy(optimizer.state_dict()), values(params)
    again = parameters()
    with torch.no_grad():
        for parameter, value in zip(again, weights, strict=True):
            parameter.copy_(value)
    second = MuonWithAdamW(groups(again), 5.0)
    second.load_state_dict(saved)
    for at in (2, 3):
        step(params, optimizer, at=at)
        step(again, second, at=at)
    assert same(values(params), values(again))


def test_state_set_by_parameter_is_what_the_parts_use() -> None:
    params, again = parameters(), parameters()
    optimizer, second = MuonWithAdamW(groups(params), 1e-2), MuonWithAdamW(groups(again), 1e-2)
    step(params, optimizer, at=0)
    with torch.no_grad():
        for here, there in zip(params, again, strict=True):
            there.copy_(here)
            second.state[there] = copy.deepcopy(dict(optimizer.state[here]))
    step(params, optimizer, at=1)
    step(again, second, at=1)
    assert same(values(params), values(again))


def test_a_group_added_later_goes_to_the_part_it_names() -> None:
    params = parameters()
    optimizer = MuonWithAdamW(groups(params)[:2], 1e-2)
    optimizer.add_param_group({"params": [params[3]], "algorithm": "adamw", "name": "late"})
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)
    before = values(params)
    step(params, optimizer, at=0)
    assert not torch.equal(before[3], params[3])
    with pytest.raises(UsageError, match="it has muon, adamw"):
        optimizer.add_param_group({"params": [params[2]], "algorithm": "sgd"})


def test_a_part_without_groups_is_left_out_and_a_closure_is_evaluated_once() -> None:
    params = parameters()
    only = [group for group in groups(params) if group["algorithm"] == "adamw"]
    optimizer = MuonWithAdamW(only, 1e-2)
    assert isinstance(optimizer, CompositeOptimizer)
    assert list(optimizer.parts) == ["adamw"]
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        return 1.5

    assert optimizer.step(closure) == 1.5
    assert calls == [True]


def test_parts_may_step_by_themselves() -> None:
    params, again = parameters(), parameters()
    optimizer, second = MuonWithAdamW(groups(params), 1e-2), MuonWithAdamW(groups(again), 1e-2)
    for at in range(2):
        step(params, optimizer, at=at)
        step(again, *second.parts.values(), at=at)
        second.load_state_dict(copy.deepcopy(second.state_dict()))
    assert same(values(params), values(again))
    assert len(second.state) == len(optimizer.state)
