"""Memory for state that a load will fill: taken in few large pieces, so that touching it first costs little."""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from perdure.state.shards import is_plain
from perdure.storage.memory import aligned

__all__ = ["Arena"]

_PIECE = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Hands out host memory; a piece of it lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._used = 0

    def like(self, tensor: Tensor, dtype: torch.dtype, held: Any = None) -> Tensor:
        """A tensor of this shape, device and sharding, to be filled: `held` if it is one, or memory not touched yet."""
        if _same_kind(held, tensor, dtype):
            return held  # type: ignore[no-any-return]
        plain = is_plain(tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
        size = prod(tensor.shape) * dtype.itemsize
        if not plain or size == 0:
            return torch.zeros_like(tensor, dtype=dtype, memory_format=torch.preserve_format).detach()
        memory, begin = self._take(size)
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
        return raw.view(dtype).reshape(tensor.shape)

    def _take(self, size: int) -> tuple[mmap.mmap, int]:
        if 2 * size > _PIECE:
            return aligned(size), 0
        begin = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if self._piece is None or begin + size > len(self._piece):
            self._piece, begin = aligned(_PIECE), 0
        self._used = begin + size
        return self._piece, begin


def _same_kind(held: Any, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a state tensor lies as a new one for this tensor would."""
    if not isinstance(held, Tensor) or held.dtype != dtype or held.shape != tensor.shape:
        return False
    if held.device != tensor.device or held.stride() != tensor.stride():
        return False
    if type(held) is Tensor and type(tensor) in (Tensor, Parameter):
        return True
    return (
        type(held) is type(tensor.detach())
        and getattr(held, "placements", None) == getattr(tensor, "placements", None)
        and getattr(held, "device_mesh", None) == getattr(tensor, "device_mesh", None)
    )
