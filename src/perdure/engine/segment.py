"""Memory that ranks of one machine share: slots for blocks, and semaphores by which they say what is in them.

A word over the process group wakes a thread on either side, several times; a semaphore costs nothing where nobody
waits for it yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from perdure.format.digest import BLOCK
from perdure.storage.memory import address_of

__all__ = ["SLOTS", "Segment", "Semaphore"]

SLOTS = 3
_SHARED = "/dev/shm"
_LIBC = ctypes.CDLL(None, use_errno=True)
_HAS_SEMAPHORES = all(hasattr(_LIBC, name) for name in ("sem_init", "sem_post", "sem_trywait", "sem_timedwait"))
# Page by page, each rank would take as long to see the memory as to copy it.
_SEEN_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_FAILED = 16  # where the byte is, after the mark
_LINE = 64  # a semaphore takes 32 bytes at most, and has a cache line of its own


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A POSIX semaphore in shared memory. What was written before `post` is seen after the `wait` that takes it."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)

    def start(self) -> bool:
        """Makes one of this memory, with nothing posted; False where there are none between processes."""
        return bool(_LIBC.sem_init(self._at, 1, 0) == 0)

    def post(self) -> None:
        _LIBC.sem_post(self._at)

    def wait(self, seconds: float) -> bool:
        """Takes one post; False where none came in so many seconds, or a signal did."""
        if _LIBC.sem_trywait(self._at) == 0:
            return True
        end = time.time() + seconds
        until = _Timespec(int(end), int(end % 1 * 1e9))
        return bool(_LIBC.sem_timedwait(self._at, ctypes.byref(until)) == 0)


class Segment:
    """The slots of one rank, its own or another's.

    Attributes:
        path, mark: by which other ranks open it and know it; no path where it cannot be shared.
        slots: SLOTS blocks, each of which begins on a page.
    """

    def __init__(self, memory: mmap.mmap, ranks: int, path: str = "", mark: bytes = b"") -> None:
        self._memory, self.path, self.mark = memory, path, mark
        self._begin = address_of(memory) + _LINE
        data = torch.frombuffer(memory, dtype=torch.uint8)[_head(ranks) :]
        self.slots: Sequence[Tensor] = data.view(SLOTS, BLOCK).unbind()

    @classmethod
    def make(cls, ranks: int, share: bool) -> Segment:
        """This rank's own, shared if that is wished and there is room for it."""
        size, mark = _head(ranks) + SLOTS * BLOCK, os.urandom(16)
        path = f"{_SHARED}/perdure-{os.getpid()}-{mark.hex()}"
        if share and _HAS_SEMAPHORES:
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    # Room that isn't there must be found out here, not by a signal later.
                    os.posix_fallocate(fd, 0, size)
                    made = cls(mmap.mmap(fd, size, flags=_SEEN_AT_ONCE), ranks, path, mark)
                    made._memory[: len(mark)] = mark
                    if all(each.start() for rank in range(ranks) for each in (made.told(rank), made.taken(rank))):
                        return made
                    os.unlink(path)
                except OSError:
                    os.unlink(path)
                finally:
                    os.close(fd)
        return cls(mmap.mmap(-1, size), ranks)

    @classmethod
    def open(cls, path: str, mark: bytes, ranks: int) -> Segment | None:
        """Another rank's, if it can be seen from here."""
        if not path:
            return None
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            memory = mmap.mmap(fd, _head(ranks) + SLOTS * BLOCK, flags=_SEEN_AT_ONCE)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        if memory[: len(mark)] == mark:
            return cls(memory, ranks, path, mark)
        memory.close()
        return None

    def told(self, rank: int) -> Semaphore:
        """Posted for a rank when there is something for it to take."""
        return Semaphore(self._begin + 2 * rank * _LINE)

    def taken(self, rank: int) -> Semaphore:
        """Posted by a rank when it has taken it."""
        return Semaphore(self._begin + (2 * rank + 1) * _LINE)

    @property
    def failed(self) -> bool:
        """Whether its rank has failed: nothing in the slots is to be used any more."""
        return self._memory[_FAILED] != 0

    def fail(self) -> None:
        self._memory[_FAILED] = 1

    def hide(self) -> None:
        """Takes its name away. Who has it open keeps it, and nothing is left behind, whatever happens."""
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def close(self) -> None:
        """Gives the memory back, or leaves it to a view that an error's traceback still holds."""
        del self.slots
        with contextlib.suppress(BufferError):
            self._memory.close()


def _head(ranks: int) -> int:
    """Bytes before the first slot: mark and failure in a line, then each rank's semaphores."""
    return -(-_LINE * (1 + 2 * ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
