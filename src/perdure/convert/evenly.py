"""Tensors cut evenly among ranks, as FSDP2 cuts parameters: along one dimension, a part for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.convert.state import Item
from perdure.format.box import Box, whole

__all__ = ["cut", "of_section", "shares"]


def cut(shape: tuple[int, ...], parts: int) -> list[Box]:
    """At most `parts` boxes that cover a shape, equal but for the last.

    Along the first dimension that is long enough for all parts; a tensor without one stays whole. Nothing is left of a
    tensor without elements.
    """
    box = whole(shape)
    if not box.numel:
        return []
    dim = next((d for d, size in enumerate(shape) if size >= parts), None)
    if parts == 1 or dim is None:
        return [box]
    step = -(-shape[dim] // parts)
    return [
        Box(
            (*box.offset[:dim], begin, *box.offset[dim + 1 :]),
            (*shape[:dim], min(step, shape[dim] - begin), *shape[dim + 1 :]),
        )
        for begin in range(0, shape[dim], step)
    ]


def shares(items: Iterable[Item], ranks: int) -> list[list[tuple[Item, Box]]]:
    """What each rank gets: part r of every tensor, and of the tensors that stay whole those that even out the bytes."""
    found: list[list[tuple[Item, Box]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    undivided: list[tuple[Item, Box]] = []
    for item in items:
        boxes = cut(item.shape, ranks)
        if len(boxes) == 1 and ranks > 1:
            undivided.append((item, boxes[0]))
            continue
        for rank, box in enumerate(boxes):
            found[rank].append((item, box))
            loads[rank] += _size(item, box)
    for item, box in sorted(undivided, key=lambda held: (-held[0].nbytes, held[0].section, held[0].name)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        found[rank].append((item, box))
        loads[rank] += _size(item, box)
    return found


def of_section(share: Sequence[tuple[Item, Box]], section: str) -> dict[str, tuple[Item, Box]]:
    """A share's tensors of one section by name; no rank has two parts of one."""
    return {item.name: (item, box) for item, box in share if item.section == section}


def _size(item: Item, box: Box) -> int:
    return item.nbytes // max(1, whole(item.shape).numel) * box.numel
