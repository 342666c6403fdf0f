"""Two checkpoints tensor by tensor, however each was cut.

Equal means equal bytes. numpy is imported on use: for magnitudes where something differs. Memory stays bounded:
boxes are compared a few MiB at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from perdure.catalog.boxes import chunks, distinct_boxes, read_box
from perdure.catalog.checkpoint import Checkpoint
from perdure.catalog.read import ShardFiles
from perdure.format.box import intersect
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import SECTIONS, Section, TensorRecord
from perdure.storage.base import Storage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DiffReport", "TensorDiff", "diff"]

_LAYOUT = re.compile(r"(ranks|mesh|settings\.parallelism)(\.|$)")
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
        """Whether tensors, progress and training settings are all the same; how each was cut doesn't matter."""
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
        one, other = left.metadata.training, right.metadata.training
        found = _tree_diff(one, other)
        report.training.update({key: pair for key, pair in found.items() if not _LAYOUT.match(key)})
        if len(report.training) < len(found):
            report.notes.append(f"cut differently, which counts as no difference: {_cut(one)}, and {_cut(other)}")
    else:
        report.notes.append("settings are not compared: other programs do not record them")


def _cut(training: Mapping[str, Any]) -> str:
    """`4 ranks (shard 2, tensor 2)`."""
    ranks, mesh = training.get("ranks"), training.get("mesh")
    axes = ", ".join(f"{axis} {degree}" for axis, degree in mesh.items()) if isinstance(mesh, dict) else ""
    return f"{ranks} rank{'' if ranks == 1 else 's'}" + (f" ({axes})" if axes else "")


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
    for one in distinct_boxes(a.shards):
        for other in distinct_boxes(b.shards):
            both = one.box if one.box == other.box else intersect(one.box, other.box)
            if both is None:
                continue
            reader_a, offset_a = files_a.locate(section, name, one)
            reader_b, offset_b = files_b.locate(section, name, other)
            for box in chunks(both, itemsize):
                left = read_box(reader_a, offset_a, one.box, box, itemsize)
                right = read_box(reader_b, offset_b, other.box, box, itemsize)
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
