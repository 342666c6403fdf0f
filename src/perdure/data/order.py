"""Sample order as a function: a keyed permutation of [0, length), computed index by index.

No list and no state: index i of epoch e costs the same at any length up to 2^60. The order is part
of the format (`ORDER_VERSION`): a resumed run must meet the samples that the first one would have.

Version 1. Up to `SMALL` samples: a Fisher-Yates shuffle. Above: a Feistel network over pairs
(left, right) with left < a, right < b, where a = ceil(sqrt(length)) and b = ceil(length / a), so that
a * b exceeds the length by less than a. Each round adds, modulo a or b, a keyed hash of the other
half; results outside the length walk on along their cycle until they fall inside, which is rare
because the domain fits tightly (fewer than one index in sqrt(length)).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any, Protocol

from perdure.errors import UsageError
from perdure.format.keys import GAMMA, MASK, MULTIPLIER_1, MULTIPLIER_2, check_seed, derive, is_whole, mix64

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MAX_LENGTH", "ORDER_VERSION", "SMALL", "EpochOrder", "Order", "Permutation", "permuted"]

ORDER_VERSION = 1
MAX_LENGTH = 1 << 60
SMALL = 256

_PURPOSE = 0x6F72646572  # keeps order keys apart from those of random streams
_ROUNDS_LARGE = 6
_ROUNDS_SMALL = 12
_MANY_ROUNDS_BELOW = 1 << 16
# 34 hash bits times a radix of at most 2^30 still fit 64 bits.
_HASH_BITS = 34
_SCALAR_BELOW = 24


class Permutation:
    """A bijection on [0, length) keyed by (seed, epoch).

    Args:
        length: number of samples, 1 to 2^60.
        seed: the run's seed, in [0, 2^64).
        epoch: 0-based epoch, in [0, 2^64).

    Raises:
        UsageError: an argument is outside its range.
    """

    __slots__ = ("_a", "_b", "_inverse_table", "_keys", "_table", "epoch", "length", "seed")

    def __init__(self, length: int, seed: int, epoch: int = 0) -> None:
        check_length(length)
        check_seed(seed)
        if not is_whole(epoch, MASK):
            raise UsageError(f"epoch must be an integer in [0, 2^64), not {epoch!r}")
        self.length = length
        self.seed = seed
        self.epoch = epoch
        key = derive(_PURPOSE, seed, epoch, length)
        self._table: tuple[int, ...] | None = None
        self._inverse_table: tuple[int, ...] | None = None
        if length <= SMALL:
            self._table = _fisher_yates(length, key)
            return
        self._a, self._b = _radices(length)
        rounds = _ROUNDS_SMALL if length < _MANY_ROUNDS_BELOW else _ROUNDS_LARGE
        self._keys = tuple(mix64((key + r * GAMMA) & MASK) for r in range(1, rounds + 1))

    def __call__(self, index: int) -> int:
        """Where `index` goes. Raises IndexError outside [0, length)."""
        self._check(index)
        if self._table is not None:
            return self._table[index]
        value = self._forward(index)
        while value >= self.length:
            value = self._forward(value)
        return value

    def inverse(self, value: int) -> int:
        """The index that goes to `value`. Raises IndexError outside [0, length)."""
        self._check(value)
        if self._table is not None:
            if self._inverse_table is None:
                self._inverse_table = tuple(sorted(range(self.length), key=self._table.__getitem__))
            return self._inverse_table[value]
        index = self._backward(value)
        while index >= self.length:
            index = self._backward(index)
        return index

    def batch(self, indices: NDArray[Any]) -> NDArray[np.int64]:
        """The same for an integer array of any shape; bit-identical to calling one by one.

        Returns an int64 array of the same shape. Raises IndexError when an index is outside
        [0, length).
        """
        import numpy as np

        given = np.asarray(indices)
        if given.size == 0:
            return np.zeros(given.shape, dtype=np.int64)
        if given.dtype.kind not in "iu":
            raise UsageError(f"indices must be integers, not {given.dtype}")
        self._check(int(given.min()))
        self._check(int(given.max()))
        if self._table is not None:
            looked_up: NDArray[np.int64] = np.asarray(self._table, dtype=np.int64)[given]
            return looked_up
        keys = np.array(self._keys, dtype=np.uint64)[:, None]
        return _permuted(given.reshape(-1), self.length, keys).reshape(given.shape)

    def slice(self, start: int, stop: int) -> list[int]:
        """Where the indices of [start, stop) go, as plain integers."""
        if stop - start < _SCALAR_BELOW or self._table is not None:
            return [self(i) for i in range(start, stop)]
        import numpy as np

        values: list[int] = self.batch(np.arange(start, stop, dtype=np.uint64)).tolist()
        return values

    def _check(self, index: int) -> None:
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside [0, {self.length})")

    def _forward(self, index: int) -> int:
        a, b = self._a, self._b
        left, right = divmod(index, b)
        keys = iter(self._keys)
        for key in keys:
            left += ((mix64(right ^ key) >> 30) * a) >> _HASH_BITS
            if left >= a:
                left -= a
            right += ((mix64(left ^ next(keys)) >> 30) * b) >> _HASH_BITS
            if right >= b:
                right -= b
        return left * b + right

    def _backward(self, value: int) -> int:
        a, b = self._a, self._b
        left, right = divmod(value, b)
        keys = iter(reversed(self._keys))
        for key in keys:
            right -= ((mix64(left ^ key) >> 30) * b) >> _HASH_BITS
            if right < 0:
                right += b
            left -= ((mix64(right ^ next(keys)) >> 30) * a) >> _HASH_BITS
            if left < 0:
                left += a
        return left * b + right


class Order(Protocol):
    """Which data set index stands at which stream position."""

    def gather(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Data set indices at the stream positions of ascending ranges [first, last), in a row."""
        ...


class EpochOrder:
    """The run's sample stream over a dataset: epoch after epoch, each in its own order.

    Args:
        length: number of samples, 1 to 2^60.
        seed: the run's seed.
        shuffle: False gives 0, 1, 2, ... in every epoch.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool = True) -> None:
        self.length = check_length(length)
        self.seed = check_seed(seed)
        self.shuffle = shuffle

    def slice(self, first: int, last: int) -> list[int]:
        """Dataset indices at the stream positions [first, last)."""
        return self.gather([(first, last)])

    def gather(self, runs: Iterable[tuple[int, int]]) -> list[int]:
        """Dataset indices at the stream positions of ranges [first, last), in a row; vectorised over them all."""
        indices: list[int] = []
        pieces: list[tuple[int, int]] = []
        epoch = 0
        for first, last in runs:
            while first < last:
                at, start = divmod(first, self.length)
                stop = min(self.length, start + last - first)
                if at != epoch:
                    indices += self._in_epoch(epoch, pieces)
                    epoch, pieces = at, []
                pieces.append((start, stop))
                first += stop - start
        indices += self._in_epoch(epoch, pieces)
        return indices

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Dataset indices at stream positions below 2^63, given as an int64 array in any order."""
        import numpy as np

        epochs, indices = np.divmod(positions, self.length)
        if not self.shuffle:
            return indices
        return permuted(self.length, self.seed, epochs, indices)

    def _in_epoch(self, epoch: int, pieces: list[tuple[int, int]]) -> list[int]:
        if not self.shuffle or not pieces:
            return [index for start, stop in pieces for index in range(start, stop)]
        permutation = _permutation(self.length, self.seed, epoch)
        if len(pieces) == 1:
            return permutation.slice(*pieces[0])
        import numpy as np

        given = np.concatenate([np.arange(start, stop, dtype=np.uint64) for start, stop in pieces])
        values: list[int] = permutation.batch(given).tolist()
        return values


def check_length(length: int) -> int:
    """The length itself.

    Raises:
        UsageError: it is not an integer in [1, 2^60].
    """
    if not is_whole(length, MAX_LENGTH, 1):
        raise UsageError(f"length must be an integer from 1 to 2^60, not {length!r}")
    return length


def permuted(length: int, seed: int, epochs: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """`Permutation(length, seed, epoch)(index)` for pairs of both, given and returned as int64 arrays of shape (n,)."""
    import numpy as np

    distinct, which = np.unique(epochs, return_inverse=True)
    permutations = [_permutation(length, seed, epoch) for epoch in distinct.tolist()]
    if length > SMALL:
        keys = np.array([permutation._keys for permutation in permutations], dtype=np.uint64).T
        return _permuted(indices, length, keys if len(distinct) == 1 else keys[:, which])
    tables = np.array([permutation._table for permutation in permutations], dtype=np.int64)
    result: NDArray[np.int64] = tables[which, indices]
    return result


@lru_cache(maxsize=16)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, seed, epoch)


def _radices(length: int) -> tuple[int, int]:
    """How many left and right halves there are."""
    a = isqrt(length - 1) + 1
    return a, -(-length // a)


def _permuted(indices: NDArray[Any], length: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The network over an array of shape (n,); keys have shape (rounds, n), or (rounds, 1) where all have the same."""
    import numpy as np

    values = _forward_batch(indices.astype(np.uint64), length, keys)
    outside = np.flatnonzero(values >= np.uint64(length))
    while outside.size:
        walked = _forward_batch(values[outside], length, keys if keys.shape[1] == 1 else keys[:, outside])
        values[outside] = walked
        outside = outside[walked >= np.uint64(length)]
    return values.astype(np.int64)


def _forward_batch(values: NDArray[np.uint64], length: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    import numpy as np

    a, b = map(np.uint64, _radices(length))
    left: NDArray[np.uint64] = values // b
    right: NDArray[np.uint64] = values - left * b
    work, shifted = np.empty_like(values), np.empty_like(values)
    for number, key in enumerate(keys):
        changed, other, radix = (right, left, b) if number % 2 else (left, right, a)
        _hash_into(other, key, radix, work, shifted)
        np.add(changed, work, out=changed)
        # Below the radix the subtraction wraps around to a huge number, so the minimum is x mod radix.
        np.subtract(changed, radix, out=work)
        np.minimum(changed, work, out=changed)
    left *= b
    left += right
    return left


def _fisher_yates(length: int, key: int) -> tuple[int, ...]:
    table = list(range(length))
    state = key
    for last in range(length - 1, 0, -1):
        state = (state + GAMMA) & MASK
        # The top half of a 64 x 64 bit product is uniform to within 2^-56.
        other = (mix64(state) * (last + 1)) >> 64
        table[last], table[other] = table[other], table[last]
    return tuple(table)


def _hash_into(
    values: NDArray[np.uint64],
    key: NDArray[np.uint64],
    radix: np.uint64,
    work: NDArray[np.uint64],
    shifted: NDArray[np.uint64],
) -> None:
    """Writes ((mix64(values ^ key) >> 30) * radix) >> 34 into `work`."""
    import numpy as np

    np.bitwise_xor(values, key, out=work)
    np.right_shift(work, np.uint64(30), out=shifted)
    np.bitwise_xor(work, shifted, out=work)
    np.multiply(work, np.uint64(MULTIPLIER_1), out=work)
    np.right_shift(work, np.uint64(27), out=shifted)
    np.bitwise_xor(work, shifted, out=work)
    np.multiply(work, np.uint64(MULTIPLIER_2), out=work)
    np.right_shift(work, np.uint64(31), out=shifted)
    np.bitwise_xor(work, shifted, out=work)
    np.right_shift(work, np.uint64(30), out=work)
    np.multiply(work, radix, out=work)
    np.right_shift(work, np.uint64(_HASH_BITS), out=work)
