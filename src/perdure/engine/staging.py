"""The snapshot of an asynchronous save: one copy of this rank's share into memory that is used again.

It is laid out as the files will be, so that they are written straight from it. The copy is made by one
thread (a second one finds no more bandwidth, and several collapse when the cores are busy with training),
from CUDA through pinned memory on a side stream. Nobody else ever sees the memory.

All of it is copied before training goes on. A copy behind the next forward and backward pass would cost them
what it saves where they compute on the same processors, and what a forward pass may do to a parameter
through `.data` leaves no trace by which a torn copy could be known.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from perdure.engine.priority import lower_priority
from perdure.engine.writer import CHUNK, FileWrite, memory_of
from perdure.storage.memory import address_of, aligned

__all__ = ["Staging", "cuts"]

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class Staging:
    """Host memory for one snapshot, grown when a larger one comes.

    Args:
        limit: most bytes of it; None for as many as a snapshot needs.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._memory: Tensor | None = None
        self._pinned: _Pinned | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._taking: threading.Thread | None = None

    def snapshot(self, files: Sequence[FileWrite], *, cuda: Sequence[torch.device] = ()) -> None:
        """Stages the files, or as much of them as there may be memory for; returns when every value is safe.

        Args:
            cuda: the CUDA devices that some of their tensors are on.
        """
        begins = cuts([file.padded for file in files], self._limit)
        memory = self._room(sum(file.padded - cut for file, cut in zip(files, begins, strict=True)), bool(cuda))
        for device in cuda:
            stream = self._streams.get(device) or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream
        image, at = memory_of(memory), 0
        for file, cut in zip(files, begins, strict=True):
            size = file.padded - cut
            if size:
                file.stage(image[at : at + size], cut, self._copy)
            at += size
        for device in cuda:
            self._streams[device].synchronize()

    def expect(self, size: int) -> None:
        """Takes memory for a first snapshot of about `size` bytes in the background: touching it first is slow."""
        if self._memory is None and self._taking is None:
            size = size if self._limit is None else min(size, self._limit)
            self._taking = threading.Thread(target=self._take, args=(max(size, 1),), name="perdure-stage", daemon=True)
            self._taking.start()

    def _take(self, size: int) -> None:
        lower_priority()
        memory = aligned(size)
        begin = address_of(memory)
        for at in range(0, size, CHUNK):
            ctypes.memset(begin + at, 0, min(CHUNK, size - at))
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def _copy(self, source: Tensor, begin: int, target: int, size: int) -> None:
        """Puts `size` bytes of a tensor from `begin` on to an address in the memory."""
        if source.is_cpu and source.is_contiguous():
            ctypes.memmove(target, source.data_ptr() + begin, size)
        elif (stream := self._streams.get(source.device)) is not None and self._memory is not None:
            at = target - self._memory.data_ptr()
            with torch.cuda.stream(stream):
                # Memory that is given back before the copy is done must not be given out again before.
                source.record_stream(stream)
                flat = source.contiguous().reshape(-1).view(torch.uint8)
                self._memory[at : at + size].copy_(flat[begin : begin + size], non_blocking=True)
        elif source.is_cpu and begin == 0:
            _typed(target, source).copy_(source)
        else:
            plain = source.contiguous().cpu()
            ctypes.memmove(target, plain.data_ptr() + begin, size)

    def _room(self, size: int, pinned: bool) -> Tensor:
        if self._taking is not None:
            self._taking.join()
            self._taking = None
        if self._memory is None or self._memory.numel() < size:
            self._pinned = self._memory = None
            self._memory = torch.frombuffer(aligned(max(size, 1)), dtype=torch.uint8)
        if pinned and self._pinned is None:
            self._pinned = _Pinned(self._memory)
        return self._memory[:size]


class _Pinned:
    """Keeps memory registered with CUDA, which then copies to it by itself.

    torch's own pinned memory comes in powers of two, up to twice what is needed. Where CUDA refuses, copies are as
    right and slower.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)  # type: ignore[no-untyped-call]
        self._registered = int(error) == 0

    def __del__(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]


def cuts(sizes: Sequence[int], limit: int | None) -> list[int]:
    """From which byte on each file is staged: the last files first, as far as `limit` bytes go."""
    left, begins = sum(sizes) if limit is None else limit, [0] * len(sizes)
    for number in reversed(range(len(sizes))):
        size = sizes[number]
        # What is written at once ends with a whole chunk.
        begin = 0 if size <= left else min(-(-(size - left) // CHUNK) * CHUNK, size)
        begins[number] = begin
        left -= size - begin
    return begins


def _typed(address: int, like: Tensor) -> Tensor:
    memory = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).reshape(like.shape)
