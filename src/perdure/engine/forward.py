"""Blocks passed from the rank that reads them to those that need them too.

On one machine through shared memory, where there is some; else over the process group. A few slots per rank
are used again and again: a slot is free when all who were to take from it have.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from perdure.engine.ranks import Ranks
from perdure.format.digest import BLOCK

__all__ = ["SLOTS", "Forward"]

SLOTS = 2
_SHARED = "/dev/shm"
_MARK = 4096
# Page by page, each rank would take as long to see the memory as to copy it.
_SEEN_AT_ONCE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_DOING = "passing on what was read"


class Forward:
    """The slots of this rank, and a way to those of the others. Made and closed by all ranks together.

    Args:
        share_memory: use shared memory with the ranks that can see ours.
    """

    def __init__(self, ranks: Ranks, share_memory: bool = True) -> None:
        self._ranks = ranks
        self._memory, path, mark = _make(share_memory)
        told: list[tuple[str, bytes]] = ranks.gather((path, mark), _DOING)
        self._seen = [
            None if rank == ranks.rank else _open(where, expected) for rank, (where, expected) in enumerate(told)
        ]
        sees: list[list[bool]] = ranks.gather([memory is not None for memory in self._seen], _DOING)
        self._near = [row[ranks.rank] for row in sees]
        if path:
            # Everybody who can has it open: nothing is left behind, whatever happens.
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._slots = torch.frombuffer(self._memory, dtype=torch.uint8)[_MARK:].view(SLOTS, BLOCK)
        self._scratch: Tensor | None = None
        self._busy: deque[list[Callable[[], None]]] = deque()
        self._settled = 0

    def slot(self, turn: int) -> Tensor:
        """Memory for one unit, free: waits for those who still have to take what was there before.

        Args:
            turn: how many units came before; all but the last few of them must have been passed on.
        """
        while self._settled <= turn - SLOTS:
            self._settle()
        return self._slots[turn % SLOTS]

    def pass_on(self, turn: int, size: int, number: int, to: Sequence[int], failed: bool) -> None:
        """Offers what was read in slot number `turn` to the ranks that need it, or tells them that it failed."""
        told = torch.tensor([int(failed), turn % SLOTS])
        waits = []
        for rank in to:
            waits.append(self._ranks.send(told, rank, 4 * number, _DOING))
            if failed:
                continue
            if self._near[rank]:
                waits.append(self._ranks.receive(torch.empty(1, dtype=torch.int64), rank, 4 * number + 1, _DOING))
            else:
                waits.append(self._ranks.send(self._slots[turn % SLOTS, :size], rank, 4 * number + 2, _DOING))
        self._busy.append(waits)

    def take(self, number: int, source: int, size: int, use: Callable[[Tensor], None]) -> bool:
        """Gives `use` the bytes of a unit that another rank has read; False where that rank failed."""
        told = torch.empty(2, dtype=torch.int64)
        self._ranks.receive(told, source, 4 * number, _DOING)()
        failed, slot = told.tolist()
        if failed:
            return False
        memory = self._seen[source]
        if memory is None:
            if self._scratch is None:
                self._scratch = torch.empty(BLOCK, dtype=torch.uint8)
            data = self._scratch[:size]
            self._ranks.receive(data, source, 4 * number + 2, _DOING)()
            use(data)
            return True
        try:
            use(torch.frombuffer(memory, dtype=torch.uint8)[_MARK + slot * BLOCK :][:size])
        finally:
            # Its reader waits for this, whatever came of it here.
            self._ranks.send(torch.zeros(1, dtype=torch.int64), source, 4 * number + 1, _DOING)()
        return True

    def finish(self) -> None:
        """Waits until all who were to take from a slot have."""
        while self._busy:
            self._settle()

    def _settle(self) -> None:
        for wait in self._busy.popleft():
            wait()
        self._settled += 1

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del self._slots
        # A view that an error's traceback still holds keeps the memory until that is gone.
        for memory in (self._memory, *self._seen):
            if memory is not None:
                with contextlib.suppress(BufferError):
                    memory.close()


def _make(share: bool) -> tuple[mmap.mmap, str, bytes]:
    """Memory for the slots; where it is shared, its path and a mark by which it is known."""
    size, mark = _MARK + SLOTS * BLOCK, os.urandom(16)
    path = f"{_SHARED}/perdure-{os.getpid()}-{mark.hex()}"
    if share:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Room that isn't there must be found out here, not by a signal later.
                os.posix_fallocate(fd, 0, size)
                memory = mmap.mmap(fd, size, flags=_SEEN_AT_ONCE)
                memory[:16] = mark
                return memory, path, mark
            except OSError:
                os.unlink(path)
            finally:
                os.close(fd)
    return mmap.mmap(-1, size), "", mark


def _open(path: str, mark: bytes) -> mmap.mmap | None:
    """Another rank's slots, if they can be seen from here."""
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        memory = mmap.mmap(fd, _MARK + SLOTS * BLOCK, flags=_SEEN_AT_ONCE)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    if memory[:16] == mark:
        return memory
    memory.close()
    return None
