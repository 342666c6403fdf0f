"""How all ranks together cut a tensor: its distinct boxes, who has each, and whether they cover it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perdure.format.box import Box, cover_fault

__all__ = ["Choice", "Cut", "find_cut"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """Boxes with equally many owners and elements, none of them with an owner in common.

    `owners` has a row per box, ascending; `boxes` are their numbers, `first` the lowest of them.
    """

    boxes: Ints
    owners: NDArray[np.int32]
    numel: int
    rows: Ints

    @property
    def first(self) -> int:
        return int(self.boxes[0])


@dataclass(frozen=True)
class Cut:
    """The distinct boxes of a tensor over all ranks, in ascending order, and their owners.

    Attributes:
        boxes: [box, offset or shape, dimension].
        starts, counts: which run of `owners` belongs to each box.
        owners: ranks, ascending within each box.
        disjoint: whether no rank has more than one box.
    """

    boxes: Ints
    starts: Ints
    counts: Ints
    owners: NDArray[np.int32]
    disjoint: bool

    @cached_property
    def numel(self) -> Ints:
        """Elements of each box."""
        counts: Ints = self.boxes[:, 1, :].prod(axis=1, dtype=np.int64)
        return counts

    def box(self, number: int) -> Box:
        """Box number `number`."""
        offset, shape = self.boxes[number].tolist()
        return Box(tuple(offset), tuple(shape))

    @cached_property
    def _by_rank(self) -> tuple[NDArray[np.int32], Ints]:
        numbers = np.repeat(np.arange(len(self.counts)), self.counts)
        order = np.argsort(self.owners, kind="stable")
        return self.owners[order], numbers[order]

    def held_by(self, rank: int) -> list[int]:
        """Numbers of the boxes that a rank has."""
        ranks, numbers = self._by_rank
        begin, end = np.searchsorted(ranks, [rank, rank + 1])
        held: list[int] = numbers[begin:end].tolist()
        return held

    def first_owners(self) -> NDArray[np.int32]:
        """The lowest owner of each box."""
        return self.owners[self.starts]

    def choices(self) -> list[Choice]:
        """The boxes that more than one rank could write."""
        found = []
        shared = np.flatnonzero(self.counts > 1)
        if not len(shared):
            return []
        kinds = np.stack([self.counts[shared], self.numel[shared]], axis=1)
        for count, numel in np.unique(kinds, axis=0).tolist():
            alike = shared[(kinds[:, 0] == count) & (kinds[:, 1] == numel)]
            for boxes in [alike] if self.disjoint else alike[:, None]:
                owners = self.owners[self.starts[boxes][:, None] + np.arange(count)]
                found.append(Choice(boxes, owners, numel, np.arange(len(boxes))))
        return found


def find_cut(shape: tuple[int, ...], parts: Sequence[tuple[NDArray[np.int32], Ints]]) -> tuple[Cut, str | None]:
    """The cut that ranks make of a tensor of `shape`, and why its boxes don't cover the tensor, None where they do.

    Args:
        parts: (ranks, boxes[rank, piece, offset or shape, dimension]) of ranks that tell of equally many pieces; a
            negative offset stands for none.
    """
    boxes = np.concatenate([b.reshape(b.shape[0] * b.shape[1], 2 * len(shape)) for _, b in parts])
    owners = np.concatenate([np.repeat(ranks, b.shape[1]) for ranks, b in parts])
    if shape:
        told = boxes[:, 0] >= 0
        boxes, owners = boxes[told], owners[told]
    # The columns in which boxes differ are few: one dimension is cut, seldom two.
    varying = [c for c in range(boxes.shape[1]) if len(boxes) and (boxes[:, c] != boxes[0, c]).any()]
    order = np.lexsort((owners, *(boxes[:, c] for c in reversed(varying))))
    boxes, owners = boxes[order], owners[order]
    changes = np.zeros(len(boxes), dtype=bool)
    changes[:1] = True
    for column in varying:
        changes[1:] |= boxes[1:, column] != boxes[:-1, column]
    starts = np.flatnonzero(changes)
    counts = np.diff(starts, append=len(boxes))
    distinct = boxes[starts].reshape(len(starts), 2, len(shape))
    cut = Cut(distinct, starts, counts, owners, all(b.shape[1] <= 1 for _, b in parts))
    return cut, _fault(cut, shape)


def _fault(cut: Cut, shape: tuple[int, ...]) -> str | None:
    if _is_grid(cut.boxes[cut.numel > 0], shape):
        return None
    return cover_fault((cut.box(number) for number in range(len(cut.boxes))), shape)


def _is_grid(boxes: Ints, shape: tuple[int, ...]) -> bool:
    """Whether boxes, in ascending order, are all the cells of a grid over the shape.

    That is the usual case, seen without comparing boxes with each other.
    """
    if not len(boxes):
        return False
    differing = [dim for dim in range(len(shape)) if (boxes[:, :, dim] != boxes[0, :, dim]).any()]
    cells = 1
    for dim, size in enumerate(shape):
        ranges = boxes[:, :, dim] if differing == [dim] else boxes[:1, :, dim]
        if dim in differing and len(differing) > 1:
            ranges = np.unique(boxes[:, :, dim], axis=0)
        ends = ranges.sum(axis=1)
        if ranges[0, 0] != 0 or ends[-1] != size or (ranges[1:, 0] != ends[:-1]).any():
            return False
        cells *= len(ranges)
    return len(boxes) == cells
