"""Optimizers of ranks that hold different parameters, as one that any rank can load its part of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure.errors import SaveError
from perdure.state.merge import common_step, merge_optimizers
from perdure.state.model import parameter_names
from perdure.state.optimizer import OptimizerView, collect_optimizer


class Part(nn.Module):
    """One stage: a layer of a model, under the whole model's name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, nn.Linear(2, 2))


def trained(name: str, steps: int, optimizer: Any = torch.optim.AdamW, **groups: Any) -> OptimizerView:
    torch.manual_seed(0)
    part = Part(name)
    made = optimizer([{"params": list(part.parameters()), "name": "all", **groups}], lr=0.1)
    for _ in range(steps):
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.step()
    return OptimizerView(made, parameter_names(part))


def described(*views: OptimizerView, share_step: bool = True) -> dict[str, Any]:
    return merge_optimizers([collect_optimizer(view, share_step=share_step)[0] for view in views])


def test_equal_descriptions_stay_what_they_are() -> None:
    alone, _ = collect_optimizer(trained("a", 3))
    assert merge_optimizers([alone, dict(alone)]) is alone


def test_groups_with_the_same_settings_become_one() -> None:
    merged = described(trained("a", 3), trained("b", 3), trained("c", 3, weight_decay=0.5))
    assert [group["params"] for group in merged["groups"]] == [
        ["a.weight", "a.bias", "b.weight", "b.bias"],
        ["c.weight", "c.bias"],
    ]
    assert merged["values"]["$shared_step"] == "adam_step"
    assert merged["values"]["$without_step"] == []
    assert merged["type"] == "AdamW"


def test_a_parameter_that_two_ranks_hold_is_listed_once() -> None:
    merged = described(trained("a", 3), trained("b", 3), trained("a", 3))
    assert [group["params"] for group in merged["groups"]] == [["a.weight", "a.bias", "b.weight", "b.bias"]]


def test_a_rank_without_state_has_no_step() -> None:
    merged = described(trained("a", 3), trained("b", 0))
    assert merged["values"]["$shared_step"] == "adam_step"
    assert merged["values"]["$without_step"] == ["b.weight", "b.bias"]
    assert merged["keys"] == {"adam_step": "step", "adam_m": "exp_avg", "adam_v": "exp_avg_sq"}


@pytest.mark.parametrize("counts", [(3, 5), (5, 3)])
def test_steps_that_differ_are_stored_by_parameter(counts: tuple[int, int]) -> None:
    views = [trained(name, count) for name, count in zip("ab", counts, strict=True)]
    assert common_step(views[0]) != common_step(views[1])
    merged = described(*views, share_step=False)
    assert "$shared_step" not in merged["values"]
    stored: dict[str, Tensor] = {}
    for view in views:
        for tensor in collect_optimizer(view, share_step=False)[1]:
            if tensor.name.startswith("adam_step"):
                stored[tensor.name] = tensor.pieces[0].tensor
    assert {name: int(value) for name, value in stored.items()} == {
        f"adam_step.{part}.{kind}": count
        for part, count in zip("ab", counts, strict=True)
        for kind in ("weight", "bias")
    }


def test_the_common_step_is_that_of_all_parameters_or_none() -> None:
    assert common_step(trained("a", 3)) == common_step(trained("b", 3))
    assert common_step(trained("a", 0)) is None
    assert common_step(trained("a", 2, torch.optim.SGD)) is None
    mixed = trained("a", 2)
    state = mixed.optimizer.state[mixed.parameters()[0][1]]
    state["step"] = state["step"] + 1
    assert common_step(mixed) is None


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (trained("a", 1, torch.optim.Adam), "the optimizer: type is AdamW and Adam$"),
        (trained("a", 1, weight_decay=0.5), "a.weight: weight_decay is 0.01 and 0.5$"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(other: OptimizerView, what: str) -> None:
    with pytest.raises(SaveError) as caught:
        described(trained("b", 1), trained("a", 1), other)
    assert re.search(f"ranks [01] and 2 contradict each other about {what}", caught.value.message)
