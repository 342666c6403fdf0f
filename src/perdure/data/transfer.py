"""Handing micro-batches from a worker to the run: checked before, and small tensors by value.

Torch hands a tensor over as a file descriptor of shared memory, each by a connection of its own, which takes
half a millisecond whatever its size. Up to some size it is faster to send the bytes themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["packed"]

BY_VALUE = 128 << 10
"""Bytes up to which a tensor is sent by value."""

_PLAIN = (np.ndarray, np.generic, str, bytes, int, float, bool, type(None))


def packed(data: Any) -> Any:
    """What arrives as `data` when it is sent to another process.

    Raises:
        Exception: whatever pickling raises for what cannot leave the process; a queue would drop it and hang.
    """
    kind = type(data)
    if kind is Tensor:
        # Torch forgets on the way that a tensor stands for its conjugate or negative.
        data = data.resolve_conj().resolve_neg()
        return _ByValue(data) if _is_small(data) else data
    if kind is dict:
        return {key: packed(value) for key, value in data.items()}
    if kind is list:
        return [packed(value) for value in data]
    if kind is tuple:
        return tuple(packed(value) for value in data)
    if not isinstance(data, (Tensor, *_PLAIN)):
        ForkingPickler.dumps(data)
    return data


def _is_small(tensor: Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    return plain and not tensor.is_quantized and 0 < tensor.numel() * tensor.element_size() <= BY_VALUE


class _ByValue:
    """Becomes, on arrival, a tensor with memory of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self._tensor
        content = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return _arrived, (content, tensor.dtype, tuple(tensor.shape))


def _arrived(content: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)
