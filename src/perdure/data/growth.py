"""A data set that has grown at its end: the epoch under way goes on over what it began with.

The stream is cut into stretches of equal length of the data set. A new stretch begins where an epoch ends,
so no sample of an epoch is repeated or missed when its data set grows in the middle of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from perdure.data.order import EpochOrder
from perdure.errors import DataError

__all__ = ["GrownOrder", "Stretches", "grown"]

Stretches = tuple[tuple[int, int], ...]
"""(first stream position, length of the data set from there on), in order; the first begins at 0."""


def grown(stretches: Stretches, length: int, consumed_samples: int) -> Stretches:
    """The stretches of a data set that has `length` samples from the next epoch after `consumed_samples` on.

    Raises:
        DataError: it has become shorter.
    """
    start, before = stretches[-1]
    if length < before:
        raise DataError(f"the data set has {length} samples, but had {before}: it has not grown")
    if length == before:
        return stretches
    begun = max(0, -(-(consumed_samples - start) // before))
    kept = stretches if begun else stretches[:-1]
    return (*kept, (start + begun * before, length))


class GrownOrder:
    """The sample stream of a data set that has grown; each epoch in its own order over the length it has.

    Args:
        stretches: see `Stretches`.
        seed: the run's seed.
        shuffle: False gives 0, 1, 2, ... in every epoch.
    """

    def __init__(self, stretches: Sequence[Sequence[int]], seed: int, *, shuffle: bool = True) -> None:
        self._starts = [start for start, _ in stretches]
        self._orders = [EpochOrder(length, seed, shuffle=shuffle) for _, length in stretches]
        # How far a stretch's own positions are ahead, so that its epochs are numbered on.
        self._shifts = [0]
        epochs = 0
        for (start, length), (following, new_length) in pairwise(stretches):
            epochs += (following - start) // length
            self._shifts.append(epochs * new_length - following)

    def gather(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Data set indices at the stream positions of ranges [first, last), in a row."""
        indices: list[int] = []
        for first, last in runs:
            while first < last:
                number = bisect_right(self._starts, first) - 1
                stop = min(last, self._starts[number + 1]) if number + 1 < len(self._starts) else last
                shift = self._shifts[number]
                indices += self._orders[number].slice(first + shift, stop + shift)
                first = stop
        return indices
