"""Blocks passed from the rank that reads them to those that need them too.

On one machine through shared memory, where there is some; else over the process group. A few slots per rank
are used again and again: a slot is free when all who were to take from it have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from perdure.engine.demand import Unit
from perdure.engine.ranks import Ranks
from perdure.engine.segment import SLOTS, Segment
from perdure.format.digest import BLOCK

__all__ = ["Forward"]

_DOING = "passing on what was read"


class Forward:
    """The slots of this rank, and a way to those of the others. Made and closed by all ranks together.

    Args:
        share_memory: use shared memory with the ranks that can see ours.
    """

    def __init__(self, ranks: Ranks, share_memory: bool = True) -> None:
        self._ranks = ranks
        self._own = Segment.make(ranks.size, share_memory)
        try:
            told: list[tuple[str, str]] = ranks.gather((self._own.path, self._own.name), _DOING)
            self._seen = [
                None if rank == ranks.rank else Segment.open(path, name, ranks.size)
                for rank, (path, name) in enumerate(told)
            ]
            sees: list[list[bool]] = ranks.gather([segment is not None for segment in self._seen], _DOING)
        finally:
            self._own.hide()
        self._near = [row[ranks.rank] for row in sees]
        self._scratch: Tensor | None = None
        self._busy: deque[list[Callable[[], None]]] = deque()
        self._settled = 0

    def slot(self, turn: int) -> Tensor:
        """Memory for one unit of this rank's, free: waits for those who still have to take what was there before.

        Args:
            turn: the unit's; all but the last few before it must have been passed on.
        """
        while self._settled <= turn - SLOTS:
            self._settle()
        return self._own.slots[turn % SLOTS]

    def pass_on(self, unit: Unit, size: int, failed: bool) -> None:
        """Offers what was read in a unit's slot to the other ranks that need it, or tells them that it failed."""
        if failed:
            self._own.fail()
        waits: list[Callable[[], None]] = []
        for rank in unit.needed_by:
            if rank == self._ranks.rank:
                continue
            if self._near[rank]:
                self._own.told(rank).post()
                waits.append(partial(self._ranks.await_near, self._own.taken(rank).wait, _DOING))
                continue
            word = torch.tensor([int(failed)], device="cpu")
            waits.append(self._ranks.send(word, rank, 2 * unit.turn, _DOING))
            if not failed:
                waits.append(self._ranks.send(self._data(self._own, unit, size), rank, 2 * unit.turn + 1, _DOING))
        self._busy.append(waits)

    def take(self, unit: Unit, size: int, use: Callable[[Tensor], None]) -> bool:
        """Gives `use` the bytes of a unit that another rank has read; False where that rank failed."""
        segment = self._seen[unit.reader]
        if segment is None:
            return self._receive(unit, size, use)
        self._ranks.await_near(segment.told(self._ranks.rank).wait, _DOING)
        failed = segment.failed
        try:
            if not failed:
                use(self._data(segment, unit, size))
        finally:
            # Its reader waits for this, whatever came of it here.
            segment.taken(self._ranks.rank).post()
        return not failed

    def finish(self) -> None:
        """Waits until all who were to take from a slot have."""
        while self._busy:
            self._settle()

    @staticmethod
    def _data(segment: Segment, unit: Unit, size: int) -> Tensor:
        return segment.slots[unit.turn % SLOTS][:size]

    def _receive(self, unit: Unit, size: int, use: Callable[[Tensor], None]) -> bool:
        failed = torch.empty(1, dtype=torch.int64, device="cpu")
        self._ranks.receive(failed, unit.reader, 2 * unit.turn, _DOING)()
        if failed.item():
            return False
        if self._scratch is None:
            self._scratch = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        data = self._scratch[:size]
        self._ranks.receive(data, unit.reader, 2 * unit.turn + 1, _DOING)()
        use(data)
        return True

    def _settle(self) -> None:
        for wait in self._busy.popleft():
            wait()
        self._settled += 1

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for segment in (self._own, *self._seen):
            if segment is not None:
                segment.close()
