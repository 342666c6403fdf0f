"""Several sources in fixed proportions, by arithmetic: no table of samples.

The stream is cut into blocks. Every block holds exactly the same number of samples of each source, in a
seeded order of its own; the k-th sample of a source is the k-th of that source's own sample stream, so
each source goes through its own epochs in its own order. Weights may change from a position on, at the
next block boundary, and every source goes on where it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Any

import msgspec

from perdure.data.identity import identity_of
from perdure.data.order import EpochOrder, permuted
from perdure.errors import DataError, UsageError
from perdure.format.keys import MASK, check_seed, derive, is_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MAX_BLOCK", "Mixture", "MixtureOrder", "MixtureRecord", "block_counts"]

MAX_BLOCK = 10_000
_MIN_BLOCK = 256
_BLOCKS, _SOURCE = 0x626C6F636B73, 0x736F75726365


class MixtureRecord(msgspec.Struct, frozen=True):
    """Lengths of the sources, and their weights (as fractions) from positions on."""

    lengths: list[int]
    schedule: list[tuple[int, list[str]]]


class Mixture:
    """A data set made of several, in proportion to weights.

    Its indices are those of the sources in a row: index i of source s is i plus the lengths of the
    sources before s. The order in which they come is `stream_order`, which `ResumableLoader` uses.

    Args:
        datasets: map-style data sets; or mappings with `type`, its further keys, and `weight`.
        weights: one number per data set, in any unit; default: the mappings' `weight`, else their lengths.
        changes: `{"at": position, "weights": [...]}` in ascending order: new weights from the first block
            boundary at or after that stream position on. A weight of 0 keeps a source out; weights left out
            at the end of a list are 0, so that a source can be added later.

    Raises:
        DataError: there is no data set, or one is empty.
        UsageError: weights or changes are impossible.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        *,
        weights: Sequence[float] | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if not datasets:
            raise DataError("a mixture needs at least one data set")
        own_weights = [item.get("weight") for item in datasets if isinstance(item, Mapping)]
        self.datasets = [_built(item) for item in datasets]
        self.lengths = [len(dataset) for dataset in self.datasets]
        for number, length in enumerate(self.lengths):
            if length == 0:
                raise DataError(f"data set {number} of the mixture is empty")
        if weights is None:
            given = any(weight is not None for weight in own_weights)
            weights = [0 if weight is None else weight for weight in own_weights] if given else self.lengths
        self.schedule = _schedule(weights, changes, len(self.datasets))
        self.draws_random = any(bool(getattr(dataset, "draws_random", True)) for dataset in self.datasets)
        self._ends = list(accumulate(self.lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number, inside = self._locate(index)
        return self.datasets[number][inside]

    @property
    def vocab_size(self) -> int | None:
        """The largest of the sources'; None where one does not say."""
        sizes = [getattr(dataset, "vocab_size", None) for dataset in self.datasets]
        return None if any(size is None for size in sizes) else max(int(size) for size in sizes if size is not None)

    def stream_order(self, seed: int, shuffle: bool) -> MixtureOrder:
        """Which index stands at which stream position, for `ResumableLoader`."""
        return MixtureOrder(self.lengths, self.schedule, seed, shuffle=shuffle)

    def mixture_record(self) -> MixtureRecord:
        """What the order depends on, for the ledger."""
        return MixtureRecord(self.lengths, [(at, [str(w) for w in weights]) for at, weights in self.schedule])

    def identity(self) -> dict[str, Any]:
        """Type, summed length, the sources' identities, and the weights with their changes."""
        return {
            "type": "Mixture",
            "length": len(self),
            "fingerprint": None,
            "sources": [identity_of(dataset, type(dataset).__qualname__, len(dataset)) for dataset in self.datasets],
            "weights": [[at, [str(weight) for weight in weights]] for at, weights in self.schedule],
        }

    def whereabouts(self, index: int) -> str:
        """The source and, where it knows, file and offset."""
        number, inside = self._locate(index)
        whereabouts = getattr(self.datasets[number], "whereabouts", None)
        place = f", {whereabouts(inside)}" if whereabouts else ""
        return f"sample {inside} of data set {number}{place}"

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside [0, {len(self)})")
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.lengths[number])


Schedule = tuple[tuple[int, tuple[Fraction, ...]], ...]


@dataclass(frozen=True)
class _Segment:
    """A stretch of equal weights: where it starts, its block, and how far each source was by then."""

    start: int
    size: int
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    drawn: tuple[int, ...]


class MixtureOrder:
    """The stream of a mixture over sources of the given lengths.

    Args:
        lengths: samples per source.
        schedule: (position, weights) pairs, the first at 0.
        seed: the run's seed.
        shuffle: False: each source's samples in their own order; the sources still take turns by seed.
    """

    def __init__(self, lengths: Sequence[int], schedule: Schedule, seed: int, *, shuffle: bool = True) -> None:
        self.seed = check_seed(seed)
        self._offsets = [0, *accumulate(lengths)]
        self._orders = [
            EpochOrder(length, derive(_SOURCE, seed, number), shuffle=shuffle) for number, length in enumerate(lengths)
        ]
        self._segments = _segments(schedule, len(lengths))
        self._starts = [segment.start for segment in self._segments]

    def gather(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Indices at the stream positions of ranges [first, last), in a row."""
        import numpy as np

        pieces = [np.arange(first, last) for first, last in runs]
        if not pieces:
            return []
        source, draw = self._draws(np.concatenate(pieces))
        result = np.empty(len(source), dtype=np.int64)
        for number, order in enumerate(self._orders):
            mine = np.flatnonzero(source == number)
            if len(mine):
                result[mine] = order.at(draw[mine]) + self._offsets[number]
        indices: list[int] = result.tolist()
        return indices

    def draw(self, position: int) -> tuple[int, int]:
        """(source, number of that source's draw) at a stream position."""
        import numpy as np

        sources, draws = self._draws(np.array([position]))
        return int(sources[0]), int(draws[0])

    def _draws(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sources and draw numbers at stream positions."""
        import numpy as np

        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        source, draw = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            segment, mine = self._segments[number], numbers == number
            block, index = np.divmod(positions[mine] - segment.start, segment.size)
            slots = permuted(segment.size, derive(_BLOCKS, self.seed, number), block, index)
            starts = np.asarray(segment.starts, dtype=np.int64)
            # Sources of weight 0 have empty slots; the last of equal starts is the one that holds the slot.
            own = np.searchsorted(starts, slots, side="right") - 1
            counts = np.asarray(segment.counts, dtype=np.int64)
            base = np.asarray(segment.drawn, dtype=np.int64) - starts
            source[mine], draw[mine] = own, base[own] + block * counts[own] + slots
        return source, draw


def block_counts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Samples of each source in a block: exact where a block of at most `MAX_BLOCK` can be, else nearest.

    Largest remainders get what rounding down leaves over.

    Raises:
        UsageError: no weight is positive, or a positive one is too small for a block.
    """
    total = sum(weights)
    if total <= 0 or any(weight < 0 for weight in weights):
        raise UsageError("weights must not be negative, and one must be positive")
    shares = [weight / total for weight in weights]
    exact = lcm(*(share.denominator for share in shares))
    size = exact * -(-_MIN_BLOCK // exact) if exact <= MAX_BLOCK else MAX_BLOCK
    counts = [int(share * size) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: (counts[number] - shares[number] * size, number))
    for number in by_remainder[: size - sum(counts)]:
        counts[number] += 1
    for number, (count, share) in enumerate(zip(counts, shares, strict=True)):
        if share > 0 and count == 0:
            raise UsageError(f"weight {number} is too small: its share is below 1 in {MAX_BLOCK}")
    return tuple(counts)


def _segments(schedule: Schedule, sources: int) -> list[_Segment]:
    segments: list[_Segment] = []
    for at, weights in schedule:
        counts = block_counts(weights)
        start, drawn = 0, (0,) * sources
        if segments:
            last = segments[-1]
            blocks = max(0, -(-(at - last.start) // last.size))
            start = last.start + blocks * last.size
            drawn = tuple(d + blocks * c for d, c in zip(last.drawn, last.counts, strict=True))
            if start == last.start:
                segments.pop()
        starts = (0, *accumulate(counts))[:-1]
        segments.append(_Segment(start, sum(counts), counts, starts, drawn))
    return segments


def _schedule(weights: Sequence[Any], changes: Sequence[Mapping[str, Any]], sources: int) -> Schedule:
    schedule = [(0, _fractions(weights, sources))]
    for change in changes:
        if set(change) != {"at", "weights"}:
            raise UsageError(f"changes must be entries with `at` and `weights`, not {change!r}")
        if not is_whole(change["at"], MASK, schedule[-1][0] + 1):
            raise UsageError(f"changes must be at ascending positions above 0, not {change['at']!r}")
        schedule.append((change["at"], _fractions(change["weights"], sources)))
    for _, fractions in schedule:
        block_counts(fractions)
    return tuple(schedule)


def _fractions(weights: Sequence[Any], sources: int) -> tuple[Fraction, ...]:
    if len(weights) > sources:
        raise UsageError(f"weights: {len(weights)} are given for {sources} data sets")
    try:
        # By their decimal digits: 0.7 means seven tenths, not the nearest binary fraction.
        given = [Fraction(str(weight)) for weight in weights]
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"weights must be finite numbers, not {list(weights)!r}") from error
    return (*given, *[Fraction(0)] * (sources - len(given)))


def _built(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    from perdure.data.sources.registry import build_source

    keys = {key: value for key, value in item.items() if key not in ("type", "weight")}
    if not isinstance(item.get("type"), str):
        raise UsageError(f"datasets: each entry needs a `type`, but has only {', '.join(map(str, item))}")
    return build_source(item["type"], keys)
