"""What a run has decided by itself to leave out of its sample stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LeftOut"]


@dataclass(frozen=True)
class LeftOut:
    """Half-open ranges of stream positions, one for each time that the run went back, oldest first."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, training: Mapping[str, Any]) -> LeftOut:
        """Those that a checkpoint's metadata records."""
        return cls(tuple((int(first), int(last)) for first, last in training.get("left_out", ())))

    def __or__(self, other: LeftOut) -> LeftOut:
        """These, and the other's that are not among them."""
        return LeftOut((*self.ranges, *(pair for pair in other.ranges if pair not in self.ranges)))

    def with_next(self, onset: int, last: int) -> LeftOut:
        """These and the samples from `onset` to before `last`.

        Where it goes wrong again right behind a range that is left out already (the step then begins before it),
        the cause lies further back: as many samples before that range are left out with it.
        """
        first = next((max(0, 2 * a - b) for a, b in reversed(self.ranges) if a <= onset <= b), onset)
        return LeftOut((*self.ranges, (first, last)))

    def record(self) -> list[list[int]]:
        """What metadata.json keeps of it."""
        return [list(pair) for pair in self.ranges]
