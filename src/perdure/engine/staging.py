"""The snapshot of an asynchronous save: one copy of this rank's share into buffers that are used again.

The copy is made by one thread (several collapse when the cores are busy with training), from CUDA
through pinned memory on a side stream. Nobody else ever sees the buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from perdure.engine.writer import FileEntry

__all__ = ["Staging"]

_ALIGNMENT = 64


class Staging:
    """Host memory for one snapshot, grown when a larger one comes."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def snapshot(self, entries: Sequence[FileEntry]) -> list[FileEntry]:
        """The same entries with their tensors copied; returns when every value is safe."""
        sizes = [_padded(e.tensor.numel() * e.tensor.element_size()) for e in entries]
        cuda = any(e.tensor.device.type == "cuda" for e in entries)
        memory = self._room(sum(sizes), cuda)
        copied, at = [], 0
        if cuda:
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream())
        for entry, size in zip(entries, sizes, strict=True):
            target = _view(memory[at : at + size], entry.tensor)
            self._copy(target, entry.tensor)
            copied.append(FileEntry(entry.key, entry.dtype, target))
            at += size
        if self._stream is not None and cuda:
            self._stream.synchronize()
        return copied

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if source.device.type == "cpu" and source.is_contiguous():
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
        elif source.device.type == "cuda" and self._stream is not None:
            with torch.cuda.stream(self._stream):
                target.copy_(source, non_blocking=True)
        else:
            target.copy_(source)

    def _room(self, size: int, pinned: bool) -> Tensor:
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(memory: Tensor, like: Tensor) -> Tensor:
    size = like.numel() * like.element_size()
    return memory[:size].view(like.dtype).reshape(like.shape)
