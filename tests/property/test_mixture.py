"""Mixtures: exact proportions in every block, every source complete in each of its epochs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.data.loader import ResumableLoader
from perdure.data.mixture import MAX_BLOCK, Mixture, MixtureOrder, block_counts
from perdure.data.sources import build_source
from perdure.errors import DataError, UsageError

weights_of = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any)


def schedule_of(*pairs: tuple[int, list[Any]]) -> Any:
    return tuple((at, tuple(Fraction(str(weight)) for weight in weights)) for at, weights in pairs)


@given(weights=weights_of)
def test_counts_are_exact_proportions(weights: list[int]) -> None:
    counts = block_counts([Fraction(weight) for weight in weights])
    assert all(count * sum(weights) == weight * sum(counts) for count, weight in zip(counts, weights, strict=True))
    assert sum(counts) <= MAX_BLOCK


def test_counts_of_awkward_weights_are_the_nearest() -> None:
    weights = [Fraction("0.333333"), Fraction("0.333333"), Fraction("0.333334")]
    assert block_counts(weights) == (3333, 3333, 3334)
    with pytest.raises(UsageError, match="too small"):
        block_counts([Fraction(1), Fraction(1, 10**6)])


@given(weights=weights_of, seed=st.integers(0, 2**64 - 1), shuffle=st.booleans(), data=st.data())
@settings(max_examples=40)
def test_draws_of_each_source_are_all_numbers_once(
    weights: list[int], seed: int, shuffle: bool, data: st.DataObject
) -> None:
    lengths = [data.draw(st.integers(1, 60)) for _ in weights]
    order = MixtureOrder(lengths, schedule_of((0, weights)), seed, shuffle=shuffle)
    size = sum(block_counts([Fraction(weight) for weight in weights]))
    draws = [order.draw(position) for position in range(2 * size)]
    for block in (draws[:size], draws[size:]):
        counts = Counter(source for source, _ in block)
        assert all(counts[s] * sum(weights) == weight * size for s, weight in enumerate(weights))
    for source in range(len(weights)):
        numbers = sorted(number for s, number in draws if s == source)
        assert numbers == list(range(len(numbers)))
    whole = order.gather([(0, 2 * size)])
    cut = data.draw(st.integers(0, 2 * size))
    assert order.gather([(0, cut)]) + order.gather([(cut, 2 * size)]) == whole
    assert order.gather([(0, cut), (cut, 2 * size)]) == whole
    offset = 0
    for source, length in enumerate(lengths):
        seen = Counter(index - offset for index in whole if offset <= index < offset + length)
        complete, rest = divmod(sum(s == source for s, _ in draws), length)
        assert all(complete <= seen[index] <= complete + (rest > 0) for index in range(length))
        offset += length


def test_changes_take_hold_at_the_next_block_and_lose_nothing() -> None:
    first = schedule_of((0, [1, 1, 0]))
    both = schedule_of((0, [1, 1, 0]), (300, [1, 1, 2]))
    lengths = [50, 70, 30]
    before, after = MixtureOrder(lengths, first, 7), MixtureOrder(lengths, both, 7)
    assert before.gather([(0, 512)]) == after.gather([(0, 512)])
    draws = [after.draw(position) for position in range(512 + 512)]
    for source, expected in ((0, 256 + 128), (1, 256 + 128), (2, 256)):
        assert sorted(number for s, number in draws if s == source) == list(range(expected))


def test_a_far_position_is_arithmetic() -> None:
    order = MixtureOrder([10**12, 10**11], schedule_of((0, [0.7, 0.3])), 1)
    indices = order.gather([(10**15, 10**15 + 1000)])
    assert sum(index < 10**12 for index in indices) in range(600, 800)
    assert all(0 <= index < 10**12 + 10**11 for index in indices)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_follows_the_mixture_from_anywhere(num_workers: int) -> None:
    mixture = Mixture([range(100), range(1000, 1040)], weights=[3, 1])
    with ResumableLoader(mixture, global_batch_size=8, num_workers=num_workers, seed=4) as loader:
        whole = [batch.tolist() for step in loader.take(64) for batch in step]
        loader.set_init_step(20)
        assert [batch.tolist() for step in loader.take(44) for batch in step] == whole[20:]
    assert sum(sample >= 1000 for batch in whole[:32] for sample in batch) == 64
    assert mixture.whereabouts(101) == "sample 1 of data set 1"


def test_built_from_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 90)
    (tmp_path / "b.txt").write_text("b" * 50)
    keys = {
        "datasets": [
            {"type": "Text", "path": str(tmp_path / "a.txt"), "seq_length": 9, "weight": 0.75},
            {"type": "Text", "path": str(tmp_path / "b.txt"), "seq_length": 9, "weight": 0.25},
        ]
    }
    mixture = build_source("Mixture", keys)
    assert len(mixture) == 15
    assert mixture.draws_random is False
    assert mixture.vocab_size == 257
    assert Mixture([[1], mixture]).vocab_size is None
    assert mixture.identity()["weights"] == [[0, ["3/4", "1/4"]]]
    assert [source["type"] for source in mixture.identity()["sources"]] == ["Text", "Text"]
    assert "b.txt at byte 9" in mixture.whereabouts(11)


def test_impossible_mixtures_are_refused() -> None:
    cases: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
        ([], {}, DataError, "at least one"),
        ([[]], {}, DataError, "is empty"),
        ([[1]], {"weights": [1, 2]}, UsageError, "2 are given for 1"),
        ([[1]], {"weights": [0]}, UsageError, "one must be positive"),
        ([[1], [2]], {"weights": [1, -1]}, UsageError, "negative"),
        ([[1]], {"weights": [float("nan")]}, UsageError, "finite"),
        ([[1]], {"weights": [1], "changes": [{"at": 0, "weights": [1]}]}, UsageError, "ascending"),
        ([[1]], {"weights": [1], "changes": [{"from": 3}]}, UsageError, "`at` and `weights`"),
        ([{"path": "x"}], {}, UsageError, "needs a `type`"),
    ]
    for datasets, settings_given, kind, words in cases:
        with pytest.raises(kind, match=words):
            Mixture(datasets, **settings_given)
