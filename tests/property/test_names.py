"""Names round-trip, and nothing that we did not write is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.format.names import (
    SHARD_KINDS,
    Leftover,
    ShardName,
    format_tracker,
    iteration_dirname,
    parse_iteration_dirname,
    parse_leftover,
    parse_shard_filename,
    parse_tracker,
    partial_dirname,
    removed_dirname,
    replaced_dirname,
    shard_filename,
)

iterations = st.integers(0, 10**18)
sequences = st.integers(0, 10**18 - 1)
attempts = st.text("0123456789abcdef", min_size=1, max_size=32)
prefixes = st.one_of(
    st.text(min_size=1),
    st.sampled_from(["a-opt-0000000-0000001.safetensors", "-model-", "checkpoint-opt-", "übung\n", "a b", "-"]),
)
kinds = st.sampled_from(SHARD_KINDS)


@given(iterations)
def test_iteration_names_round_trip_and_sort(iteration: int) -> None:
    name = iteration_dirname(iteration)
    assert parse_iteration_dirname(name) == iteration
    assert parse_tracker(format_tracker(iteration).encode()) == iteration


@given(st.text())
def test_another_name_is_no_iteration(text: str) -> None:
    for name in (text, "iteration_" + text, "iteration_00000001" + text):
        found = parse_iteration_dirname(name)
        assert found is None or iteration_dirname(found) == name


@given(st.text("0123456789", min_size=1, max_size=24))
def test_an_iteration_has_one_spelling(digits: str) -> None:
    found = parse_iteration_dirname("iteration_" + digits)
    assert found is None or iteration_dirname(found) == "iteration_" + digits


@given(iterations, attempts, sequences)
def test_leftovers_round_trip(iteration: int, attempt: str, sequence: int) -> None:
    assert parse_leftover(partial_dirname(iteration, attempt, sequence)) == Leftover(
        iteration, "partial", attempt, sequence
    )
    assert parse_leftover(replaced_dirname(iteration, sequence)) == Leftover(iteration, "replaced", "", sequence)
    assert parse_leftover(removed_dirname(iteration, sequence)) == Leftover(iteration, "removed", "", sequence)


@given(iterations, attempts, sequences, st.text(min_size=1))
def test_what_is_nearly_a_leftover_is_none(iteration: int, attempt: str, sequence: int, text: str) -> None:
    for name in (partial_dirname(iteration, attempt, sequence), removed_dirname(iteration, sequence)):
        assert parse_leftover(name[1:]) is None
        assert parse_leftover(text + name) is None
        found = parse_leftover(name + text)
        assert found is None or text.isdigit()


@pytest.mark.parametrize(
    "name",
    [
        ".iteration_00000001.removed-007",
        ".iteration_00000001.removed-",
        ".iteration_00000001.removed--1",
        ".iteration_1.removed-1",
        ".iteration_9999999999999999999.removed-1",
        ".iteration_00000001.partial-ABC-1",
        ".iteration_00000001.partial-abc",
        ".iteration_00000001.removed-\u0661",
        ".iteration_00000001.removed-1\n",
    ],
)
def test_names_that_only_look_like_ours(name: str) -> None:
    assert parse_leftover(name) is None


@given(prefixes, kinds, st.integers(0, 10**12), st.integers(1, 10**12))
def test_shard_names_round_trip_whatever_the_prefix(prefix: str, kind: str, rank: int, ranks: int) -> None:
    name = shard_filename(prefix, kind, rank, ranks)
    assert parse_shard_filename(name) == ShardName(prefix, kind, rank, ranks)
    assert parse_shard_filename(name.removesuffix("s")) == ShardName(prefix, kind, rank, ranks)
    assert parse_shard_filename(name + "\n") is None
    assert parse_shard_filename(name + ".bak") is None


@pytest.mark.parametrize(
    "name",
    [
        "-model-0000000-0000001.safetensors",
        "a-model-000000-0000001.safetensors",
        "a-model-00000001-0000001.safetensors",
        "a-weights-0000000-0000001.safetensors",
        "a-model-0000000-0000001.safetensorss",
        "a-model-000000\u0661-0000001.safetensors",
        "a-model-" + "9" * 5000 + "-0000001.safetensors",
    ],
)
def test_names_that_are_no_shards(name: str) -> None:
    assert parse_shard_filename(name) is None


@given(st.binary())
def test_a_tracker_of_any_bytes_never_raises(data: bytes) -> None:
    found = parse_tracker(data)
    assert found is None or 0 <= found <= 10**18


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"2000", 2000),
        (b" 2000\n", 2000),
        (b"00002000", 2000),
        (b"", None),
        (b"2000.0", None),
        (b"-1", None),
        (b"1" * 20, None),
        (b"1" + b" " * 64, None),
        ("١".encode(), None),
    ],
)
def test_trackers(data: bytes, found: int | None) -> None:
    assert parse_tracker(data) == found


@pytest.mark.parametrize("iteration", [-1, 10**18 + 1])
def test_impossible_iterations_are_not_written(iteration: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        iteration_dirname(iteration)


def test_unknown_kinds_are_not_written() -> None:
    with pytest.raises(ValueError, match="kind"):
        shard_filename("a", "weights", 0, 1)
