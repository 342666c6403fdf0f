"""Who writes what: computed alike on every rank from one exchange of what each holds.

Every distinct box is written once. Boxes with the fewest owners choose first, then the largest; each
goes to the least loaded of its owners, ties to the lower rank. Buffers, which may differ between ranks, all come
from their first owner: `DistributedDataParallel` gives its values to the others before each forward pass. The plan is
kept while no rank's layout changes. Tensors that are cut alike on every rank are planned as one, so that the cost is
that of the different cuts, not of ranks times tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from perdure.engine.columns import Held, Table, encode_held, share_of, stack_rows
from perdure.engine.cuts import Cut, find_cut
from perdure.engine.ranks import Ranks
from perdure.errors import UnsupportedStateError
from perdure.format.box import Box
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import SECTIONS, Section
from perdure.state.shards import NamedTensor

__all__ = ["Layout", "Planner", "SavePlan", "ShardId", "make_plan"]

Key = tuple[Section, str]
_DOING = "planning the save"


class ShardId(NamedTuple):
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
    """What each rank writes, and the layout of every tensor.

    `cuts` hold the distinct boxes and their owners; `writers` gives for each tensor the rank that writes
    each box of its cut, None where every owner writes what it holds.
    """

    tensors: dict[Key, Layout]
    cuts: list[tuple[Cut, list[Key]]]
    writers: dict[Key, NDArray[np.int32]] | None
    loads: NDArray[np.int64]

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data that all ranks write."""
        return int(self.loads.sum())

    def bytes_of(self, rank: int) -> int:
        """Bytes of tensor data that `rank` writes."""
        return int(self.loads[rank])

    def writes_of(self, rank: int) -> list[ShardId]:
        """The boxes that `rank` writes."""
        found = []
        for cut, keys in self.cuts:
            held = [(number, cut.box(number)) for number in cut.held_by(rank)]
            for section, name in keys if held else ():
                writers = None if self.writers is None else self.writers[section, name]
                found += [
                    ShardId(section, name, box) for number, box in held if writers is None or writers[number] == rank
                ]
        return found


class Planner:
    """Makes save plans, and remembers the last one."""

    def __init__(self, ranks: Ranks, remove_redundancy: bool = True) -> None:
        self._ranks, self._remove_redundancy = ranks, remove_redundancy
        self._digests: list[bytes] = []
        self._plan: SavePlan | None = None

    def plan(self, tensors: Sequence[NamedTensor], buffers: Collection[str] = ()) -> SavePlan:
        """The plan for what the ranks hold now.

        Args:
            buffers: names of the model's buffers.

        Raises:
            UnsupportedStateError: ranks disagree on a tensor's shape or dtype, or leave a part of one unheld.
        """
        held = encode_held(tensors, buffers)
        table, mine = xxhash.xxh3_128_digest(held.table), xxhash.xxh3_128_digest(held.boxes)
        digests: list[bytes] = self._ranks.gather(table + mine, _DOING)
        if self._plan is None or digests != self._digests:
            self._plan = make_plan(self._exchange(held, table, digests), self._remove_redundancy)
            self._digests = digests
        return self._plan

    def _exchange(self, held: Held, table: bytes, digests: list[bytes]) -> list[Held]:
        """Everybody's columns; a table that several ranks have travels once, a slice from each."""
        tables = [digest[: len(table)] for digest in digests]
        position, count = tables[: self._ranks.rank].count(table), tables.count(table)
        told = self._ranks.gather([held.boxes, share_of(held.table, position, count)], _DOING)
        slices: dict[bytes, list[bytes]] = defaultdict(list)
        for digest, (_, part) in zip(tables, told, strict=True):
            slices[digest].append(part)
        whole = {digest: b"".join(parts) for digest, parts in slices.items()}
        return [Held(whole[digest], boxes) for digest, (boxes, _) in zip(tables, told, strict=True)]


def make_plan(held: Sequence[Held], remove_redundancy: bool = True) -> SavePlan:
    """The plan for what each rank holds; a pure function, the same on every rank.

    Raises:
        UnsupportedStateError: as of `Planner.plan`.
    """
    ranks_of: dict[bytes, list[int]] = defaultdict(list)
    for rank, columns in enumerate(held):
        ranks_of[columns.table].append(rank)
    tables = [msgspec.msgpack.decode(encoded, type=Table) for encoded in ranks_of]
    members = [np.array(ranks, dtype=np.int32) for ranks in ranks_of.values()]
    layouts, classes = _classes(tables, members)
    columns_of = [table.columns() for table in tables]
    rows = [
        stack_rows([held[rank].boxes for rank in ranks], columns[-1])
        for ranks, columns in zip(ranks_of.values(), columns_of, strict=True)
    ]
    cuts = []
    for places, keys in classes.items():
        shape = layouts[keys[0]].shape
        parts = []
        for number, cut in places:
            begin, end = columns_of[number][cut : cut + 2]
            count = tables[number].cut_pieces[cut]
            boxes = rows[number][:, begin:end].reshape(len(members[number]), count, 2, len(shape))
            parts.append((members[number], boxes))
        found, fault = find_cut(shape, parts)
        if fault is not None:
            section, name = keys[0]
            raise UnsupportedStateError(f"{section}: {name}: the ranks together don't hold the whole tensor: {fault}")
        cuts.append((found, keys))
    if remove_redundancy:
        of_first: set[Key] = {("model", table.name[place]) for table in tables for place in table.of_first}
        writers, loads = _assign(cuts, layouts, len(held), of_first)
        return SavePlan(layouts, cuts, writers, loads)
    loads = np.zeros(len(held), dtype=np.int64)
    for found, keys in cuts:
        itemsize = sum(_itemsize(layouts[key]) for key in keys)
        np.add.at(loads, found.owners, np.repeat(found.numel, found.counts) * itemsize)
    return SavePlan(layouts, cuts, None, loads)


def _classes(
    tables: list[Table], members: list[NDArray[np.int32]]
) -> tuple[dict[Key, Layout], dict[tuple[tuple[int, int], ...], list[Key]]]:
    """The layout of every tensor, and the tensors that are cut alike, by (table, cut) wherever they are."""
    layouts: dict[Key, Layout] = {}
    places: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for number, table in enumerate(tables):
        columns = zip(table.sections, table.name, table.dtype, table.logical, table.aliases, table.cuts, strict=True)
        for section, name, dtype, logical, aliases, cut in columns:
            key = SECTIONS[section], name
            layout = Layout(dtype, logical, table.cut_shapes[cut], aliases)
            known = layouts.setdefault(key, layout)
            if known != layout:
                raise UnsupportedStateError(
                    f"{SECTIONS[section]}: {name}: rank {members[number][0]} has {dtype} {list(layout.shape)}"
                    f"{_also(aliases)}, another rank {known.dtype} {list(known.shape)}{_also(known.aliases)}"
                )
            places[key].append((number, cut))
    classes: dict[tuple[tuple[int, int], ...], list[Key]] = defaultdict(list)
    for key, where in places.items():
        classes[tuple(where)].append(key)
    return layouts, classes


def _also(aliases: tuple[str, ...]) -> str:
    return f" (also {', '.join(aliases)[:200]})" if aliases else ""


def _assign(
    cuts: list[tuple[Cut, list[Key]]], layouts: dict[Key, Layout], ranks: int, of_first: Collection[Key]
) -> tuple[dict[Key, NDArray[np.int32]], NDArray[np.int64]]:
    """Each box of each tensor to one of its owners, evenly by bytes.

    Boxes of one tensor that have as many owners and the same size share no owner: they choose at once.
    """
    loads = np.zeros(ranks, dtype=np.int64)
    writers: dict[Key, NDArray[np.int32]] = {}
    choices = []
    for cut, keys in cuts:
        # Who has no choice takes what it has: that comes first.
        lone = cut.first_owners()
        alone = np.where(cut.counts == 1, cut.numel, 0)
        np.add.at(loads, lone, alone * sum(_itemsize(layouts[key]) for key in keys))
        groups = cut.choices()
        for key in keys:
            writers[key] = lone.copy() if groups else lone
            size = _itemsize(layouts[key])
            if key in of_first:
                np.add.at(loads, lone, np.where(cut.counts > 1, cut.numel, 0) * size)
                continue
            order = SECTIONS.index(key[0]), key[1]
            choices += [(g.owners.shape[1], -g.numel * size, order, g.first, g, writers[key]) for g in groups]
    choices.sort(key=lambda choice: choice[:4])
    for _, negative, _, _, group, written in choices:
        column = loads[group.owners].argmin(axis=1)
        chosen = group.owners[group.rows, column]
        loads[chosen] -= negative
        written[group.boxes] = chosen
    return writers, loads


def _itemsize(layout: Layout) -> int:
    return BY_SAFETENSORS[layout.dtype].itemsize
