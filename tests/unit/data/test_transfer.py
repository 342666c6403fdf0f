"""What a worker hands over arrives as it was, whatever it is and however it is sent."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.data.loader import ResumableLoader
from perdure.data.transfer import BY_VALUE, Parcel
from perdure.errors import DataError

TENSORS = [
    *(torch.arange(6).reshape(2, 3).to(dtype) for dtype in (torch.uint8, torch.int16, torch.int64, torch.bool)),
    *(torch.randn(2, 3).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)),
    torch.tensor(5),
    torch.empty(0, 4),
    torch.randn(4, 6).T,
    torch.randn(4, 6)[::2, 1:3],
    torch.randn(3).expand(5, 3),
    torch.randn(2, dtype=torch.complex64).conj(),
    torch.zeros(BY_VALUE + 1, dtype=torch.uint8),
    torch.randn(3, requires_grad=True).detach(),
]


class Given:
    """Every tensor of the list, one a sample."""

    def __len__(self) -> int:
        return len(TENSORS)

    def __getitem__(self, index: int) -> Any:
        return {"tensor": TENSORS[index], "rest": [index, ("text", None, np.arange(3)), 2.5]}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.resolve_conj(), b.resolve_conj())


def test_every_kind_of_tensor_arrives_and_is_writable() -> None:
    loader = ResumableLoader(Given(), global_batch_size=1, shuffle=False, num_workers=1, collate_fn=lambda x: x[0])
    with loader:
        for number, step in enumerate(loader.take(len(TENSORS))):
            data = step.micro_batches[0].data
            assert same(data["tensor"], TENSORS[number])
            data["tensor"].zero_()
            index, (text, nothing, array), value = data["rest"]
            assert (index, text, nothing, array.tolist(), value) == (number, "text", None, [0, 1, 2], 2.5)


def test_small_tensors_travel_by_value_and_large_ones_do_not() -> None:
    small, large = torch.zeros(BY_VALUE, dtype=torch.uint8), torch.zeros(BY_VALUE + 1, dtype=torch.uint8)
    assert len(ForkingPickler.dumps(Parcel(small))) > BY_VALUE
    assert len(ForkingPickler.dumps(Parcel({"a": [large]}))) < 1000
    assert torch.equal(Parcel(small).open(), small)


class Pair(NamedTuple):
    small: Tensor
    large: Tensor


@dataclass
class Held:
    content: Any


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def delivered(content: Any, steps: int = 1) -> Any:
    """What arrives from a worker that gives `content` for each sample."""
    with ResumableLoader([0], global_batch_size=1, num_workers=1, collate_fn=lambda samples: content) as loader:
        for step in loader.take(steps):
            last = step.micro_batches[0].data
        return last


def test_batches_of_any_kind_use_no_descriptor_up() -> None:
    present, limit = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (present + 30, limit[1]))
    try:
        pair = delivered(Pair(torch.ones(3), torch.ones(BY_VALUE)), steps=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert type(pair) is Pair
    assert float(pair.small.sum() + pair.large.sum()) == 3 + BY_VALUE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.ones(3, requires_grad=True) * 2, "non-leaf"),
        (np.array([lambda: None]), "lambda"),
        ({(lambda: None): 1}, "lambda"),
        (Held([torch.ones(3, requires_grad=True) * 2]), "non-leaf"),
        (Unreadable(), "taken over from its worker: ValueError"),
    ],
)
def test_what_cannot_be_handed_over_is_an_error_and_no_hang(content: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        delivered(content)
