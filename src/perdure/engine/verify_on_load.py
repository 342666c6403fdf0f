"""What was loaded compared with what was saved, by a fingerprint that no cut changes (`verify_on_load: first`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.catalog.boxes import chunks, distinct_boxes
from perdure.catalog.fingerprint import AT_ONCE, Sums, add, box_sums, label_sums, shard_sums
from perdure.engine.plan import Planner
from perdure.engine.ranks import Ranks
from perdure.engine.reader import Fill, ShardSource
from perdure.engine.writer import memory_of
from perdure.errors import MismatchError
from perdure.format.box import Box
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import Section, TensorRecord
from perdure.state.shards import NamedTensor, Piece

__all__ = ["compare_loaded"]

_DOING = "comparing what was loaded"
Key = tuple[Section, str]


@dataclass
class _Compared:
    """A tensor of the checkpoint and what this rank holds of it, in the dtype it is stored in."""

    record: TensorRecord
    pieces: dict[Box, Tensor]


def compare_loaded(source: ShardSource, fills: Sequence[Fill], ranks: Ranks, where: str) -> str:
    """Compares every tensor that was loaded, on all ranks together; what was found, as a note, "" for nothing to do.

    Where every rank holds boxes as they were saved, their digests were compared while reading: nothing is done
    then. Tensors that were converted to another dtype are left out.

    Raises:
        MismatchError: a tensor is not what was saved, on any rank.
    """
    recut = any(p.box not in {s.box for s in f.record.shards} for f in fills for p in f.pieces if p.box.numel)
    if not any(ranks.gather(recut, _DOING)):
        return ""
    held, converted = ranks.together(lambda: _held(fills), _DOING)
    aside = {(section, name) for listed in ranks.gather(sorted(converted), _DOING) for section, name in listed}
    held = {key: compared for key, compared in held.items() if key not in aside}
    named = [
        NamedTensor(
            *key, c.record.dtype, c.record.logical, c.record.shape, tuple(map(Piece, c.pieces, c.pieces.values()))
        )
        for key, c in held.items()
    ]
    plan = Planner(ranks).plan(named)
    keys: list[Key] = sorted(plan.tensors)
    index = {key: number for number, key in enumerate(keys)}

    def count() -> Tensor:
        sums: list[list[Sums]] = [[(0, 0)] * len(keys), [(0, 0)] * len(keys)]
        for shard in plan.writes_of(ranks.rank):
            key = shard.section, shard.name
            own = held[key]
            counted = _tensor_sums(label_sums(*key, own.record)[0], own.pieces[shard.box], shard.box, own.record)
            sums[0][index[key]] = add(sums[0][index[key]], counted)
        for number, key in enumerate(keys):
            # Those who hold some of a tensor read its shards in turn.
            record = held[key].record if key in held else None
            for turn, stored in enumerate(distinct_boxes(record.shards) if record is not None else ()):
                if record is not None and readers[key][turn % len(readers[key])] == ranks.rank:
                    sums[1][number] = add(sums[1][number], shard_sums(source, *key, record, stored))
        return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))

    readers = _holders(ranks, keys, held)
    counted = ranks.together(count, _DOING)
    # Sums modulo 2^64 wrap around in signed integers as they do in unsigned ones.
    ranks.sum(counted, _DOING)
    unequal = [key for number, key in enumerate(keys) if not torch.equal(counted[0, number], counted[1, number])]
    if unequal:
        section, name = unequal[0]
        raise MismatchError(
            f"{where}: {len(unequal)} of {len(keys)} tensors are not in memory what they are in the checkpoint, "
            f"first {section}: {name}",
            hint="the checkpoint is sound: this is a fault of this program or of the machine's memory; load it on the "
            "layout that it was saved on, and report this",
        )
    left = f", {len(aside)} were converted and not compared" if aside else ""
    return f"fingerprint of {len(keys)} tensors as saved{left}"


def _held(fills: Sequence[Fill]) -> tuple[dict[Key, _Compared], set[Key]]:
    held: dict[Key, _Compared] = {}
    converted: set[Key] = set()
    for fill in fills:
        key = fill.section, fill.name
        stored = getattr(torch, BY_SAFETENSORS[fill.record.dtype].torch)
        compared = held.setdefault(key, _Compared(fill.record, {}))
        for piece in fill.pieces:
            if piece.tensor.dtype != stored:
                converted.add(key)
            else:
                compared.pieces.setdefault(piece.box, piece.tensor)
    return held, converted


def _holders(ranks: Ranks, keys: list[Key], held: dict[Key, _Compared]) -> dict[Key, list[int]]:
    """The ranks that know each tensor's record, ascending."""
    mine = np.packbits([key in held for key in keys]).tobytes()
    bits = [np.unpackbits(np.frombuffer(each, np.uint8), count=len(keys)) for each in ranks.gather(mine, _DOING)]
    return {key: [r for r, row in enumerate(bits) if row[number]] for number, key in enumerate(keys)}


def _tensor_sums(seed: int, tensor: Tensor, box: Box, record: TensorRecord) -> Sums:
    """What the elements of a piece of live memory count."""
    itemsize = BY_SAFETENSORS[record.dtype].itemsize
    sums: Sums = (0, 0)
    for part in chunks(box, itemsize, AT_ONCE * itemsize) if box.numel else ():
        window = tuple(slice(o - b, o - b + n) for o, b, n in zip(part.offset, box.offset, part.shape, strict=True))
        plain = tensor[window].contiguous().cpu()
        sums = add(sums, box_sums(seed, memory_of(plain), part, record.shape, itemsize))
    return sums
