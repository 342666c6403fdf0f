"""Which samples a step had, as one number: a sum that no order and no split over ranks changes.

Each sample counts with a key of its stream position and its data set index. The key is a bijection of the
index, so that from the sum of a step alone the audit finds the sample that is too many, missing or wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from perdure.format.keys import GAMMA, MASK, MULTIPLIER_1, MULTIPLIER_2, derive, extend, unextend

__all__ = ["index_of", "sample_sum", "sample_sums", "sample_word"]

_KEY = derive(0x6C6564676572)
_FEW = 16  # samples that are added up sooner than arrays are made


def sample_word(position: int, index: int) -> int:
    """What the sample of this data set index at this stream position adds to the sum."""
    return extend(extend(_KEY, position), index)


def index_of(position: int, word: int) -> int:
    """The data set index that adds `word` at a stream position."""
    return unextend(extend(_KEY, position), word)


def sample_sum(positions: Iterable[int], indices: Iterable[int]) -> int:
    """The sum of `sample_word` over samples, modulo 2^64."""
    places, found = list(positions), list(indices)
    if len(places) <= _FEW:
        return sum(map(sample_word, places, found)) & MASK
    return int(np.sum(_words(places, found), dtype=np.uint64)) & MASK


def sample_sums(positions: Iterable[int], indices: Iterable[int], counts: Iterable[int]) -> list[int]:
    """The sums of consecutive groups of samples, given how many are in each (at least one)."""
    ends = np.cumsum(np.fromiter(counts, dtype=np.int64))
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    sums: list[int] = np.add.reduceat(_words(positions, indices), begins).tolist()
    return sums


def _words(positions: Iterable[int], indices: Iterable[int]) -> NDArray[np.uint64]:
    key = _extended(np.uint64(_KEY), np.fromiter(positions, dtype=np.uint64))
    return _extended(key, np.fromiter(indices, dtype=np.uint64))


def _extended(key: NDArray[np.uint64] | np.uint64, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Arrays wrap around silently, as the scalar form does by its mask.
    state = words ^ key
    state += np.uint64(GAMMA)
    state ^= state >> np.uint64(30)
    state *= np.uint64(MULTIPLIER_1)
    state ^= state >> np.uint64(27)
    state *= np.uint64(MULTIPLIER_2)
    state ^= state >> np.uint64(31)
    return state
