"""A checkpoint as MindSpore Transformers writes it: their names, slices and metadata, below a root with a tracker.

With one rank as a single device saves: whole tensors and no metadata.json. With several, tensors are cut along the
first dimension that divides evenly, the others are written once, and metadata.json says what is where; files are
numbered by their writers, as with redundancy removed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perdure.convert.state import Item, State, staged
from perdure.engine.writer import WriteBuffers, write_tensors
from perdure.errors import MismatchError
from perdure.format.box import Box, whole
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import Section
from perdure.format.mindformers import MOMENTS, STEP, THEIR_STEP
from perdure.format.names import COMMON, METADATA, TRACKER, iteration_dirname, shard_filename
from perdure.state.optimizer import MASTER
from perdure.storage.local import LocalStorage

__all__ = ["write_mindformers"]

_KINDS: dict[Section, str] = {"model": "model", "optimizer": "opt"}

Advance = Callable[[int], None]


@dataclass(frozen=True)
class _Piece:
    """One slice: number `number` of a tensor cut into `of` along `dim` (None: whole)."""

    item: Item
    box: Box
    dim: int | None
    number: int
    of: int


def write_mindformers(
    state: State,
    target: str,
    *,
    ranks: int = 1,
    prefix: str = "checkpoint",
    advance: Advance = lambda count: None,
) -> list[str]:
    """Writes weights, AdamW's state under their names, progress and tracker; gives what was left out, in words.

    Args:
        target: their root; a directory that doesn't exist yet, or is empty.
        ranks: how many ranks to cut for.

    Raises:
        MismatchError: a weight that MindSpore has no dtype for.
        UsageError: the target is there already.
    """
    for item in state.section("model"):
        if item.logical:
            raise MismatchError(f"{state.where}: {item.name} is of dtype {item.logical}, which is not written for them")
    optimizer, told = _their_optimizer(state)
    sections: dict[Section, list[Item]] = {"model": state.section("model"), "optimizer": optimizer}
    storage, step = LocalStorage(), state.common.global_step
    with staged(target) as root:
        directory = os.path.join(root, iteration_dirname(step))
        os.makedirs(directory)
        tables: dict[str, dict[str, Any]] = {"state_dict_metadata": {}, "storage_data": {}}
        buffers = WriteBuffers()
        try:
            for section, items in sections.items():
                writers = [share for share in _shares(items, ranks) if share]
                for number, share in enumerate(writers):
                    name = shard_filename(prefix, _KINDS[section], number, len(writers))
                    _write_file(storage, directory, name, share, buffers, advance)
                    _describe(tables, share, name, number, ranks)
        finally:
            buffers.close()
        if ranks > 1:
            storage.write(os.path.join(directory, METADATA), json.dumps(tables).encode())
        storage.write(os.path.join(directory, COMMON), state.common.encode())
        storage.sync_directory(directory)
        storage.write(os.path.join(root, TRACKER), str(step).encode())
        storage.sync_directory(root)
    return told


def _their_optimizer(state: State) -> tuple[list[Item], list[str]]:
    """The optimizer's tensors under their names, and what of it they have no place for."""
    items = {item.name: item for item in state.section("optimizer")}
    told = [f"{item.name} is left out: they have no place for registered objects" for item in state.section("extra")]
    if not items:
        return [], told
    described = state.training.get("optimizer")
    kind = described.get("type") if isinstance(described, dict) else None
    for name in described.get("set_aside", ()) if isinstance(described, dict) else ():
        items.pop(name, None)
    others = [name for name in items if name.partition(".")[0] not in (*MOMENTS, MASTER, STEP)]
    why = f"it is {kind}" if kind != "AdamW" else f"it has {others[0]}" if others else ""
    if why or STEP not in items:
        why = why or "its parameters are at different steps"
        return [], [*told, f"the optimizer is left out: {why}, and theirs is AdamW with one step for all"]
    return [_their_step(items[STEP]), *(item for name, item in items.items() if name != STEP)], told


def _their_step(item: Item) -> Item:
    def load() -> Tensor:
        return item.load().to(torch.int64).reshape(1)

    return Item("optimizer", THEIR_STEP, "I64", "", (1,), (), load)


def _shares(items: Sequence[Item], ranks: int) -> list[list[_Piece]]:
    """What each rank writes: its slice of every tensor that divides, and of the others as evens out the bytes."""
    found: list[list[_Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    undivided = []
    for item in items:
        dim = next((d for d, size in enumerate(item.shape) if size and size % ranks == 0), None)
        if ranks == 1 or dim is None or item.name == THEIR_STEP or not whole(item.shape).numel:
            undivided.append(item)
            continue
        size = item.shape[dim] // ranks
        for rank in range(ranks):
            offset = tuple(rank * size if d == dim else 0 for d in range(len(item.shape)))
            shape = tuple(size if d == dim else n for d, n in enumerate(item.shape))
            found[rank].append(_Piece(item, Box(offset, shape), dim, rank, ranks))
            loads[rank] += item.nbytes // ranks
    for item in sorted(undivided, key=lambda held: (-held.nbytes, held.name)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        found[rank].append(_Piece(item, whole(item.shape), None, 0, 1))
        loads[rank] += item.nbytes
    return found


def _write_file(
    storage: LocalStorage, directory: str, name: str, share: Sequence[_Piece], buffers: WriteBuffers, advance: Advance
) -> None:
    pieces = {piece.item.name: piece for piece in share}

    def load(key: str) -> Tensor:
        tensor = pieces[key].item.part(pieces[key].box)
        advance(tensor.numel() * tensor.element_size())
        return tensor

    shapes = [(key, piece.item.dtype, piece.box.shape) for key, piece in pieces.items()]
    write_tensors(storage, os.path.join(directory, name), name, shapes, load, {"format": "ms"}, buffers)


def _describe(
    tables: Mapping[str, dict[str, Any]], share: Sequence[_Piece], file_name: str, writer: int, ranks: int
) -> None:
    """Adds the slices of one file to the two tables of their metadata.json."""
    for piece in share:
        item = piece.item
        entry = tables["state_dict_metadata"].setdefault(item.name, _entry(piece, ranks))
        entry["chunk"].append({"global_offset": [piece.number], "local_shape": list(piece.box.shape)})
        group = list(range(ranks)) if piece.dim is None else [piece.number]
        place = {"file_name": file_name, "storage_rank": writer, "rank_group": group}
        tables["storage_data"][repr((item.name, (piece.number,)))] = [place]


def _entry(piece: _Piece, ranks: int) -> dict[str, Any]:
    item, divided = piece.item, piece.dim is not None
    plain = item.name == THEIR_STEP
    layout = {
        "device_matrix": [ranks],
        "tensor_map": [0 if d == piece.dim else -1 for d in range(len(item.shape))],
        "interleaved_parallel": False,
        "alias_name": ["fsdp"],
        "rank_list": list(range(ranks)),
    }
    return {
        "properties": {
            "dtype": BY_SAFETENSORS[item.dtype].mindspore,
            "replica_id": 0 if plain else [0] * ranks if divided else list(range(ranks)),
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": list(item.shape),
        "axis_fragmentations": [piece.of if d == piece.dim else 1 for d in range(len(item.shape))],
        "layout": None if plain else layout,
        "chunk": [],
    }
