"""Sums over contents: any cut, any storing precision, but no other element, place or name."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perdure.format.box import Box
from perdure.state.fingerprint import digest_of_sums, piece_sums, total_sums
from perdure.state.shards import NamedTensor, Piece, describe


def summed(tensor: Tensor, *boxes: Box) -> int:
    """The sum of a tensor that several ranks hold in pieces."""
    pieces = [Piece(b, tensor[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))]) for b in boxes]
    ranks = [piece_sums([NamedTensor("model", "w", "F32", "", tuple(tensor.shape), (p,))]) for p in pieces]
    return total_sums(ranks)["w"]


def whole(tensor: Tensor) -> int:
    return total_sums([piece_sums([describe("model", "w", tensor)])])["w"]


@given(rows=st.integers(1, 7), columns=st.integers(1, 7), data=st.data())
def test_any_cut_gives_the_same_sum_and_replicas_count_once(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).sin()
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    boxes = [
        Box((y, x), (height, width))
        for y, height in ((0, row), (row, rows - row))
        for x, width in ((0, column), (column, columns - column))
        if height and width
    ]
    assert summed(tensor, *boxes, *boxes[:2]) == whole(tensor)


def test_tensors_of_more_than_one_chunk_are_cut_alike() -> None:
    tensor = torch.arange(3 * 300 * 1000, dtype=torch.float32).reshape(900, 1000).cos()
    assert summed(tensor, Box((0, 0), (900, 321)), Box((0, 321), (900, 679))) == whole(tensor)


@given(at=st.integers(0, 23), bit=st.integers(0, 31))
def test_any_flipped_bit_is_another_sum(at: int, bit: int) -> None:
    bits = torch.arange(24, dtype=torch.int32).reshape(4, 6) * 77_777_777
    other = bits.clone()
    other.view(-1)[at] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert whole(bits.view(torch.float32)) != whole(other.view(torch.float32))


def test_rows_that_changed_places_are_another_sum() -> None:
    tensor = torch.randn(5, 3)
    assert whole(tensor) != whole(tensor[[1, 0, 2, 3, 4]])


def test_the_same_values_in_a_wider_dtype_are_the_same() -> None:
    low = torch.randn(5, 3).bfloat16()
    assert whole(low) == whole(low.float())
    assert whole(torch.tensor(2.5)) == whole(torch.tensor(2.5, dtype=torch.float16))


def test_names_count() -> None:
    assert digest_of_sums({"a": 1, "b": 2}) == digest_of_sums({"b": 2, "a": 1}) != digest_of_sums({"a": 2, "b": 1})
