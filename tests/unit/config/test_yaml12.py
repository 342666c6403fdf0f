"""YAML 1.2 as people write it: scalars, places of keys, and texts that are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.config.yaml12 import MAX_DEPTH, YAMLText, parse_override, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e-3", 1e-3),
        ("1.0e-4", 1e-4),
        ("1e1", 10.0),
        ("10", 10),
        ("-3", -3),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        (".5", 0.5),
        ("2.", 2.0),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("12:30:45", "12:30:45"),
        ("null", None),
        ("~", None),
        ("~/x", "~/x"),
        ("'1'", "1"),
        ('"true"', "true"),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    parsed = parse_yaml(f"a: {text}").value
    assert parsed == {"a": value}
    assert isinstance(parsed, dict)
    assert type(parsed["a"]) is type(value)


@given(st.floats(allow_nan=False) | st.integers(-(2**70), 2**70) | st.booleans() | st.none())
def test_numbers_come_back_as_they_were_written(value: float | int | bool | None) -> None:
    text = {True: "true", False: "false", None: "null"}[value] if value in (None, True, False) else repr(value)
    assert parse_override(text.replace("inf", ".inf")) == value


def test_every_key_has_its_line_and_column() -> None:
    document = parse_yaml("# top\na: {b: 1, c: [x, y]}\nd:\n  - e: 2\n")
    assert document.marks == {
        ("a",): (2, 1),
        ("a", "b"): (2, 5),
        ("a", "c"): (2, 11),
        ("a", "c", 0): (2, 15),
        ("a", "c", 1): (2, 18),
        ("d",): (3, 1),
        ("d", 0): (4, 5),
        ("d", 0, "e"): (4, 5),
    }


def test_anchors_and_merge_keys() -> None:
    document = parse_yaml("a: &a {x: 1, y: 2}\nb: *a\nc:\n  y: 3\n  <<: *a\nd:\n  <<: [{x: 5}, *a]\n")
    assert document.value == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 2},
        "c": {"x": 1, "y": 3},
        "d": {"x": 5, "y": 2},
    }
    assert document.marks["c", "x"] == (1, 8)
    assert document.marks["c", "y"] == (4, 3)
    assert document.marks["d", "x"] == (7, 9)


def test_duplicate_keys_are_told_each_with_its_place() -> None:
    problems = parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n").problems
    assert [(each.line, each.column, each.path) for each in problems] == [(2, 11, ("b", "c")), (3, 1, ("a",))]
    assert all("written twice" in each.text for each in problems)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: [1", 1, 6, "not YAML"),
        ("a: b: c", 1, 5, "not YAML"),
        ("a: 1\n\tb: 2", 2, 1, "not YAML"),
        ("a:\n  b: 1\n \u00a0c: 2", 3, 2, "U+00A0, which only looks like a space"),
        ("a: *x", 1, 4, "undefined alias"),
        ("--- 1\n--- 2", 2, 1, "single document"),
        ("a: 1\nb: x\0y", 2, 5, "U+0000"),
        ("a: !!str 5", 1, 4, "tag"),
        ("a: !!python/object/apply:os.system [x]", 1, 4, "tag"),
        ("a: &a [*a]", 1, 4, "contains itself"),
        ("a: " + "[" * (MAX_DEPTH + 1), 1, 3 + MAX_DEPTH, "nested deeper"),
        ("[" * 100_000, 1, MAX_DEPTH + 1, "nested deeper"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(YAMLText) as caught:
        parse_yaml(text)
    assert (caught.value.problem.line, caught.value.problem.column) == (line, column)
    assert words in caught.value.problem.text


def test_anchors_cannot_be_used_to_exhaust_memory() -> None:
    rows = ["a0: &a0 [x, x]"]
    rows += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    with pytest.raises(YAMLText, match="more than 100000 values"):
        parse_yaml("\n".join(rows))


def test_a_name_for_an_anchor_may_be_used_again() -> None:
    assert parse_yaml("a: &x 1\nb: &x 2\nc: *x\n").value == {"a": 1, "b": 2, "c": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [("", ""), ("  ", ""), ("1e-4", 1e-4), ("[1, {a: b}]", [1, {"a": "b"}]), ("pkg.mod:Object", "pkg.mod:Object")],
)
def test_values_of_overrides(text: str, value: object) -> None:
    assert parse_override(text) == value


@pytest.mark.parametrize("text", ["a #b", "#b", "'a' # b", "[1] # b", "*x", "@x", "{a: 1, a: 2}"])
def test_values_of_overrides_that_would_lose_something(text: str) -> None:
    with pytest.raises(YAMLText):
        parse_override(text)
