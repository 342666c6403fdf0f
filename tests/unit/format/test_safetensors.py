"""Headers of safetensors files: what we lay out the library reads; what is hostile is damage."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.errors import DamagedCheckpointError
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.safetensors import (
    ALIGNMENT,
    HEADER_LIMIT,
    Header,
    header_bytes,
    header_length,
    lay_out,
    parse_header,
)

keys = st.text(min_size=1, max_size=30).filter(lambda k: k != "__metadata__" and k.isprintable())
tensors = st.dictionaries(
    keys,
    st.tuples(st.sampled_from(sorted(BY_SAFETENSORS)), st.lists(st.integers(0, 4), max_size=4).map(tuple)),
    max_size=8,
)


def build(table: dict[str, Any], data: int) -> tuple[bytes, int]:
    body = json.dumps(table).encode()
    header = len(body).to_bytes(8, "little") + body
    return header, len(header) + data


@given(tensors, st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3))
def test_a_layout_comes_back_and_the_library_reads_it(
    wanted: dict[str, tuple[str, tuple[int, ...]]], text: dict[str, str]
) -> None:
    layout = lay_out((key, dtype, shape) for key, (dtype, shape) in wanted.items())
    header = header_bytes(layout, text)
    size = len(header) + max((e.end for e in layout.values()), default=0)
    assert len(header) % ALIGNMENT == 0
    assert header_length(header[:8], size, "f") == len(header)
    assert parse_header(header, size, "f") == Header(len(header), layout, text)
    for entry in layout.values():
        assert entry.begin % BY_SAFETENSORS[entry.dtype].itemsize == 0 or entry.begin == entry.end
    found = dict(safetensors.deserialize(header + bytes(size - len(header))))
    assert {k: (v["dtype"], tuple(v["shape"])) for k, v in found.items()} == wanted


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_reserved_and_repeated_keys_are_not_laid_out(names: list[str]) -> None:
    with pytest.raises(ValueError, match="reserved or repeated"):
        lay_out((name, "F32", (1,)) for name in names)


def test_a_header_that_nobody_could_read_is_not_written() -> None:
    layout = lay_out([("k" * HEADER_LIMIT, "F32", (1,))])
    with pytest.raises(ValueError, match="limit"):
        header_bytes(layout, {})


@pytest.mark.parametrize(
    ("prefix", "size"),
    [
        (b"", 0),
        (b"1234567", 7),
        (bytes(8), 100),
        ((1).to_bytes(8, "little"), 100),
        (b"\xff" * 8, 1 << 40),
        ((93).to_bytes(8, "little"), 100),
        ((HEADER_LIMIT + 1).to_bytes(8, "little"), 1 << 40),
    ],
)
def test_absurd_lengths_are_damage(prefix: bytes, size: int) -> None:
    with pytest.raises(DamagedCheckpointError, match="f"):
        header_length(prefix, size, "f")


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "data"),
    [
        ({"a": A}, 7),
        ({"a": A}, 9),
        ({"a": {**A, "data_offsets": [4, 12]}}, 12),
        ({"a": A, "b": A}, 8),
        ({"a": A, "b": {**A, "data_offsets": [4, 12]}}, 12),
        ({"a": {**A, "shape": [3]}}, 8),
        ({"a": {**A, "shape": [-2]}}, 8),
        ({"a": {**A, "shape": [2.0]}}, 8),
        ({"a": {**A, "shape": [True, 2]}}, 8),
        ({"a": {**A, "shape": "", "data_offsets": [0, 4]}}, 4),
        ({"a": {**A, "shape": {}, "data_offsets": [0, 4]}}, 4),
        ({"a": {**A, "shape": None}}, 8),
        ({"a": {**A, "dtype": "F33"}}, 8),
        ({"a": {**A, "dtype": ["F32"]}}, 8),
        ({"a": {**A, "data_offsets": [8, 0]}}, 8),
        ({"a": {**A, "data_offsets": [0]}}, 8),
        ({"a": {**A, "data_offsets": [0, 1 << 70]}}, 8),
        ({"a": {**A, "data_offsets": [0, 10**400]}}, 8),
        ({"a": None}, 0),
        ({"a": [1, 2]}, 0),
        ({"a": {}}, 0),
        ({"__metadata__": {"a": 1}}, 0),
        ({"__metadata__": None}, 0),
        ({"__metadata__": ["a"]}, 0),
        ([], 0),  # type: ignore[list-item]
    ],
)
def test_hostile_headers_are_damage(table: dict[str, Any], data: int) -> None:
    header, size = build(table, data)
    with pytest.raises(DamagedCheckpointError) as caught:
        parse_header(header, size, "here.safetensors")
    assert "here.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 700


def test_a_pointer_in_place_of_the_weights_is_told() -> None:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    with pytest.raises(DamagedCheckpointError, match="git lfs pull"):
        header_length(text[:8], len(text), "model.safetensors")


def test_deep_nesting_is_damage() -> None:
    body = b'{"a":' * 100_000
    with pytest.raises(DamagedCheckpointError):
        parse_header(len(body).to_bytes(8, "little") + body, 8 + len(body), "f")


@settings(max_examples=200)
@given(tensors, st.data())
def test_a_header_with_a_changed_byte_is_another_header_or_damage(
    wanted: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    layout = lay_out((key, dtype, shape) for key, (dtype, shape) in wanted.items())
    header = bytearray(header_bytes(layout, {"format": "pt"}))
    size = len(header) + max((e.end for e in layout.values()), default=0)
    used = len(bytes(header).rstrip(b" "))
    header[data.draw(st.integers(8, used - 1))] = data.draw(st.integers(0, 255))
    try:
        found = parse_header(bytes(header), size, "f")
    except DamagedCheckpointError:
        return
    # Whatever it says now, it describes this file: every byte once, within the file.
    assert sum(e.end - e.begin for e in found.entries.values()) == size - len(header)
    for entry in found.entries.values():
        assert entry.end - entry.begin == prod(entry.shape) * BY_SAFETENSORS[entry.dtype].itemsize


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_damage_or_describe_the_file(body: bytes, extra: int) -> None:
    try:
        parse_header(len(body).to_bytes(8, "little") + body, 8 + len(body) + extra, "f")
    except DamagedCheckpointError:
        return
