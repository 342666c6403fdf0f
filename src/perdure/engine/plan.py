"""Who writes what: computed alike on every rank from one exchange of what each holds.

Every distinct box is written once. Boxes with the fewest owners choose first, then the largest; each
goes to the least loaded of its owners, ties to the lower rank. The plan is kept while no rank's
layout changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from perdure.engine.ranks import Ranks
from perdure.errors import UnsupportedStateError
from perdure.format.box import Box, cover_fault
from perdure.format.digest import digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import SECTIONS, Section
from perdure.state.shards import NamedTensor

__all__ = ["Planner", "SavePlan", "ShardId", "assign"]


@dataclass(frozen=True)
class ShardId:
    """One box of one tensor."""

    section: Section
    name: str
    box: Box


@dataclass(frozen=True)
class Layout:
    """What all ranks agree a tensor is."""

    dtype: str
    logical: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class SavePlan:
    """What each rank writes, and the layout of every tensor."""

    writes: tuple[tuple[ShardId, ...], ...]
    tensors: dict[tuple[Section, str], Layout]

    def bytes_of(self, rank: int) -> int:
        """Bytes of tensor data that `rank` writes."""
        return sum(
            s.box.numel * BY_SAFETENSORS[self.tensors[s.section, s.name].dtype].itemsize for s in self.writes[rank]
        )


def assign(holders: dict[ShardId, list[int]], sizes: dict[ShardId, int], ranks: int) -> list[list[ShardId]]:
    """Each shard to one of its holders, evenly by bytes; a pure function, the same on every rank."""
    loads = [0] * ranks
    writes: list[list[ShardId]] = [[] for _ in range(ranks)]
    order = sorted(holders, key=lambda s: (len(holders[s]), -sizes[s], SECTIONS.index(s.section), s.name, s.box))
    for shard in order:
        rank = min(holders[shard], key=lambda r: (loads[r], r))
        loads[rank] += sizes[shard]
        writes[rank].append(shard)
    return writes


class Planner:
    """Makes save plans, and remembers the last one."""

    def __init__(self, ranks: Ranks, remove_redundancy: bool = True) -> None:
        self._ranks, self._remove_redundancy = ranks, remove_redundancy
        self._key: tuple[str, ...] = ()
        self._plan: SavePlan | None = None

    def plan(self, tensors: Sequence[NamedTensor]) -> SavePlan:
        """The plan for what the ranks hold now.

        Raises:
            UnsupportedStateError: ranks disagree on a tensor's shape or dtype, or leave a part of one unheld.
        """
        columns = [
            [
                SECTIONS.index(t.section),
                t.name,
                t.dtype,
                t.logical,
                list(t.shape),
                list(t.aliases),
                [[list(p.box.offset), list(p.box.shape)] for p in t.pieces],
            ]
            for t in tensors
        ]
        doing = "planning the save"
        key = tuple(self._ranks.gather(digest_bytes(msgspec.msgpack.encode(columns)), doing))
        if self._plan is None or key != self._key:
            self._plan = self._build(self._ranks.gather(columns, doing))
            self._key = key
        return self._plan

    def _build(self, held: list[Any]) -> SavePlan:
        layouts: dict[tuple[Section, str], Layout] = {}
        holders: dict[ShardId, list[int]] = {}
        for rank, columns in enumerate(held):
            for number, name, dtype, logical, shape, aliases, boxes in columns:
                section = SECTIONS[number]
                layout = Layout(dtype, logical, tuple(shape), tuple(aliases))
                known = layouts.setdefault((section, name), layout)
                if known != layout:
                    raise UnsupportedStateError(
                        f"{section}: {name}: rank {rank} has {dtype} {list(shape)}, another rank {known.dtype} "
                        f"{list(known.shape)}"
                    )
                for offset, extent in boxes:
                    holders.setdefault(ShardId(section, name, Box(tuple(offset), tuple(extent))), []).append(rank)
        self._check_cover(layouts, holders)
        sizes = {s: prod(s.box.shape) * BY_SAFETENSORS[layouts[s.section, s.name].dtype].itemsize for s in holders}
        if self._remove_redundancy:
            writes = assign(holders, sizes, len(held))
        else:
            writes = [[s for s, owners in holders.items() if rank in owners] for rank in range(len(held))]
        return SavePlan(tuple(map(tuple, writes)), layouts)

    def _check_cover(self, layouts: dict[tuple[Section, str], Layout], holders: dict[ShardId, list[int]]) -> None:
        boxes: dict[tuple[Section, str], list[Box]] = {key: [] for key in layouts}
        for shard in holders:
            boxes[shard.section, shard.name].append(shard.box)
        for (section, name), listed in boxes.items():
            fault = cover_fault(listed, layouts[section, name].shape)
            if fault is not None:
                raise UnsupportedStateError(
                    f"{section}: {name}: the ranks together don't hold the whole tensor: {fault}"
                )
