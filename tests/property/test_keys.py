"""Keys can be undone word by word, and sums of samples are the same in any order and any split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perdure.data.samples import index_of, sample_sum, sample_word
from perdure.format.keys import MASK, derive, extend, mix64, unextend, unmix64

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
