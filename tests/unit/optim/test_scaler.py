"""The loss scale moves as torch's scaler does, and comes back exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import UsageError
from perdure.optim.scaler import LossScaler


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_the_scale_moves_as_torchs_does(steps: list[bool], interval: int) -> None:
    ours = LossScaler(growth_interval=interval)
    theirs = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=interval)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in steps:
        theirs.scale(torch.ones(()))
        weight.grad = torch.tensor([1.0 if finite else math.inf])
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        assert ours.scale == theirs.get_scale()
        assert ours.good_steps == theirs.state_dict()["_growth_tracker"]


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30))
def test_it_goes_on_exactly_from_its_state(steps: list[bool], stop: int) -> None:
    straight, first = LossScaler(growth_interval=3), LossScaler(growth_interval=3)
    for finite in steps:
        straight.update(finite)
    for finite in steps[:stop]:
        first.update(finite)
    second = LossScaler(growth_interval=3)
    second.load_state_dict(first.state_dict())
    for finite in steps[stop:]:
        second.update(finite)
    assert second.state_dict() == straight.state_dict()


def test_gradients_carry_the_scale() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    LossScaler(scale=1024.0).scale_loss(weight.square().sum()).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([6.0, 8.0]) * 1024)


@pytest.mark.parametrize(
    ("dtypes", "dynamic"), [(("float32", None), False), (("bfloat16", None), False), (("float32", "float16"), True)]
)
def test_only_float16_needs_one(dtypes: tuple[Any, ...], dynamic: bool) -> None:
    scaler = LossScaler.for_dtypes(*dtypes)
    assert scaler.dynamic == dynamic
    assert scaler.scale == (65536.0 if dynamic else 1.0)


def test_a_static_scale_never_moves() -> None:
    scaler = LossScaler(dynamic=False)
    for finite in (True, False, True):
        scaler.update(finite)
    scaler.load_state_dict({"scale": 8.0, "good_steps": 3})
    assert scaler.state_dict() == {"scale": 1.0, "good_steps": 0}


def test_settings_that_cannot_work_are_refused() -> None:
    for keys in ({"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}):
        with pytest.raises(UsageError):
            LossScaler(**keys)  # type: ignore[arg-type]


def test_the_scale_stays_one_that_a_checkpoint_can_hold() -> None:
    scaler = LossScaler(scale=2.0**126, growth_interval=1)
    for _ in range(3):
        scaler.update(True)
    assert scaler.scale == 2.0**126
    for _ in range(2000):
        scaler.update(False)
    assert torch.tensor(scaler.scale, dtype=torch.float32) > 0
