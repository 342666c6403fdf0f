"""Two checkpoints tensor by tensor, however each was cut; and a fingerprint that no cut changes.

Equal means equal bytes. numpy is imported on use: for magnitudes where something differs, and for
fingerprints. Memory stays bounded: boxes are compared a few MiB at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from perdure.catalog.checkpoint import Checkpoint
from perdure.catalog.read import ShardFiles
from perdure.format.box import Box, intersect, runs
from perdure.format.digest import digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import SECTIONS, Section, ShardRecord, TensorRecord
from perdure.storage.base import FileReader, Storage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DiffReport", "TensorDiff", "diff", "fingerprint"]

_CHUNK = 4 << 20
_SPAN = 16 << 20
_TRUSTED = ("global_step", "loss_scale", "global_batch_size", "consumed_samples", "ckpt_status")


@dataclass(frozen=True)
class TensorDiff:
    """One tensor that differs.

    Attributes:
        what: `only in a`, `only in b`, `dtype`, `shape`, `logical`, `aliases` or `values`.
        a, b: both sides, for people.
        differing: elements whose bytes differ.
        elements: elements in all.
        max_abs: largest absolute difference; None for what is no number, or where a NaN meets a number.
    """

    section: str
    name: str
    what: str
    a: str = ""
    b: str = ""
    differing: int = 0
    elements: int = 0
    max_abs: float | None = None


@dataclass
class DiffReport:
    """What `diff` found.

    Attributes:
        compared: tensors found in both with the same dtype and shape.
        tensors: those that differ, or that only one side has.
        progress: differing fields of common.json, as {field: (a, b)}.
        training: differing keys of what else a resume needs, as {key: (a, b)}.
        notes: what could not be compared.
    """

    a: str
    b: str
    compared: int = 0
    tensors: list[TensorDiff] = field(default_factory=list)
    progress: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    training: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether tensors, progress and training settings are all the same."""
        return not (self.tensors or self.progress or self.training)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    section: Section | None = None,
    read_data: bool = False,
    storage: Storage | None = None,
    progress: Callable[[int], None] | None = None,
) -> DiffReport:
    """Compares two checkpoints (iteration directories, or roots: the iteration a resume would take).

    Of another program's, the tensors and the fields of common.json that are trusted are compared.

    Args:
        section: compare these tensors only, and neither progress nor settings.
        read_data: read also what both sides recorded with the same cut and the same digests.
        progress: called with bytes compared.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError: as of `Checkpoint`.
    """
    left, right = Checkpoint(a, storage), Checkpoint(b, storage)
    report = DiffReport(left.path, right.path)
    if section is None:
        _compare_progress(left, right, report)
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(side.open_files()) for side in (left, right)]
        for part in SECTIONS:
            if section not in (None, part):
                continue
            ours, theirs = left.metadata.section(part), right.metadata.section(part)
            for name in sorted({*ours, *theirs}):
                one, other = ours.get(name), theirs.get(name)
                if one is None or other is None:
                    shown = _describe(one or other)
                    only = (
                        TensorDiff(part, name, "only in b", b=shown)
                        if one is None
                        else TensorDiff(part, name, "only in a", a=shown)
                    )
                    report.tensors.append(only)
                    continue
                mismatch = _record_diff(part, name, one, other)
                if mismatch is not None:
                    report.tensors.append(mismatch)
                    continue
                report.compared += 1
                if not read_data and _same_digests(one, other):
                    continue
                values = _value_diff(part, name, one, other, sides[0], sides[1], progress)
                if values is not None:
                    report.tensors.append(values)
    return report


def fingerprint(path: str | os.PathLike[str], *, storage: Storage | None = None) -> dict[str, str]:
    """A 128-bit value per tensor, as `{section/name: hex}`, that depends on name, dtype, shape and every element.

    Each element is mixed with its place in the whole tensor and all are summed modulo 2^64, twice: so any
    cut into shards, on any number of ranks, gives the same value.
    """
    import numpy as np

    checkpoint = Checkpoint(path, storage)
    found: dict[str, str] = {}
    with checkpoint.open_files() as files:
        for section, name, tensor in checkpoint.metadata.tensors():
            itemsize = BY_SAFETENSORS[tensor.dtype].itemsize
            label = digest_bytes(f"{section}/{name}/{tensor.dtype}/{tensor.logical}/{list(tensor.shape)}".encode())
            seeds = [np.uint64(int(label[-32:-16], 16)), np.uint64(int(label[-16:], 16))]
            sums = [int(s) for s in seeds]
            for shard in _distinct(tensor.shards):
                reader, offset = files.locate(section, name, shard)
                for box in _chunks(shard.box, itemsize):
                    data = _read_box(reader, offset, shard.box, box, itemsize)
                    values = np.frombuffer(data, dtype=f"<u{itemsize}").astype(np.uint64)
                    places = _places(box, tensor.shape)
                    for lane, seed in enumerate(seeds):
                        sums[lane] += int(_mix(values, places, seed).sum(dtype=np.uint64))
            found[f"{section}/{name}"] = "".join(f"{s % (1 << 64):016x}" for s in sums)
    return found


def _mix(values: NDArray[np.uint64], places: NDArray[np.uint64], seed: np.uint64) -> NDArray[np.uint64]:
    """One pseudo-random 64-bit number per (place, value); arithmetic modulo 2^64."""
    import numpy as np

    mixed = _scramble(places * np.uint64(0x9E3779B97F4A7C15) + seed)
    return _scramble(mixed ^ (values * np.uint64(0xD1342543DE82EF95) + np.uint64(1)))


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit numbers in which every bit depends on every bit."""
    import numpy as np

    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x


def _places(box: Box, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Row-major index in the whole tensor of every element of a box."""
    import numpy as np

    places = np.zeros(box.shape, dtype=np.uint64)
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        stride = np.uint64(prod(shape[dim + 1 :]))
        line = (np.arange(extent, dtype=np.uint64) + np.uint64(start)) * stride
        places += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return places.reshape(-1)


def _compare_progress(left: Checkpoint, right: Checkpoint, report: DiffReport) -> None:
    """Progress and settings, as far as both sides record them."""
    own = left.kind == right.kind == "perdure"
    if left.common is None or right.common is None:
        report.notes.append("progress is not compared: at least one side has none")
    else:
        for key in left.common.__struct_fields__ if own else _TRUSTED:
            pair = (getattr(left.common, key), getattr(right.common, key))
            if pair[0] != pair[1]:
                report.progress[key] = pair
    if own:
        report.training.update(_tree_diff(left.metadata.training, right.metadata.training))
    else:
        report.notes.append("settings are not compared: other programs do not record them")


def _tree_diff(a: Any, b: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key) or (key in a) != (key in b):
                found.update(_tree_diff(a.get(key), b.get(key), f"{prefix}.{key}" if prefix else key))
        return found
    return {prefix: (a, b)}


def _record_diff(section: Section, name: str, a: TensorRecord, b: TensorRecord) -> TensorDiff | None:
    for what, one, other in (
        ("dtype", a.dtype, b.dtype),
        ("shape", list(a.shape), list(b.shape)),
        ("logical", a.logical, b.logical),
        ("aliases", sorted(a.aliases), sorted(b.aliases)),
    ):
        if one != other:
            return TensorDiff(section, name, what, str(one), str(other))
    return None


def _describe(record: TensorRecord | None) -> str:
    return "" if record is None else f"{record.logical or record.dtype} {list(record.shape)}"


def _distinct(shards: list[ShardRecord]) -> list[ShardRecord]:
    """Each box once: replicas may be stored several times."""
    return list({s.box: s for s in reversed(shards)}.values())


def _same_digests(a: TensorRecord, b: TensorRecord) -> bool:
    """Whether both are cut alike and recorded with the same digests, so that their bytes are the same."""
    one, other = ({s.box: s.digest for s in r.shards} for r in (a, b))
    return one == other and all(one.values())


def _value_diff(
    section: Section,
    name: str,
    a: TensorRecord,
    b: TensorRecord,
    files_a: ShardFiles,
    files_b: ShardFiles,
    progress: Callable[[int], None] | None,
) -> TensorDiff | None:
    itemsize = BY_SAFETENSORS[a.dtype].itemsize
    differing, largest, comparable = 0, 0.0, True
    for one in _distinct(a.shards):
        for other in _distinct(b.shards):
            both = one.box if one.box == other.box else intersect(one.box, other.box)
            if both is None:
                continue
            reader_a, offset_a = files_a.locate(section, name, one)
            reader_b, offset_b = files_b.locate(section, name, other)
            for box in _chunks(both, itemsize):
                left = _read_box(reader_a, offset_a, one.box, box, itemsize)
                right = _read_box(reader_b, offset_b, other.box, box, itemsize)
                if progress is not None:
                    progress(len(left))
                if left == right:
                    continue
                count, most = _magnitude(left, right, a.dtype)
                differing += count
                comparable = comparable and most is not None
                largest = max(largest, most or 0.0)
    if not differing:
        return None
    elements = prod(a.shape)
    return TensorDiff(
        section, name, "values", differing=differing, elements=elements, max_abs=largest if comparable else None
    )


def _magnitude(a: bytearray, b: bytearray, dtype: str) -> tuple[int, float | None]:
    """How many elements differ in their bytes, and the largest absolute difference, None where a NaN stands."""
    import numpy as np

    itemsize = BY_SAFETENSORS[dtype].itemsize
    bits_a, bits_b = (np.frombuffer(x, dtype=f"<u{itemsize}") for x in (a, b))
    unequal = bits_a != bits_b
    one, other = _numbers(bits_a[unequal], dtype), _numbers(bits_b[unequal], dtype)
    if one is None or other is None:
        return int(unequal.sum()), None
    with np.errstate(invalid="ignore", over="ignore"):
        most = float(np.max(np.abs(one - other)))
    return int(unequal.sum()), None if np.isnan(most) else most


def _numbers(bits: NDArray[Any], dtype: str) -> NDArray[np.float64] | None:
    """The elements as float64; None for a dtype that numpy has no arithmetic for."""
    import numpy as np

    if dtype == "BF16":
        widened: NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32).astype(np.float64)
    plain = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
    if dtype in plain:
        return bits.view(plain[dtype]).astype(np.float64)
    return bits.astype(np.float64) if dtype in ("BOOL", "U8", "U16", "U32", "U64") else None


def _chunks(box: Box, itemsize: int) -> Iterator[Box]:
    """A box cut along its leading dimensions into pieces of a few MiB."""
    stack = [box]
    while stack:
        part = stack.pop()
        dim = next((d for d, n in enumerate(part.shape) if n > 1), None)
        if part.numel * itemsize <= _CHUNK or dim is None:
            yield part
            continue
        rest = prod(part.shape[dim + 1 :]) * itemsize
        step = max(1, _CHUNK // max(rest, 1))
        end = part.offset[dim] + part.shape[dim]
        for start in reversed(range(part.offset[dim], end, step)):
            offset = (*part.offset[:dim], start, *part.offset[dim + 1 :])
            shape = (*part.shape[:dim], min(step, end - start), *part.shape[dim + 1 :])
            stack.append(Box(offset, shape))


def _read_box(reader: FileReader, offset: int, outer: Box, inner: Box, itemsize: int) -> bytearray:
    """The bytes of `inner`, row-major, out of a shard that is `outer` and begins at byte `offset`."""
    data = bytearray(inner.numel * itemsize)
    if not data:
        return data
    target, at = memoryview(data), 0
    pieces = list(runs(outer, inner))
    first, end = pieces[0][0] * itemsize, (pieces[-1][0] + pieces[-1][1]) * itemsize
    if len(pieces) > 1 and end - first <= _SPAN:
        span = bytearray(end - first)
        reader.pread_into(memoryview(span), offset + first)
        for start, count in pieces:
            begin = start * itemsize - first
            target[at : at + count * itemsize] = span[begin : begin + count * itemsize]
            at += count * itemsize
        return data
    for start, count in pieces:
        reader.pread_into(target[at : at + count * itemsize], offset + start * itemsize)
        at += count * itemsize
    return data
