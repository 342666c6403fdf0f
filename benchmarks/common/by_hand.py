"""A cold load by several ranks as one would write it by hand for a single file: what `load_balanced` can reach at best.

Each rank reads its part in blocks, past the page cache, through a huge page into memory that all ranks see, and digests
it; every rank copies every block from there into its tensors. There is nothing to find, to plan or to set up: windows,
threads and buffers are made before, and used again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.synchronize import Semaphore
from typing import Any

import xxhash
from torch import Tensor

from perdure.storage.memory import address_of, aligned

__all__ = ["ByHand", "Shared"]

BLOCK, SLOTS, BOUNCE = 8 << 20, 3, 2 << 20


class Shared:
    """What ranks share, made by the process that starts them and handed to each."""

    def __init__(self, context: Any, ranks: int, folder: str = "/dev/shm") -> None:
        self.path = f"{folder}/by-hand-{os.getpid()}"
        self.told: list[list[Semaphore]] = [[context.Semaphore(0) for _ in range(ranks)] for _ in range(ranks)]
        self.taken: list[list[Semaphore]] = [[context.Semaphore(0) for _ in range(ranks)] for _ in range(ranks)]
        with open(self.path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, ranks * SLOTS * BLOCK)

    def close(self) -> None:
        os.unlink(self.path)


class ByHand:
    """One rank.

    Args:
        path: a file of as many bytes as the tensors have.
    """

    def __init__(self, rank: int, ranks: int, shared: Shared, path: str, tensors: Sequence[Tensor]) -> None:
        self._rank, self._ranks, self._shared = rank, ranks, shared
        self._others = [other for other in range(ranks) if other != rank]
        with open(shared.path, "r+b") as file:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._windows = mmap.mmap(file.fileno(), ranks * SLOTS * BLOCK, flags=flags)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._size = os.fstat(self._fd).st_size
        self._runs: list[list[tuple[int, int, int]]] = [[] for _ in range(-(-self._size // BLOCK))]
        at = 0
        for tensor in tensors:
            begin, end = at, at + tensor.nbytes
            while at < end:
                size = min(end - at, BLOCK - at % BLOCK)
                self._runs[at // BLOCK].append((tensor.data_ptr() + at - begin, at % BLOCK, size))
                at += size
        self._pool, self._local = ThreadPoolExecutor(SLOTS - 1), threading.local()

    def load(self) -> int:
        """Fills the tensors together with the other ranks; the bytes that this rank read."""
        own = deque(range(self._rank, len(self._runs), self._ranks))
        ahead = [own.popleft() for _ in range(min(SLOTS - 1, len(own)))]
        reads: deque[Future[int]] = deque(self._pool.submit(self._read, block) for block in ahead)
        passed = count = 0
        for block, runs in enumerate(self._runs):
            reader = block % self._ranks
            if reader == self._rank:
                count += reads.popleft().result()
                for taker in self._others:
                    self._shared.told[reader][taker].release()
                passed += 1
                if own:
                    if passed == SLOTS - 1:
                        # The next one goes where the one before this was, which all must have taken.
                        self._settle()
                        passed -= 1
                    reads.append(self._pool.submit(self._read, own.popleft()))
            else:
                self._shared.told[reader][self._rank].acquire()
            begin = address_of(self._windows) + self._slot(block)
            for address, at, size in runs:
                ctypes.memmove(address, begin + at, size)
            if reader != self._rank:
                self._shared.taken[reader][self._rank].release()
        for _ in range(passed):
            self._settle()
        return count

    def _settle(self) -> None:
        for taker in self._others:
            self._shared.taken[self._rank][taker].acquire()

    def _slot(self, block: int) -> int:
        """Where a block's window begins."""
        return (block % self._ranks * SLOTS + block // self._ranks % SLOTS) * BLOCK

    def _read(self, block: int) -> int:
        bounce = getattr(self._local, "bounce", None)
        if bounce is None:
            memory = aligned(2 * BOUNCE)
            begin = -address_of(memory) % BOUNCE
            bounce = self._local.bounce = memoryview(memory)[begin : begin + BOUNCE]
        size, begin = min(BLOCK, self._size - block * BLOCK), self._slot(block)
        for at in range(0, size, BOUNCE):
            got = os.preadv(self._fd, [bounce], block * BLOCK + at)
            ctypes.memmove(address_of(self._windows) + begin + at, address_of(bounce), got)
        xxhash.xxh3_128_digest(memoryview(self._windows)[begin : begin + size])
        return size
