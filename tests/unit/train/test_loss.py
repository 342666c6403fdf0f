"""What a loss function may give, and what is said of anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from perdure.errors import UsageError
from perdure.train.step import loss_and_count


@pytest.mark.parametrize(
    ("given", "total", "count"),
    [
        (torch.tensor(2.0), 6.0, 3),
        (torch.tensor([2.0]), 6.0, 3),
        ((torch.tensor(2.0), 5), 2.0, 5),
        ((torch.tensor(2.0), torch.tensor(5)), 2.0, 5),
        ((torch.tensor(2.0), torch.tensor([2.5])), 2.0, 2.5),
        ((torch.tensor(2.0), 0.25), 2.0, 0.25),
    ],
)
def test_a_mean_or_a_sum_with_its_count(given: Any, total: float, count: float) -> None:
    value, found = loss_and_count(lambda model, batch: given, nn.Identity(), None, 3)
    assert (value.item(), value.ndim, found) == (total, 0, count)


@pytest.mark.parametrize(
    "given", [None, "x", 1.5, torch.ones(2, 3), torch.tensor(1), (torch.ones(2), 2), (torch.tensor(1.0), 2, 3)]
)
def test_anything_else_is_refused_in_words(given: Any) -> None:
    with pytest.raises(UsageError, match=r"the loss function gave .*expected a floating-point tensor"):
        loss_and_count(lambda model, batch: given, nn.Identity(), None, 3)


@pytest.mark.parametrize("count", ["5", torch.ones(2), float("nan"), [3]])
def test_a_count_that_is_no_number_is_refused_in_words(count: Any) -> None:
    with pytest.raises(UsageError, match=r"for its count; expected one number"):
        loss_and_count(lambda model, batch: (torch.tensor(1.0), count), nn.Identity(), None, 3)
