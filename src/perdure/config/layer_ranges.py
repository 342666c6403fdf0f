"""Ranges of layers as the reference writes them: `"5"`, or `"0-3"` with both ends included; several by commas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["even_stages", "layer_set", "parse_ranges", "stage_ranges"]

_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def parse_ranges(text: object) -> list[range]:
    """`"0-1, 4-8"` -> [range(0, 2), range(4, 9)]; a whole number is a range of one.

    Raises:
        ValueError: not such a text; the message says what was expected and found.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"expected a range of layers such as '0-3', found {text!r}")
    found = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"expected a range of layers such as '0-3', found {part.strip()!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"expected a range of layers whose end is not below its start, found {part.strip()!r}")
        found.append(range(first, last + 1))
    return found


def layer_set(items: Sequence[object]) -> set[int]:
    """The layers that a list of such texts names.

    Raises:
        ValueError: one of them is not such a text.
    """
    return {layer for item in items for each in parse_ranges(item) for layer in each}


def stage_ranges(items: Sequence[object], chunks: int) -> list[range]:
    """The layers of each stage, in the order of the stages, from one text per pipeline rank.

    With several chunks per rank, chunk c of rank r is stage c · ranks + r.

    Raises:
        ValueError: a text has another number of ranges than `chunks`, or the stages do not follow on each other
            from layer 0.
    """
    listed = [parse_ranges(item) for item in items]
    for item, ranges in zip(items, listed, strict=True):
        if len(ranges) != chunks:
            raise ValueError(f"expected {chunks} range{'s' * (chunks != 1)} of layers for each rank, found {item!r}")
    stages = [ranges[chunk] for chunk in range(chunks) for ranges in listed]
    following = 0
    for number, layers in enumerate(stages):
        if layers.start != following:
            raise ValueError(f"expected stage {number} to begin with layer {following}, found layer {layers.start}")
        following = layers.stop
    return stages


def even_stages(layers: int, ranks: int, chunks: int) -> list[range]:
    """`layers` layers in equal parts over `ranks` · `chunks` stages.

    Raises:
        ValueError: they do not divide; the message gives a list that places them.
    """
    stages = ranks * chunks
    if layers < stages:
        raise ValueError(f"expected at least {stages} layers for {stages} stages, found {layers}")
    ends = [round(layers * number / stages) for number in range(stages + 1)]
    placed = [range(*pair) for pair in pairwise(ends)]
    if layers % stages:
        texts = [", ".join(_text(placed[c * ranks + r]) for c in range(chunks)) for r in range(ranks)]
        raise ValueError(f"expected a list, since {layers} layers do not divide among {stages} stages: try {texts}")
    return placed


def _text(layers: range) -> str:
    return str(layers.start) if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"
