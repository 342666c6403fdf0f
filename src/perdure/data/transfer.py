"""Handing micro-batches from a worker to the run: pickled by the worker itself, and small tensors by value.

A queue would pickle in a thread of its own, which drops what cannot be pickled and leaves the run waiting. And torch
hands a tensor over as a file descriptor of shared memory, each by a connection of its own, which takes half a
millisecond whatever its size. Up to some size it is faster to send the bytes themselves.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

__all__ = ["Opened", "Parcel"]

BY_VALUE = 128 << 10
"""Bytes up to which a tensor is sent by value."""


class Parcel:
    """What a worker sends.

    Raises:
        Exception: whatever pickling raises for what cannot leave the process.
    """

    __slots__ = ("_pickled",)

    def __init__(self, content: Any) -> None:
        stream = io.BytesIO()
        _Pickler(stream, -1).dump(content)
        self._pickled = stream.getvalue()

    def open(self) -> Any:
        """The content; only once, as shared memory is handed over once.

        Raises:
            Exception: whatever unpickling raises.
        """
        return ForkingPickler.loads(self._pickled)

    def pin_memory(self) -> Opened:
        """What torch's thread for pinned memory makes of it."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Opened(pin_memory(self.open()))  # type: ignore[no-untyped-call]


class Opened:
    """The content of a parcel that was opened on the way."""

    __slots__ = ("_content",)

    def __init__(self, content: Any) -> None:
        self._content = content

    def open(self) -> Any:
        """The content."""
        return self._content


class _Pickler(ForkingPickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        if _is_small(value):
            content = value.resolve_conj().resolve_neg().contiguous()
            return _arrived, (bytearray(content.view(-1).view(torch.uint8).numpy()), value.dtype, tuple(value.shape))
        if value.is_conj() or value.is_neg():
            # Torch forgets on the way that a tensor stands for its conjugate or negative.
            return reduce_tensor(value.resolve_conj().resolve_neg())  # type: ignore[no-untyped-call]
        return NotImplemented


def _is_small(tensor: Tensor) -> bool:
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad
    dense = plain and not (tensor.is_quantized or tensor.is_nested)
    return dense and 0 < tensor.numel() * tensor.element_size() <= BY_VALUE


def _arrived(content: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)
