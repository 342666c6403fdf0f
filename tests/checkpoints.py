"""Checkpoints of plain bytes, made with format, storage and catalog alone: no torch, no numpy."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from perdure.catalog.publish import Staging, publish, stage
from perdure.catalog.root import Iteration, Root
from perdure.format.box import Box, runs, whole
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.digest import ShardDigester, digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, FileRecord, Section, ShardRecord, TensorRecord
from perdure.format.names import shard_filename
from perdure.format.safetensors import header_bytes, lay_out

__all__ = ["Tensor", "build_checkpoint", "floats", "save_events", "write_shards"]

KINDS: dict[Section, str] = {"model": "model", "optimizer": "opt", "extra": "extra"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as row-major bytes, and the boxes it is cut into (one box per rank, whole by default)."""

    data: bytes
    shape: tuple[int, ...]
    dtype: str = "F32"
    cuts: tuple[Box, ...] = ()

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.cuts or (whole(self.shape),)

    def piece(self, box: Box) -> bytes:
        size = BY_SAFETENSORS[self.dtype].itemsize
        return b"".join(self.data[a * size : (a + n) * size] for a, n in runs(whole(self.shape), box))


def floats(*values: float, shape: tuple[int, ...] | None = None, cuts: tuple[Box, ...] = ()) -> Tensor:
    """A float32 tensor of these values."""
    shape = (len(values),) if shape is None else shape
    assert prod(shape) == len(values)
    return Tensor(struct.pack(f"<{len(values)}f", *values), shape, "F32", cuts)


def small_state(salt: int) -> dict[Section, dict[str, Tensor]]:
    """A few tensors whose values follow from `salt`."""
    return {
        "model": {"layer.weight": floats(salt, salt + 0.5, -salt, 1, 2, 3, shape=(2, 3)), "layer.bias": floats(salt)},
        "optimizer": {"adam_step": Tensor(struct.pack("<q", salt), (), "I64")},
    }


def write_shards(staging: Staging, mark: str, state: Mapping[Section, Mapping[str, Tensor]]) -> CheckpointMetadata:
    """Writes one file per section and rank; piece number r of a tensor goes to rank r."""
    metadata = CheckpointMetadata(training={"seed": 42})
    ranks = max((len(t.boxes) for tensors in state.values() for t in tensors.values()), default=1)
    for section, tensors in state.items():
        records = metadata.section(section)
        for name, tensor in tensors.items():
            records[name] = TensorRecord(tensor.dtype, tensor.shape, [])
        for rank in range(ranks):
            mine = {n: (t, t.boxes[rank]) for n, t in tensors.items() if rank < len(t.boxes) and prod(t.shape)}
            if not mine:
                continue
            layout = lay_out((n, t.dtype, box.shape) for n, (t, box) in mine.items())
            header = header_bytes(layout, {"format": "pt", "save": mark, "rank": str(rank)})
            body = b"".join(mine[name][0].piece(mine[name][1]) for name in layout)
            filename = shard_filename("checkpoint", KINDS[section], rank, ranks)
            data = header + body
            writer = staging.root.storage.create(f"{staging.path}/{filename}", len(data))
            writer.pwrite(data, 0)
            writer.finish(len(data))
            for name, (tensor, box) in mine.items():
                digester = ShardDigester()
                digester.update(memoryview(tensor.piece(box)))
                digest, blocks = digester.finish()
                records[name].shards.append(
                    ShardRecord(len(metadata.files), box.offset, box.shape, digest, tuple(blocks))
                )
            metadata.files.append(FileRecord(filename, len(data), digest_bytes(header)))
    return metadata


def build_checkpoint(
    root: Root,
    iteration: int,
    *,
    sequence: int = 1,
    parent: int | None = None,
    lineage: str = "a1b2c3d4",
    attempt: str = "0a",
    state: Mapping[Section, Mapping[str, Tensor]] | None = None,
    healthy: bool = True,
    time: float | None = None,
    global_batch_size: int = 4,
    training: dict[str, Any] | None = None,
) -> CommitRecord:
    """Saves a valid iteration through the ordinary path: stage, write, publish (the tracker too)."""
    staging = stage(root, iteration, attempt, sequence)
    metadata = write_shards(staging, f"{lineage}-{sequence}", small_state(iteration) if state is None else state)
    metadata = msgspec.structs.replace(metadata, training=training or {})
    common = CommonInfo(
        global_step=iteration,
        global_batch_size=global_batch_size,
        consumed_samples=iteration * global_batch_size,
        ckpt_status=0 if healthy else 1,
    )
    return publish(
        staging,
        metadata,
        common,
        lineage=lineage,
        parent=sequence - 1 if parent is None else parent,
        attempt=attempt,
        ranks=1,
        writer="perdure test",
        now=lambda: 1_700_000_000.0 + sequence if time is None else time,
    )


def save_events(iterations: Sequence[Iteration]) -> list[dict[str, object]]:
    """The events that saving these would have left."""
    return [
        {"event": "save", "lineage": i.commit.lineage, "sequence": i.commit.sequence, "parent": i.commit.parent}
        for i in iterations
    ]
