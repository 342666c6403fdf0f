"""What a rank holds of every tensor, as columns of bytes: how ranks tell each other before a plan is made.

Two parts. The *table* names the tensors and says which cut each has: the same bytes on all ranks that hold
the same tensors, so each such rank sends a slice of it. The *boxes* are where this rank's pieces lie, each
different cut once: a few hundred bytes, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from perdure.format.box import Box
from perdure.format.metadata import SECTIONS
from perdure.state.shards import NamedTensor

__all__ = ["Held", "Table", "encode_held", "share_of", "stack_rows"]


class Table(msgspec.Struct, array_like=True):
    """The tensors of a rank, column by column; `cut` numbers into `cut_shapes` and `cut_pieces`.

    A cut is a global shape and the boxes that the rank has of it; `cut_pieces` says how many boxes are told of, which
    may be one that is no box. `of_first` are the places of tensors that the first rank of those that have them writes.
    """

    section: bytes
    name: list[str]
    dtype: list[str]
    logical: list[str]
    aliases: list[tuple[str, ...]]
    cut: bytes
    cut_shapes: list[tuple[int, ...]]
    cut_pieces: list[int]
    of_first: list[int]

    @property
    def sections(self) -> list[int]:
        """Index of each tensor's section."""
        return list(self.section)

    @property
    def cuts(self) -> list[int]:
        """Number of each tensor's cut."""
        numbers: list[int] = np.frombuffer(self.cut, dtype="<u4").tolist()
        return numbers

    def columns(self) -> list[int]:
        """Where each cut begins in a row of boxes, and at the end how wide a row is."""
        widths = [2 * len(shape) * count for shape, count in zip(self.cut_shapes, self.cut_pieces, strict=True)]
        return [0, *np.cumsum(widths, dtype=np.int64).tolist()] if widths else [0]


@dataclass(frozen=True)
class Held:
    """A rank's table and its row of boxes, both encoded.

    A row holds, for each piece of each cut, the offset and then the shape, as 64-bit integers; -1 for no piece.
    """

    table: bytes
    boxes: bytes


def encode_held(tensors: Sequence[NamedTensor], buffers: Collection[str] = ()) -> Held:
    """The columns of what this rank holds.

    Args:
        buffers: names of those of the model's that the first rank is to write.
    """
    cuts: dict[tuple[tuple[int, ...], tuple[Box, ...]], int] = {}
    numbers = np.empty(len(tensors), dtype="<u4")
    for index, tensor in enumerate(tensors):
        key = (tensor.shape, tuple(piece.box for piece in tensor.pieces))
        numbers[index] = cuts.setdefault(key, len(cuts))
    # A rank without a piece has the same table as those with one: it marks the place as empty.
    places = {key: key[1] or ([Box((-1,) * len(key[0]), (-1,) * len(key[0]))] if key[0] else []) for key in cuts}
    row = [number for boxes in places.values() for box in boxes for part in box for number in part]
    table = Table(
        bytes(SECTIONS.index(t.section) for t in tensors),
        [t.name for t in tensors],
        [t.dtype for t in tensors],
        [t.logical for t in tensors],
        [t.aliases for t in tensors],
        numbers.tobytes(),
        [shape for shape, _ in cuts],
        [len(boxes) for boxes in places.values()],
        [place for place, t in enumerate(tensors) if t.section == "model" and t.name in buffers] if buffers else [],
    )
    return Held(msgspec.msgpack.encode(table), np.array(row, dtype="<i8").tobytes())


def share_of(table: bytes, index: int, holders: int) -> bytes:
    """The slice of a table that its holder number `index` tells; all slices in order are the table."""
    return table[len(table) * index // holders : len(table) * (index + 1) // holders]


def stack_rows(boxes: Sequence[bytes], width: int) -> NDArray[np.int64]:
    """Rows of boxes of several ranks with the same table as one matrix."""
    return np.frombuffer(b"".join(boxes), dtype="<i8").reshape(len(boxes), width)
