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
_LIBC = ctypes.CDLL(None, use_errno=True)
_SHARES = hasattr(os, "memfd_create") and hasattr(_LIBC, "sem_timedwait")
# Page by page, each rank would take as long to see the memory as to copy it.
_SEEN_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_LINE = 64  # a semaphore takes 32 bytes at most, and has a cache line of its own


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A POSIX semaphore in shared memory. What was written before `post` is seen after the `wait` that takes it."""

    def __init__(self, address: int) -> None:
        self._at = ctypes.c_void_p(address)

    def start(self) -> None:
        """Makes one of this memory, with nothing posted.

        Raises:
            OSError: this system has none between processes.
        """
        if _LIBC.sem_init(self._at, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "no semaphores between processes")

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
    """The slots of one rank, its own or another's. The memory has no name that could be left behind.

    Attributes:
        path, name: where other ranks of this machine open it, and by what they know it; "" where it cannot be shared.
        slots: SLOTS blocks, each of which begins on a page.
    """

    def __init__(self, memory: mmap.mmap, ranks: int, fd: int = -1, name: str = "") -> None:
        self._memory, self._fd = memory, fd
        self.path, self.name = f"/proc/{os.getpid()}/fd/{fd}" if name else "", name
        self._begin = address_of(memory) + _LINE
        data = torch.frombuffer(memory, dtype=torch.uint8)[_head(ranks) :]
        self.slots: Sequence[Tensor] = data.view(SLOTS, BLOCK).unbind()

    @classmethod
    def make(cls, ranks: int, share: bool) -> Segment:
        """This rank's own, shared if that is wished and there is room for it."""
        size = _head(ranks) + SLOTS * BLOCK
        if share and _SHARES:
            with contextlib.suppress(OSError):
                name = f"perdure-{os.urandom(16).hex()}"
                fd = os.memfd_create(name)
                try:
                    # Room that isn't there must be found out here, not by a signal later.
                    os.posix_fallocate(fd, 0, size)
                    made = cls(mmap.mmap(fd, size, flags=_SEEN_AT_ONCE), ranks, fd, name)
                    for rank in range(ranks):
                        made.told(rank).start()
                        made.taken(rank).start()
                    return made
                except OSError:
                    os.close(fd)
        return cls(mmap.mmap(-1, size), ranks)

    @classmethod
    def open(cls, path: str, name: str, ranks: int) -> Segment | None:
        """Another rank's, if it can be seen from here."""
        try:
            # Elsewhere the same number may be another process, and its file anything.
            if not name or os.readlink(path) != f"/memfd:{name} (deleted)":
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return cls(mmap.mmap(fd, _head(ranks) + SLOTS * BLOCK, flags=_SEEN_AT_ONCE), ranks)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    def told(self, rank: int) -> Semaphore:
        """Posted for a rank when there is something for it to take."""
        return Semaphore(self._begin + 2 * rank * _LINE)

    def taken(self, rank: int) -> Semaphore:
        """Posted by a rank when it has taken it."""
        return Semaphore(self._begin + (2 * rank + 1) * _LINE)

    @property
    def failed(self) -> bool:
        """Whether its rank has failed: nothing in the slots is to be used any more."""
        return self._memory[0] != 0

    def fail(self) -> None:
        self._memory[0] = 1

    def hide(self) -> None:
        """From now on nobody else can open it; who has keeps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Gives the memory back, or leaves it to a view that an error's traceback still holds."""
        del self.slots
        with contextlib.suppress(BufferError):
            self._memory.close()


def _head(ranks: int) -> int:
    """Bytes before the first slot: whether the rank failed in a line, then each rank's semaphores."""
    return -(-_LINE * (1 + 2 * ranks) // mmap.PAGESIZE) * mmap.PAGESIZE
