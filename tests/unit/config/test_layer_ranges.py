"""Layers as texts: what is read, what is refused, and that stages cover all layers once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.config.layer_ranges import even_stages, layer_set, parse_ranges, stage_ranges


def test_ranges_include_both_ends() -> None:
    assert parse_ranges("0-1, 4-8") == [range(2), range(4, 9)]
    assert parse_ranges("5") == parse_ranges(5) == [range(5, 6)]
    assert layer_set(["0-2", "5", 7]) == {0, 1, 2, 5, 7}


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1-2-3", "3-1", "1,", True, None, 1.5, [1]])
def test_other_texts_are_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a range of layers"):
        parse_ranges(text)


def test_chunks_go_round_the_ranks() -> None:
    assert stage_ranges(["0-1, 4-8", "2-3, 9"], 2) == [range(2), range(2, 4), range(4, 9), range(9, 10)]


@pytest.mark.parametrize(
    ("items", "chunks", "words"),
    [
        (["0-1, 2", "3"], 2, "expected 2 ranges of layers for each rank, found '3'"),
        (["0-1", "3"], 1, "expected stage 1 to begin with layer 2, found layer 3"),
        (["1-2", "3"], 1, "expected stage 0 to begin with layer 0, found layer 1"),
        (["0-2", "2-3"], 1, "expected stage 1 to begin with layer 3, found layer 2"),
    ],
)
def test_stages_that_do_not_follow_are_refused(items: list[str], chunks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stage_ranges(items, chunks)


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4))
def test_layers_are_placed_evenly_or_a_list_that_works_is_told(layers: int, ranks: int, chunks: int) -> None:
    if layers < ranks * chunks:
        with pytest.raises(ValueError, match="expected at least"):
            even_stages(layers, ranks, chunks)
        return
    if layers % (ranks * chunks):
        with pytest.raises(ValueError, match="do not divide") as caught:
            even_stages(layers, ranks, chunks)
        listed = str(caught.value).partition(": try ")[2]
        stages = stage_ranges([item.strip("' ") for item in listed.strip("[]").split("', '")], chunks)
    else:
        stages = even_stages(layers, ranks, chunks)
    assert max(map(len, stages)) - min(map(len, stages)) == (layers % (ranks * chunks) > 0)
    assert len(stages) == ranks * chunks
    assert [layer for stage in stages for layer in stage] == list(range(layers))
