"""What a worker hands over arrives as it was, whatever it is and however it is sent."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.data.loader import ResumableLoader
from perdure.data.transfer import BY_VALUE, packed

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
    assert len(ForkingPickler.dumps(packed(small))) > BY_VALUE
    assert packed(large) is large
    assert type(packed({"a": [small]})["a"][0]) is not Tensor


def test_what_cannot_leave_is_found_before() -> None:
    with pytest.raises(Exception, match="lambda"):
        packed([{"a": (1, lambda: None)}])
