"""metadata.json: where every piece of every tensor lies. The one record that all checkpoints are read into.

Foreign directories become the same `CheckpointMetadata` (mindformers.py, huggingface.py), with empty
digests, and the engine knows nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, filterfalse
from math import prod
from typing import Annotated, Any, Literal

import msgspec

from perdure.errors import DamagedCheckpointError, UsageError
from perdure.format.box import Box, cover_fault, is_line
from perdure.format.digest import BLOCK, block_count, is_digest, shard_digest
from perdure.format.dtypes import BY_SAFETENSORS, BY_TORCH
from perdure.format.jsonio import decode, encode
from perdure.format.names import parse_shard_filename
from perdure.format.optimizer import description_fault

__all__ = ["SECTIONS", "CheckpointMetadata", "FileRecord", "Section", "ShardRecord", "TensorRecord"]

Section = Literal["model", "optimizer", "extra"]
SECTIONS: tuple[Section, ...] = ("model", "optimizer", "extra")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_MOST_DIMENSIONS = 64  # torch's own limit
_FILE_KINDS = {"model": "model", "optimizer": "opt", "extra": "extra"}


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One shard file: its name in the iteration directory, its size, the digest of its header.

    The header is the length prefix, the JSON and its padding. Foreign files have size 0 and an empty
    digest: unknown. `save` is the mark in the header where the file was linked from an earlier iteration: that of
    the save which wrote it.
    """

    name: str
    size: Count = msgspec.field(name="bytes")
    header: str
    save: str = ""


class ShardRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One piece of a tensor: index of its file, its box in the tensor (in elements), its digest.

    `blocks` holds the digests of a shard's 8 MiB blocks (empty up to one block). `key` is the
    entry's name in the file where that isn't the tensor's own.
    """

    file: Count
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    digest: str
    blocks: tuple[str, ...] = ()
    key: str = ""

    @property
    def box(self) -> Box:
        """Where the piece lies in its tensor."""
        return Box(self.offset, self.shape)


class TensorRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One tensor: stored dtype (safetensors' name), global shape, shards.

    `logical` is the torch dtype that the stored elements are a view of (`complex64` held as pairs of
    F32 has shape `[..., 2]` here). `aliases` are the other names under which the same tensor is known.
    """

    dtype: str
    shape: tuple[Count, ...]
    shards: list[ShardRecord]
    logical: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return prod(self.shape) * BY_SAFETENSORS[self.dtype].itemsize


class CheckpointMetadata(msgspec.Struct, kw_only=True):
    """What is where in one iteration.

    `training` is what a resume compares or needs beyond common.json: seed, dataset identities,
    optimizer type and parameter-group settings, precision, mesh, loss-scale growth counter, and the
    one-shot keys already applied.
    """

    training: dict[str, Any] = {}
    files: list[FileRecord] = []
    model: dict[str, TensorRecord] = {}
    optimizer: dict[str, TensorRecord] = {}
    extra: dict[str, TensorRecord] = {}

    def section(self, name: Section) -> dict[str, TensorRecord]:
        """The tensors of one section, by name.

        Raises:
            UsageError: there is no such section.
        """
        sections: dict[Section, dict[str, TensorRecord]] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "extra": self.extra,
        }
        if name not in sections:
            raise UsageError(f"section: expected one of {', '.join(SECTIONS)}, found {name!r:.80}")
        return sections[name]

    def tensors(self) -> Iterator[tuple[Section, str, TensorRecord]]:
        """Every tensor as (section, name, record)."""
        for section in SECTIONS:
            for name, record in self.section(section).items():
                yield section, name, record

    def encode(self) -> bytes:
        """The bytes of metadata.json."""
        return encode(self)

    @classmethod
    def decode(cls, data: bytes, file: str = "metadata.json") -> CheckpointMetadata:
        """Reads our own metadata.json; `check` looks deeper.

        Raises:
            DamagedCheckpointError: not the JSON of this record, or a number out of range.
        """
        return decode(data, cls, file)

    def check(self, file: str = "metadata.json") -> None:
        """Checks that the record makes sense: names, dtypes, boxes that cover, digests that agree, the optimizer.

        Raises:
            DamagedCheckpointError: naming the tensor and what is wrong with it.
        """
        described = self.training.get("optimizer")
        if isinstance(described, dict) and (wrong := description_fault(described, self.optimizer)) is not None:
            raise DamagedCheckpointError(f"{file}: training.optimizer: {wrong}", file=file)
        seen: set[str] = set()
        for record in self.files:
            if "/" in record.name or "\0" in record.name or record.name in seen or record.name in ("", ".", ".."):
                raise DamagedCheckpointError(f"{file}: files: bad or repeated name {record.name[:80]!r}", file=file)
            seen.add(record.name)
        kinds = [(shard := parse_shard_filename(r.name)) and shard.kind for r in self.files]
        for section in SECTIONS:
            records, kind = self.section(section), _FILE_KINDS[section]
            strange = {index for index, found in enumerate(kinds) if found is not None and found != kind}
            # All at once, so that of a million shards only what differs is looked at; one by one to name the faulty.
            sound = self._fault(records.values(), kind, strange) is None
            names: set[str] = set()
            for name, tensor in records.items():
                fault = None if sound else self._fault([tensor], kind, strange)
                if fault is None and not names.isdisjoint((name, *tensor.aliases)):
                    fault = "its name is used twice"
                if fault is not None:
                    raise DamagedCheckpointError(f"{file}: {section}: {name[:300]}: {fault}", file=file, tensor=name)
                names.update((name, *tensor.aliases))

    def _fault(self, tensors: Collection[TensorRecord], kind: str, strange: set[int]) -> str | None:
        """What is wrong with one of some tensors, which are to be in files of one kind."""
        layouts = {(tensor.dtype, tensor.logical, tensor.shape) for tensor in tensors}
        fault = next((fault for layout in layouts if (fault := _layout_fault(*layout)) is not None), None)
        if fault is not None:
            return fault
        files = {shard.file for tensor in tensors for shard in tensor.shards}
        if files and max(files) >= len(self.files):
            return f"shard in file {max(files)}, but there are {len(self.files)} files"
        if not files.isdisjoint(strange):
            return f"shard in {self.files[min(files & strange)].name}, which is not a {kind} file"
        for dtype, ndim, begins, shape, blocks in {
            (t.dtype, len(t.shape), len(s.offset), s.shape, len(s.blocks) if s.digest else None)
            for t in tensors
            for s in t.shards
        }:
            if not begins == len(shape) == ndim:
                return f"a shard has {begins} dimensions, the tensor {ndim}"
            size = prod(shape) * BY_SAFETENSORS[dtype].itemsize
            if blocks not in (None, block_count(size)):
                return f"{blocks} block digests for {size} bytes in blocks of {BLOCK}"
        fault = _digest_fault([shard for tensor in tensors for shard in tensor.shards if shard.digest])
        return fault or next((fault for tensor in tensors if (fault := _cover_fault(tensor)) is not None), None)


def _layout_fault(stored: str, logical: str, shape: tuple[int, ...]) -> str | None:
    dtype = BY_SAFETENSORS.get(stored)
    if dtype is None:
        return f"unknown dtype {stored[:40]!r}"
    if logical:
        held = BY_TORCH.get(logical)
        if held is None or held.stored != stored or (held.trailing > 1 and shape[-1:] != (held.trailing,)):
            return f"logical dtype {logical[:40]!r} cannot be held as {stored} {list(shape)}"
    # Zeros don't hide the rest: a shape is also strides.
    if len(shape) > _MOST_DIMENSIONS or prod(max(n, 1) for n in shape) * dtype.itemsize >= 1 << 62:
        return f"absurd shape {list(shape)[:10]}"
    return None


def _digest_fault(shards: list[ShardRecord]) -> str | None:
    large = [shard for shard in shards if shard.blocks]
    digests = chain([shard.digest for shard in shards], *(shard.blocks for shard in large))
    malformed = next(filterfalse(is_digest, digests), None)
    if malformed is not None:
        return f"malformed digest {malformed[:60]!r}"
    if any(shard_digest(shard.blocks) != shard.digest for shard in large):
        return "its block digests don't give its digest"
    return None


def _cover_fault(tensor: TensorRecord) -> str | None:
    boxes = [(shard.offset, shard.shape) for shard in tensor.shards]
    if is_line(boxes, tensor.shape):
        return None
    # Without `remove_redundancy`, replicas repeat a box; each distinct box counts once.
    return cover_fault({Box(*box) for box in boxes}, tensor.shape)
