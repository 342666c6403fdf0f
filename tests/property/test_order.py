"""The sample order is a bijection, the same one by one and in batches, and looks shuffled."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.data.order import MAX_LENGTH, SMALL, EpochOrder, Permutation
from perdure.errors import UsageError

seeds = st.integers(0, 2**64 - 1)
lengths = st.one_of(
    st.integers(1, 700),
    st.integers(1, MAX_LENGTH),
    st.sampled_from([2**k + d for k in (20, 40, 58) for d in (-1, 0, 1)]),
)


@pytest.mark.parametrize("length", [*range(1, 40), 255, 256, 257, 258, 289, 290, 1000, 4096, 65535, 65536, 65537])
def test_every_index_is_met_once(length: int) -> None:
    values = Permutation(length, 5, 2).batch(np.arange(length))
    assert sorted(values.tolist()) == list(range(length))


@given(length=lengths, seed=seeds, epoch=st.integers(0, 2**40), data=st.data())
def test_batch_call_slice_and_inverse_agree(length: int, seed: int, epoch: int, data: st.DataObject) -> None:
    permutation = Permutation(length, seed, epoch)
    indices = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=30))
    values = [permutation(i) for i in indices]
    assert permutation.batch(np.array(indices, dtype=np.uint64)).tolist() == values
    assert permutation.batch(np.array(indices, dtype=np.int64)).tolist() == values
    assert all(0 <= value < length for value in values)
    assert [permutation.inverse(value) for value in values] == indices
    start = indices[0]
    stop = min(length, start + 40)
    assert permutation.slice(start, stop) == [permutation(i) for i in range(start, stop)]


@pytest.mark.parametrize("length", [3, 4, 5])
def test_all_permutations_of_tiny_lengths_are_about_equally_frequent(length: int) -> None:
    draws = 12_000
    seen = Counter(tuple(Permutation(length, seed).slice(0, length)) for seed in range(draws))
    possible = {3: 6, 4: 24, 5: 120}[length]
    assert len(seen) == possible
    expected = draws / possible
    # Mean of chi-square is its degrees of freedom, deviation sqrt(2 df); five deviations never happen by chance.
    chi_square = sum((count - expected) ** 2 / expected for count in seen.values())
    assert chi_square < possible + 5 * (2 * possible) ** 0.5


@pytest.mark.parametrize("length", [SMALL, SMALL + 1, 1000])
def test_images_and_neighbours_are_uniform_over_seeds(length: int) -> None:
    draws = 8000
    firsts: Counter[int] = Counter()
    gaps: Counter[int] = Counter()
    for seed in range(draws):
        permutation = Permutation(length, seed)
        first, second = permutation(0), permutation(1)
        firsts[first] += 1
        gaps[(second - first) % length] += 1
    for counts, cells in ((firsts, length), (gaps, length - 1)):
        expected = draws / cells
        chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
        chi_square += (cells - len(counts)) * expected
        assert abs(chi_square - cells) < 6 * (2 * cells) ** 0.5


def test_epochs_and_seeds_are_uncorrelated_at_large_lengths() -> None:
    length, count = 10**12, 4096
    orders = [Permutation(length, seed, epoch).batch(np.arange(count)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert len(set(order.tolist())) == count
        assert abs(np.corrcoef(np.arange(count), order)[0, 1]) < 0.08
        assert abs(float(order.mean()) / length - 0.5) < 0.03
    assert abs(np.corrcoef(orders[0], orders[1])[0, 1]) < 0.08
    assert abs(np.corrcoef(orders[0], orders[2])[0, 1]) < 0.08


@given(
    length=st.integers(1, 50), seed=seeds, shuffle=st.booleans(), first=st.integers(0, 500), count=st.integers(0, 120)
)
@settings(max_examples=60)
def test_stream_is_the_concatenation_of_epochs(length: int, seed: int, shuffle: bool, first: int, count: int) -> None:
    stream = EpochOrder(length, seed, shuffle=shuffle)
    expected = []
    for position in range(first, first + count):
        epoch, index = divmod(position, length)
        expected.append(Permutation(length, seed, epoch)(index) if shuffle else index)
    assert stream.slice(first, first + count) == expected


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1, 2.0, True])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="2\\^60"):
        Permutation(length, 0)


def test_impossible_seeds_and_indices_are_refused() -> None:
    with pytest.raises(UsageError, match="seed"):
        Permutation(5, -1)
    with pytest.raises(UsageError, match="seed"):
        Permutation(5, 2**64)
    for length in (5, 500):
        with pytest.raises(IndexError):
            Permutation(length, 0)(length)
        with pytest.raises(IndexError):
            Permutation(length, 0).batch(np.array([0, -1]))
