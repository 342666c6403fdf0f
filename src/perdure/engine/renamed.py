"""What a renamed record asks for, asked of the record with the old names, where files and digests are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from perdure.engine.reader import Fill
from perdure.format.box import Box, intersect
from perdure.format.metadata import CheckpointMetadata, Section
from perdure.format.rename import Renamed, RowView
from perdure.state.shards import Piece

__all__ = ["under_old_names"]


def under_old_names(fills: Iterable[Fill], renamed: Renamed, original: CheckpointMetadata) -> list[Fill]:
    """The same memory filled from the tensors of `original`, so that a part of a shard is checked by its blocks.

    Args:
        fills: of tensors of `renamed`, in which one may be rows of several others, or of one among many.
    """
    pieces: dict[tuple[Section, str], dict[tuple[Box, int], Piece]] = {}
    for fill in fills:
        views = renamed.views.get((fill.section, fill.name))
        if views is None:
            views = {shard: RowView(fill.name, shard, 0) for shard in fill.record.shards}
        for shard, view in views.items():
            held = pieces.setdefault((fill.section, view.name), {})
            for piece in fill.pieces:
                both = shard.box if shard.box == piece.box else intersect(shard.box, piece.box)
                if both is not None:
                    rows = both.offset[:1] and (both.offset[0] - shard.offset[0] + view.skip + view.shard.offset[0],)
                    source = Box((*rows, *both.offset[1:]), both.shape)
                    # Copies of a shard fill the same memory; each is asked for once.
                    held.setdefault((source, piece.tensor.data_ptr()), Piece(source, _part(piece, both)))
    return [
        Fill(section, name, original.section(section)[name], tuple(held.values()))
        for (section, name), held in pieces.items()
        if held
    ]


def _part(piece: Piece, box: Box) -> Tensor:
    """The memory of a box within a piece."""
    if piece.box == box:
        return piece.tensor
    ranges = zip(box.offset, piece.box.offset, box.shape, strict=True)
    return piece.tensor[tuple(slice(o - b, o - b + n) for o, b, n in ranges)]
