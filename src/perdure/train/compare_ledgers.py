"""Two ledgers side by side: whether two runs had the same samples, whatever their batches were.

The sums of steps add up, so runs of different batch sizes can be compared wherever steps of both end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from perdure.format.keys import MASK
from perdure.train.ledger import Ledger

__all__ = ["Comparison", "Stretch", "compare"]

Place = tuple[int, int]


@dataclass(frozen=True)
class Stretch:
    """Stream positions [first, last), between two places where steps of both runs end.

    Attributes:
        first, last: the positions.
        step, other_step: number of the step in which each run came to `last`.
        same: whether the samples were the same.
    """

    first: int
    last: int
    step: int
    other_step: int
    same: bool


@dataclass
class Comparison:
    """How two runs compare.

    Attributes:
        path, other: the ledgers.
        stretches: how many stretches both runs have.
        step_by_step: whether each of them is one step of each run.
        different: those with other samples.
        only_here, only_there: stream positions that just one of them came to.
    """

    path: str
    other: str
    stretches: int = 0
    step_by_step: bool = True
    different: list[Stretch] = field(default_factory=list)
    only_here: list[tuple[int, int]] = field(default_factory=list)
    only_there: list[tuple[int, int]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether all that both came to was the same."""
        return self.stretches > 0 and not self.different


@dataclass(frozen=True)
class _End:
    """Where a step ends: its place, the sum of all samples up to there, and its number."""

    place: Place
    total: int
    step: int
    count: int


def compare(ledger: Ledger, other: Ledger) -> Comparison:
    """Compares the steps that stand in two ledgers."""
    found = Comparison(ledger.path, other.path)
    mine, theirs = list(_ends(ledger)), list(_ends(other))
    there = {end.place: end for end in theirs}
    common = [(end, there[end.place]) for end in mine if end.place in there]
    for (a, b), (c, d) in pairwise(common):
        if a.place[0] != c.place[0]:
            continue
        same = (c.total - a.total) & MASK == (d.total - b.total) & MASK
        stretch = Stretch(a.place[1], c.place[1], c.step, d.step, same)
        found.stretches += 1
        found.step_by_step &= c.count - a.count == d.count - b.count == 1
        if not same:
            found.different.append(stretch)
    bounds = (common[0][0].place, common[-1][0].place) if common else None
    found.only_here, found.only_there = _beyond(mine, bounds), _beyond(theirs, bounds)
    return found


def _ends(ledger: Ledger) -> Iterator[_End]:
    part = total = count = 0
    position: int | None = None
    for _, step in ledger.standing:
        first, last = step.samples
        if position is None or first < position:
            # Data begun afresh count as a stream of their own.
            part += position is not None
            yield _End((part, first), total, step.step - 1, count)
        total = (total + step.sum) & MASK
        position, count = last, count + 1
        yield _End((part, last), total, step.step, count)


def _beyond(ends: list[_End], bounds: tuple[Place, Place] | None) -> list[tuple[int, int]]:
    """What lies before and after the places that both have."""
    if not ends:
        return []
    first, last = bounds or (ends[-1].place, ends[-1].place)
    pairs = ((ends[0].place, first), (last, ends[-1].place))
    return [(a[1], b[1]) for a, b in pairs if a[0] == b[0] and a[1] < b[1]]
