"""A fingerprint of logical state that no cut into shards changes.

Each element is mixed with its tensor's name, dtype and shape and with its place in the whole tensor, and all
are summed modulo 2^64, twice. So any cut, on any number of ranks, gives the same value. It tells states apart
where nobody means harm, as digests do. numpy is imported on use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Protocol

from perdure.catalog.boxes import chunks, distinct_boxes, read_box
from perdure.catalog.checkpoint import Checkpoint
from perdure.format.box import Box
from perdure.format.digest import digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import SECTIONS, Section, ShardRecord, TensorRecord
from perdure.storage.base import FileReader, Storage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "AT_ONCE",
    "Sums",
    "add",
    "box_sums",
    "by_section",
    "fingerprint",
    "label_sums",
    "shard_sums",
    "shown",
    "total",
]


class ShardSource(Protocol):
    """Where the bytes of a shard lie."""

    def locate(self, section: Section, name: str, shard: ShardRecord) -> tuple[FileReader, int]: ...


Sums = tuple[int, int]
"""Two sums modulo 2^64."""

AT_ONCE = 64 << 10  # elements: what is computed with stays in the cache
_ALL = (1 << 64) - 1


def fingerprint(
    path: str | os.PathLike[str], *, storage: Storage | None = None, progress: Callable[[int], None] | None = None
) -> dict[str, str]:
    """A 128-bit value per tensor, as `{section/name: hex}`; `total` makes one of them.

    Args:
        path: an iteration directory, or a root: the iteration a resume would take.
        progress: called with bytes read.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError: as of `Checkpoint`.
    """
    checkpoint = Checkpoint(path, storage)
    found: dict[str, str] = {}
    with checkpoint.open_files() as files:
        for section, name, tensor in checkpoint.metadata.tensors():
            sums = label_sums(section, name, tensor)
            for shard in distinct_boxes(tensor.shards):
                sums = add(sums, shard_sums(files, section, name, tensor, shard, progress))
            found[f"{section}/{name}"] = shown(sums)
    return found


def total(tensors: Iterable[str]) -> str:
    """One fingerprint for all tensors, from those of each; their order plays no part."""
    sums: Sums = (0, 0)
    for text in tensors:
        sums = add(sums, (int(text[:16], 16), int(text[16:], 16)))
    return shown(sums)


def by_section(tensors: Mapping[str, str]) -> dict[str, str]:
    """The fingerprint of all tensors, as `all`, and of those of each section that has any."""
    found = {"all": total(tensors.values())}
    for section in SECTIONS:
        own = [text for name, text in tensors.items() if name.startswith(f"{section}/")]
        if own:
            found[section] = total(own)
    return found


def add(a: Sums, b: Sums) -> Sums:
    """Both together."""
    return (a[0] + b[0]) & _ALL, (a[1] + b[1]) & _ALL


def shown(sums: Sums) -> str:
    """As 32 hexadecimal digits."""
    return f"{sums[0]:016x}{sums[1]:016x}"


def label_sums(section: Section, name: str, tensor: TensorRecord) -> Sums:
    """What a tensor counts before any element: its name, dtype and shape."""
    text = f"{section}/{name}/{tensor.dtype}/{tensor.logical}/{list(tensor.shape)}"
    label = digest_bytes(text.encode())
    return int(label[-32:-16], 16), int(label[-16:], 16)


def shard_sums(
    files: ShardSource,
    section: Section,
    name: str,
    tensor: TensorRecord,
    shard: ShardRecord,
    progress: Callable[[int], None] | None = None,
) -> Sums:
    """What the elements of one shard count."""
    itemsize = BY_SAFETENSORS[tensor.dtype].itemsize
    seed = label_sums(section, name, tensor)[0]
    sums: Sums = (0, 0)
    reader, offset = files.locate(section, name, shard)
    for box in chunks(shard.box, itemsize, AT_ONCE * itemsize):
        data = read_box(reader, offset, shard.box, box, itemsize)
        sums = add(sums, box_sums(seed, data, box, tensor.shape, itemsize))
        if progress is not None:
            progress(len(data))
    return sums


def box_sums(seed: int, data: bytes | bytearray | memoryview, box: Box, shape: tuple[int, ...], itemsize: int) -> Sums:
    """What the elements of a box count.

    Args:
        seed: the first of the tensor's `label_sums`.
        data: the elements, row-major; best not many more than `AT_ONCE`.
        shape: of the whole tensor.
    """
    import numpy as np

    values = np.frombuffer(data, dtype=f"<u{itemsize}").astype(np.uint64)
    keys = _places(box, shape)
    keys *= np.uint64(0x9E3779B97F4A7C15)
    keys += np.uint64(seed)
    _scramble(keys)
    values *= np.uint64(0xD1342543DE82EF95)
    values += np.uint64(1)
    values ^= keys
    _scramble(values)
    first = int(values.sum(dtype=np.uint64))
    # The second sum weighs each element by an odd number of its place: no two differ in both alike.
    keys |= np.uint64(1)
    values *= keys
    return first, int(values.sum(dtype=np.uint64))


def _scramble(x: NDArray[np.uint64]) -> None:
    """The finaliser of splitmix64, in place: a bijection in which every bit depends on every bit."""
    import numpy as np

    shifted = np.empty_like(x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(x, np.uint64(shift), out=shifted)
        x ^= shifted
        x *= np.uint64(factor)


def _places(box: Box, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    """Row-major index in the whole tensor of every element of a box."""
    import numpy as np

    places = np.zeros(box.shape, dtype=np.uint64)
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        stride = np.uint64(prod(shape[dim + 1 :]))
        line = (np.arange(extent, dtype=np.uint64) + np.uint64(start)) * stride
        places += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return places.reshape(-1)
