"""Keys can be undone word by word, and sums of samples are the same in any order and any split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.data.samples import index_of, sample_sum, sample_word
from perdure.format.keys import MASK, derive, extend, mix64, unextend, unmix64

LIMIT = 1 << 64
words = st.integers(0, MASK)


@given(words, words)
def test_mixing_is_undone(key: int, word: int) -> None:
    assert unmix64(mix64(word)) == word
    assert unextend(key, extend(key, word)) == word
    assert derive(key, word) == extend(derive(key), word)


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**60)), max_size=20))
def test_a_sum_of_samples_is_that_of_its_parts_in_any_order(samples: list[tuple[int, int]]) -> None:
    whole = sample_sum([p for p, _ in samples], [i for _, i in samples])
    assert whole == sum(sample_word(p, i) for p, i in samples) & MASK
    turned = samples[::-1]
    assert whole == sample_sum([p for p, _ in turned], [i for _, i in turned])
    for position, index in samples:
        assert index_of(position, sample_word(position, index)) == index


def test_the_sum_is_the_one_that_the_reference_describes() -> None:
    def m(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % LIMIT
        z = (z ^ z >> 27) * 0x94D049BB133111EB % LIMIT
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15

    def e(key: int, word: int) -> int:
        return m(((key ^ word) + golden) % LIMIT)

    key = e(golden, 0x6C6564676572)
    samples = [(0, 5), (7, 0), (10**15, 10**17)]
    expected = sum(e(e(key, position), index) for position, index in samples) % LIMIT
    assert sample_sum([p for p, _ in samples], [i for _, i in samples]) == expected
