"""Weight directories in Hugging Face's layout, read into the one record that the engine knows: weights only.

One `model.safetensors`, or many files named by `*model.safetensors.index.json` (`weight_map`: tensor -> file).
Pickled weights are never opened. Pure functions of bytes and names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.errors import DamagedCheckpointError
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord, TensorRecord
from perdure.format.safetensors import Header

__all__ = ["CONFIG", "SINGLE", "from_headers", "index_name", "model_config", "weight_files"]

SINGLE = "model.safetensors"
CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"


def index_name(names: Iterable[str]) -> str | None:
    """The index file among a directory's names, or None; the plain one before one with a prefix."""
    found = sorted((name for name in names if name.endswith(_INDEX)), key=lambda name: (len(name), name))
    return found[0] if found else None


def weight_files(data: bytes, file: str) -> dict[str, str]:
    """The index's `weight_map`: tensor name -> file name.

    Raises:
        DamagedCheckpointError: not an index, or a file name that isn't a plain `.safetensors` one.
    """
    try:
        table: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedCheckpointError(f"{file}: not JSON: {error}", file=file) from None
    places = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(places, dict) or not places:
        raise DamagedCheckpointError(f"{file}: no weight_map", file=file)
    for tensor, name in places.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or "\0" in name:
            raise DamagedCheckpointError(
                f"{file}: weight_map: {tensor[:300]}: not a safetensors file beside the index: {str(name)[:120]!r}",
                file=file,
                tensor=tensor,
            )
    return places


def model_config(data: bytes, file: str) -> dict[str, Any]:
    """What config.json says of the model.

    Raises:
        DamagedCheckpointError: not a JSON object.
    """
    try:
        table: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedCheckpointError(f"{file}: not JSON: {error}", file=file) from None
    if not isinstance(table, dict):
        raise DamagedCheckpointError(f"{file}: expected an object, found {type(table).__name__}", file=file)
    return table


def from_headers(
    headers: Mapping[str, Header], where: str, places: Mapping[str, str] | None = None
) -> CheckpointMetadata:
    """The record of a directory, from its files' headers by file name.

    Args:
        places: the index's `weight_map`, which must agree with the headers; None for a single file.

    Raises:
        DamagedCheckpointError: a tensor is in two files, or the index and the files disagree.
    """
    metadata = CheckpointMetadata()
    for file_name, header in headers.items():
        number = len(metadata.files)
        metadata.files.append(FileRecord(file_name, 0, ""))
        for name, entry in header.entries.items():
            if places is not None and places.get(name) != file_name:
                what = f"the index says {places[name][:120]!r}" if name in places else "the index does not name it"
                raise DamagedCheckpointError(
                    f"{where}: {name[:300]}: in {file_name}, but {what}", file=file_name, tensor=name
                )
            if name in metadata.model:
                raise DamagedCheckpointError(f"{where}: {name[:300]}: in two files", file=file_name, tensor=name)
            shard = ShardRecord(number, (0,) * len(entry.shape), entry.shape, "")
            metadata.model[name] = TensorRecord(entry.dtype, entry.shape, [shard], entry.logical)
    missing = next((name for name in places or () if name not in metadata.model), None)
    if places is not None and missing is not None:
        raise DamagedCheckpointError(
            f"{where}: {missing[:300]}: the index says it is in {places[missing]}, but it is not there",
            file=places[missing],
            tensor=missing,
        )
    metadata.check(where)
    return metadata
