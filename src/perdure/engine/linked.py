"""Frozen weights in files of their own, which a save links from the save before instead of writing them again.

Whether they are the same is asked of their contents, not of `requires_grad`: their digests are compared with
those that were recorded when the file was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
from torch import Tensor

from perdure.engine.plan import SavePlan
from perdure.engine.writer import memory_of
from perdure.format.digest import ShardDigester
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord
from perdure.format.names import parse_shard_filename
from perdure.storage.base import Storage

__all__ = ["FROZEN", "Linkable", "bytes_of", "linkable_files"]

FROZEN = "-frozen"
"""What the prefix of such a file ends with."""

_CHUNK = 8 << 20


@dataclass(frozen=True)
class Linkable:
    """A file of frozen weights that some committed iteration holds.

    Attributes:
        path: where it lies.
        record: what that iteration's metadata say of it, with the mark of the save that wrote it.
        shards: key in the file -> (tensor name, dtype, record).
    """

    path: str
    record: FileRecord
    shards: Mapping[str, tuple[str, str, ShardRecord]]

    def holds(self, rows: Sequence[tuple[str, str, str, tuple[int, ...], tuple[int, ...], Tensor]]) -> bool:
        """Whether the file is just these rows: key, tensor name, dtype, offset, shape, present contents."""
        if {row[0] for row in rows} != self.shards.keys():
            return False
        for key, name, dtype, offset, shape, _ in rows:
            known, stored, record = self.shards[key]
            if (known, stored, record.offset, record.shape) != (name, dtype, offset, shape):
                return False
        return all(_digest(tensor) == self.shards[key][2].digest for key, *_, tensor in rows)

    def link(self, storage: Storage, target: str) -> bool:
        """Gives the file another name; False where the storage cannot, or the file is there no more."""
        try:
            storage.link(self.path, target)
        except OSError:
            return False
        return True

    def records(self, index: int) -> Iterable[tuple[str, ShardRecord]]:
        """(tensor name, record) of each shard, for metadata that list the file under `index`."""
        for name, _, record in self.shards.values():
            yield name, msgspec.structs.replace(record, file=index)


def linkable_files(metadata: CheckpointMetadata, path: str, mark: str) -> dict[str, Linkable]:
    """The files of frozen weights of the iteration at `path`, by name.

    Args:
        mark: what the iteration's own files carry.
    """
    wanted = {
        number: file
        for number, file in enumerate(metadata.files)
        if (parts := parse_shard_filename(file.name)) is not None and parts.prefix.endswith(FROZEN)
    }
    if not wanted:
        return {}
    shards: dict[int, dict[str, tuple[str, str, ShardRecord]]] = {number: {} for number in wanted}
    for name, record in metadata.model.items():
        for shard in record.shards:
            if shard.file in wanted:
                shards[shard.file][shard.key or name] = (name, record.dtype, shard)
    return {
        file.name: Linkable(
            os.path.join(path, file.name), msgspec.structs.replace(file, save=file.save or mark), shards[number]
        )
        for number, file in wanted.items()
    }


def bytes_of(plan: SavePlan, names: frozenset[str]) -> int:
    """The size of some of the model's tensors."""
    layouts = ((name, each) for (section, name), each in plan.tensors.items() if section == "model")
    return sum(prod(each.shape) * BY_SAFETENSORS[each.dtype].itemsize for name, each in layouts if name in names)


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().cpu()
    digester = ShardDigester()
    if plain.numel():
        memory = memory_of(plain)
        for begin in range(0, len(memory), _CHUNK):
            digester.update(memory[begin : begin + _CHUNK])
    return digester.finish()[0]
