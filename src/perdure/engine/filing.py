"""Which files a rank writes, and where each shard lies in them: the same for every save while the plan is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from perdure.engine.plan import SavePlan, ShardId
from perdure.engine.writer import FileLayout
from perdure.format.metadata import SECTIONS, Section
from perdure.state.shards import NamedTensor

__all__ = ["Filing", "ShardFile", "Slot"]


class Slot(NamedTuple):
    """A shard's place: under which key, in which stored dtype, and which piece of which of the named tensors it is."""

    key: str
    shard: ShardId
    dtype: str
    tensor: int
    piece: int


@dataclass(frozen=True)
class ShardFile:
    """A file of one section; `kept`: of the model's frozen tensors."""

    section: Section
    kept: bool
    slots: list[Slot]
    layout: FileLayout

    def contents(self, tensors: Sequence[NamedTensor]) -> dict[str, Tensor]:
        """What goes into the file now, by key, from the tensors that a plan was made for or others that lie as they."""
        return {slot.key: tensors[slot.tensor].pieces[slot.piece].tensor for slot in self.slots}


class Filing:
    """Assigns what this rank writes to files, and remembers the last answer."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._plan: SavePlan | None = None
        self._frozen: frozenset[str] = frozenset()
        self._files: list[ShardFile] = []

    def files(
        self, plan: SavePlan, tensors: Sequence[NamedTensor], frozen: frozenset[str] = frozenset()
    ) -> list[ShardFile]:
        """The files of this rank, none of them empty.

        Args:
            tensors: those that the plan was made for, or asked for again.
            frozen: the model's tensors that lie in a file of their own.
        """
        if plan is not self._plan or frozen != self._frozen:
            self._files = list(_files(plan, self._rank, tensors, frozen))
            self._plan, self._frozen = plan, frozen
        return self._files


def _files(plan: SavePlan, rank: int, tensors: Sequence[NamedTensor], frozen: frozenset[str]) -> Iterator[ShardFile]:
    held = {
        ShardId(tensor.section, tensor.name, piece.box): (number, position)
        for number, tensor in enumerate(tensors)
        for position, piece in enumerate(tensor.pieces)
    }
    mine = plan.writes_of(rank)
    for section, kept in ((section, kept) for section in SECTIONS for kept in (False, True)):
        taken = {"__metadata__"}
        slots = []
        for shard in mine:
            if shard.section != section or kept != (section == "model" and shard.name in frozen):
                continue
            key, count = shard.name, 0
            while key in taken:
                count += 1
                key = f"{shard.name}#{count}"
            taken.add(key)
            slots.append(Slot(key, shard, plan.tensors[section, shard.name].dtype, *held[shard]))
        if slots:
            yield ShardFile(section, kept, slots, FileLayout((s.key, s.dtype, s.shard.box.shape) for s in slots))
