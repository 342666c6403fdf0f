"""What the machine can do at best: the device past the page cache, and copies of memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

from perdure.storage.memory import address_of, aligned

__all__ = ["memcpy_seconds", "raw_read", "raw_write", "sync_tree", "warm"]

BLOCK = 8 << 20
THREADS = 2


def raw_write(path: Path, size: int) -> None:
    """Writes from touched, aligned memory in huge pages, preallocated, durable."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)

    def work(number: int, memory: mmap.mmap) -> None:
        for at in range(number * BLOCK, size - BLOCK + 1, THREADS * BLOCK):
            os.pwrite(fd, memory, at)

    _in_threads(work)
    os.fsync(fd)
    os.close(fd)


def raw_read(path: Path) -> None:
    """Reads a file into aligned memory that is used again and again."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fd).st_size

    def work(number: int, memory: mmap.mmap) -> None:
        for at in range(number * BLOCK, size, THREADS * BLOCK):
            os.preadv(fd, [memory], at)

    _in_threads(work)
    os.close(fd)


_MEMORY: list[mmap.mmap] = []


def _in_threads(work: object) -> None:
    while len(_MEMORY) < THREADS:
        _MEMORY.append(aligned(BLOCK))
        _MEMORY[-1].write(os.urandom(1 << 20) * (BLOCK >> 20))
    threads = [threading.Thread(target=work, args=(n, _MEMORY[n])) for n in range(THREADS)]  # type: ignore[arg-type]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def memcpy_seconds(gib: float) -> float:
    """Seconds that one thread takes to copy `gib` between touched memory."""
    size = 64 << 20
    source, target = aligned(size), aligned(size)
    for memory in (source, target):
        ctypes.memset(address_of(memory), 1, size)
    began = time.perf_counter()
    for _ in range(8):
        ctypes.memmove(address_of(target), address_of(source), size)
    return (time.perf_counter() - began) / (8 * size) * gib * (1 << 30)


def sync_tree(path: Path) -> None:
    """Makes a file, or a directory and what is in it, durable."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def warm(path: Path) -> None:
    """Brings a tree into the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with open(file, "rb", buffering=0) as stream:
                while stream.read(8 << 20):
                    pass
