"""A data set that has grown at its end: the epoch under way goes on over what it began with.

The stream is cut into stretches of equal length of the data set. A new stretch begins where an epoch ends,
so no sample of an epoch is repeated or missed when its data set grows in the middle of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from perdure.data.order import EpochOrder
from perdure.errors import DataError

__all__ = ["Counters", "GrownOrder", "Stretches", "counters", "grown"]

Stretches = tuple[tuple[int, int], ...]
"""(first stream position, length of the data set from there on), in order; the first begins at 0."""


class Counters(NamedTuple):
    """`epoch_num` and `step_num` of common.json."""

    epoch_num: int
    step_num: int


def counters(stretches: Stretches, consumed_samples: int, global_batch_size: int) -> Counters:
    """Epochs completed, whatever length each of them had, and whole steps in the present one (RESUME.md)."""
    number = bisect_right(stretches, consumed_samples, key=lambda stretch: stretch[0]) - 1
    start, length = stretches[number]
    epochs, index = divmod(consumed_samples - start, length)
    return Counters(_epochs_before(stretches)[number] + epochs, index // global_batch_size)


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
        epochs = _epochs_before(stretches)
        self._shifts = [before * length - start for before, (start, length) in zip(epochs, stretches, strict=True)]

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


def _epochs_before(stretches: Sequence[Sequence[int]]) -> list[int]:
    """How many epochs were completed when each stretch began."""
    whole = ((following[0] - start) // length for (start, length), following in pairwise(stretches))
    return list(accumulate(whole, initial=0))
