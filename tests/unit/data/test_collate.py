"""Our collating gives what torch's does, whatever the samples are."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from perdure.data.collate import stack_samples
from perdure.data.transfer import BY_VALUE

Pair = namedtuple("Pair", "a b")
LARGE = BY_VALUE // 8 + 1

SAMPLES: list[list[Any]] = [
    [torch.tensor(1), torch.tensor(2)],
    [torch.zeros(2, 3), torch.ones(2, 3)],
    [torch.zeros(LARGE), torch.ones(LARGE)],
    [torch.arange(6).view(2, 3).T, torch.ones(3, 2, dtype=torch.int64)],
    [{"a": torch.ones(2), "b": [1, "x"]}, {"a": torch.zeros(2), "b": [2, "y"], "more": 0}],
    [(torch.ones(2), {"n": 1.5}, (b"x", True)), (torch.zeros(2), {"n": 2.5}, (b"y", False))],
    [[torch.ones(1), np.arange(3)], [torch.ones(1), np.arange(3)]],
    [Pair(torch.ones(1), 2), Pair(torch.ones(1), 3)],
    [OrderedDict(a=1), OrderedDict(a=2)],
    [(), ()],
    [{}, {}],
    [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))],
    [1, 2],
    ["a", "b"],
]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("samples", SAMPLES, ids=str)
def test_it_gives_what_torch_gives(samples: list[Any]) -> None:
    assert same(stack_samples(samples), default_collate(samples))


@pytest.mark.parametrize(
    "samples",
    [
        [torch.ones(2), torch.ones(3)],
        [(1, 2), (1,)],
        [{"a": 1}, {"b": 1}],
        [None, None],
        [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()],
        [torch.ones(2), 3],
    ],
    ids=str,
)
def test_it_refuses_what_torch_refuses(samples: list[Any]) -> None:
    for collate in (default_collate, stack_samples):
        with pytest.raises((RuntimeError, TypeError, KeyError, AttributeError)):
            collate(samples)


def test_what_a_program_has_changed_in_torchs_table_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, Tensor, lambda batch, *, collate_fn_map=None: sum(batch))
    assert stack_samples([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}]) == {"a": torch.tensor(3)}
