"""Checkpoints of MindSpore Transformers, read into the one record that the engine knows.

With several ranks their metadata.json says what is where: `state_dict_metadata` holds dtype, global shape, the cut
(`axis_fragmentations`) and the slices, `storage_data` the files of each slice. Slice number s lies at
`unravel_index(s, axis_fragmentations) * local_shape`. A single device writes no metadata.json: every file then holds
whole tensors. Pure functions of bytes and names; nothing read here is trusted.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from perdure.errors import DamagedCheckpointError
from perdure.format.dtypes import BY_MINDSPORE, as_held
from perdure.format.metadata import CheckpointMetadata, FileRecord, Section, ShardRecord, TensorRecord
from perdure.format.names import ShardName, parse_shard_filename
from perdure.format.safetensors import Header

__all__ = ["MOMENTS", "STEP", "THEIR_STEP", "check_resumable", "from_headers", "from_metadata", "is_theirs"]

STEP, THEIR_STEP = "adam_step", "global_step"
"""Our name of AdamW's step, and theirs."""
MOMENTS = {"adam_m": "exp_avg", "adam_v": "exp_avg_sq"}
"""Their names of AdamW's moments -> torch's."""

_MASTER = "main_param"
_LOW_PRECISION = ("BF16", "F16")
_SECTIONS: dict[str, Section] = {"model": "model", "opt": "optimizer", "extra": "extra"}
_LIMIT = 1 << 60
_KEY_LIMIT = 4096


def is_theirs(data: bytes) -> bool:
    """Whether the bytes of a metadata.json are theirs by its keys; False for anything that isn't JSON."""
    try:
        table = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return False
    return isinstance(table, dict) and "state_dict_metadata" in table and "storage_data" in table


def from_metadata(data: bytes, file: str = "metadata.json") -> CheckpointMetadata:
    """Reads their metadata.json. Digests are empty: they write none.

    Raises:
        DamagedCheckpointError: not theirs, a value that cannot be meant, or a tensor that isn't covered by its slices.
    """
    try:
        table = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedCheckpointError(f"{file}: not JSON: {error}", file=file) from None
    tensors, storage = (
        table.get(key) if isinstance(table, dict) else None for key in ("state_dict_metadata", "storage_data")
    )
    if not isinstance(tensors, dict) or not isinstance(storage, dict):
        raise DamagedCheckpointError(
            f"{file}: expected state_dict_metadata and storage_data, as MindSpore Transformers writes them", file=file
        )
    places = _places(storage, file)
    metadata = CheckpointMetadata()
    numbers: dict[str, int] = {}
    for name, entry in tensors.items():
        _add_sliced(metadata, numbers, name, entry, places.pop(name, {}), file)
    if places:
        lost = next(iter(places))
        raise DamagedCheckpointError(
            f"{file}: storage_data: {lost[:300]}: not in state_dict_metadata", file=file, tensor=lost
        )
    return _finished(metadata, file)


def from_headers(headers: Mapping[str, Header], where: str) -> CheckpointMetadata:
    """Reads a directory without metadata.json from its files' headers, by file name: every tensor is whole.

    Raises:
        DamagedCheckpointError: no model file, a file of several ranks (then metadata.json is what is missing), or
            a tensor in two files.
    """
    metadata = CheckpointMetadata()
    for file_name, header in headers.items():
        parsed = parse_shard_filename(file_name)
        if parsed is not None and parsed.ranks != 1:
            raise DamagedCheckpointError(
                f"{where}: {file_name} is one of {parsed.ranks} files, and there is no metadata.json to say how they "
                "fit together",
                file=file_name,
            )
        if header.text.get("format") == "pt" and "save" in header.text:
            raise DamagedCheckpointError(
                f"{where}: {file_name} was written by perdure, but the iteration has no commit.json", file=file_name
            )
        section = _SECTIONS[parsed.kind] if parsed is not None else "model"
        number = len(metadata.files)
        metadata.files.append(FileRecord(file_name, 0, ""))
        for name, entry in header.entries.items():
            shard = ShardRecord(number, (0,) * len(entry.shape), entry.shape, "")
            record = TensorRecord(entry.dtype, entry.shape, [shard], entry.logical)
            _put(metadata, section, name, record, where)
    if not metadata.model:
        raise DamagedCheckpointError(
            f"{where}: no model file"
            + (f", only {', '.join(f.name for f in metadata.files[:3])}" if metadata.files else "")
        )
    return _finished(metadata, where)


def check_resumable(metadata: CheckpointMetadata, where: str) -> None:
    """Whether a full resume finds all that belongs together: both moments, the step, masters of all or none.

    Raises:
        DamagedCheckpointError: a part of the optimizer's state is missing; the tensor is named.
    """
    optimizer = metadata.optimizer
    parameters = {name: state for state in MOMENTS for name in _parameters(metadata, state)}
    if not parameters:
        return
    if STEP not in metadata.training["optimizer"]["keys"]:
        raise DamagedCheckpointError(
            f"{where}: the optimizer's moments are there, but no {THEIR_STEP} of one number", tensor=THEIR_STEP
        )
    masters = set(_parameters(metadata, _MASTER))
    for name in parameters:
        absent = [f"{state}.{name}" for state in MOMENTS if f"{state}.{name}" not in optimizer]
        record = metadata.model.get(name)
        if masters and record is not None and record.dtype in _LOW_PRECISION and name not in masters:
            absent.append(f"{_MASTER}.{name}")
        if absent:
            raise DamagedCheckpointError(
                f"{where}: optimizer: {absent[0][:300]}: missing, while the rest of its state is there",
                hint="to start from the weights only, set checkpoint.no_load_optim=True",
                tensor=absent[0],
            )
    lost = sorted(masters - set(parameters))
    if lost:
        raise DamagedCheckpointError(
            f"{where}: optimizer: {next(iter(MOMENTS))}.{lost[0][:300]}: missing, while its master is there",
            hint="to start from the weights only, set checkpoint.no_load_optim=True",
            tensor=lost[0],
        )


# ---- metadata.json


def _places(storage: dict[str, Any], file: str) -> dict[str, dict[int, list[str]]]:
    """`storage_data` as tensor name -> slice number -> file names."""
    places: dict[str, dict[int, list[str]]] = {}
    for key, entries in storage.items():
        name, number = _storage_key(key, file)
        try:
            files = [entry["file_name"] for entry in entries]
        except (TypeError, KeyError):
            files = []
        if not isinstance(entries, list) or not files or not all(isinstance(f, str) and f for f in files):
            raise DamagedCheckpointError(f"{file}: storage_data: {key[:120]}: no list of files", file=file, tensor=name)
        if number in places.setdefault(name, {}):
            raise DamagedCheckpointError(f"{file}: storage_data: {key[:120]}: twice", file=file, tensor=name)
        places[name][number] = files
    return places


def _storage_key(key: str, file: str) -> tuple[str, int]:
    """`"('name', (3,))"` -> ("name", 3)."""
    try:
        if len(key) <= _KEY_LIMIT:
            name, (number,) = ast.literal_eval(key)
            if isinstance(name, str) and type(number) is int and 0 <= number < _LIMIT:
                return name, number
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    raise DamagedCheckpointError(f"{file}: storage_data: {key[:120]!r} is not a name and a slice number", file=file)


def _add_sliced(
    metadata: CheckpointMetadata,
    numbers: dict[str, int],
    name: str,
    entry: Any,
    places: dict[int, list[str]],
    file: str,
) -> None:
    def damage(what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{file}: state_dict_metadata: {name[:300]}: {what}", file=file, tensor=name)

    try:
        dtype, shape, cut, chunks = (
            entry["properties"]["dtype"],
            entry["global_shape"],
            entry["axis_fragmentations"],
            entry["chunk"],
        )
    except (TypeError, KeyError):
        raise damage("dtype, global_shape, axis_fragmentations or chunk is missing") from None
    held = _held(dtype)
    if held is None:
        raise damage(f"unknown dtype {str(dtype)[:40]!r}")
    stored, tail, logical = held
    if not _counts(shape) or not _counts(cut) or len(cut) != len(shape) or 0 in cut:
        raise damage(f"shape {str(shape)[:80]} cut into {str(cut)[:80]} cannot be meant")
    if not isinstance(chunks, list) or not chunks:
        raise damage("no slices")
    record = TensorRecord(stored, (*shape, *tail), [], logical)
    sections: set[Section] = set()
    seen: set[int] = set()
    for chunk in chunks:
        number, local = _slice(chunk, len(shape), damage)
        if number in seen:
            continue
        seen.add(number)
        if number >= prod(cut) or any(n * c != s for n, c, s in zip(local, cut, shape, strict=True)):
            raise damage(f"slice {number} of shape {list(local)} does not belong to {list(shape)} cut into {list(cut)}")
        offset = tuple(i * n for i, n in zip(_unravel(number, cut), local, strict=True))
        if number not in places:
            raise damage(f"slice {number} is in no file")
        for file_name in places.pop(number):
            sections.add(_section_of(file_name))
            index = numbers.setdefault(file_name, len(numbers))
            if index == len(metadata.files):
                metadata.files.append(FileRecord(file_name, 0, ""))
            record.shards.append(ShardRecord(index, (*offset, *(0 for _ in tail)), (*local, *tail), ""))
    if places:
        raise damage(f"storage_data has a slice {next(iter(places))} that state_dict_metadata lacks")
    if len(sections) != 1:
        raise damage("its slices are in model and in optimizer files")
    _put(metadata, sections.pop(), name, record, file)


def _held(dtype: Any) -> tuple[str, tuple[int, ...], str] | None:
    """A dtype of theirs as (stored dtype, what its shape gets at the end, logical dtype); None for an unknown one."""
    if dtype == "Complex64":
        return as_held("C64", ())
    return (BY_MINDSPORE[dtype].safetensors, (), "") if isinstance(dtype, str) and dtype in BY_MINDSPORE else None


def _slice(chunk: Any, dimensions: int, damage: Any) -> tuple[int, tuple[int, ...]]:
    """Slice number and local shape."""
    try:
        offset, local = chunk["global_offset"], chunk["local_shape"]
    except (TypeError, KeyError):
        raise damage("a slice without global_offset or local_shape") from None
    if not _counts(offset) or len(offset) != 1 or not _counts(local) or len(local) != dimensions:
        raise damage(f"a slice {str(offset)[:40]} of shape {str(local)[:80]} cannot be meant")
    return offset[0], tuple(local)


def _unravel(number: int, cut: list[int]) -> tuple[int, ...]:
    """Index of slice `number`, row-major over `cut`."""
    index = []
    for count in reversed(cut):
        number, at = divmod(number, count)
        index.append(at)
    return tuple(reversed(index))


def _counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < _LIMIT for n in value)


def _section_of(file_name: str) -> Section:
    parsed: ShardName | None = parse_shard_filename(file_name)
    return "model" if parsed is None else _SECTIONS[parsed.kind]


# ---- what both ways share


def _put(metadata: CheckpointMetadata, section: Section, name: str, record: TensorRecord, where: str) -> None:
    """Files a tensor under our name of it; its entry in the files keeps theirs."""
    ours = STEP if section == "optimizer" and name == THEIR_STEP else name
    records = metadata.section(section)
    if ours in records:
        raise DamagedCheckpointError(f"{where}: {section}: {name[:300]}: in two files", tensor=name)
    if ours != name:
        shards = [msgspec.structs.replace(shard, key=name) for shard in record.shards]
        record = msgspec.structs.replace(record, shards=shards)
    records[ours] = record


def _parameters(metadata: CheckpointMetadata, state: str) -> Iterator[str]:
    """Parameters that have `<state>.<parameter>`."""
    prefix = f"{state}."
    return (name.removeprefix(prefix) for name in metadata.optimizer if name.startswith(prefix))


def _finished(metadata: CheckpointMetadata, where: str) -> CheckpointMetadata:
    metadata.check(where)
    if metadata.optimizer:
        metadata.training["optimizer"] = _description(metadata)
    return metadata


def _description(metadata: CheckpointMetadata) -> dict[str, Any]:
    """What our own metadata.json would say of their AdamW; settings are left to the configuration."""
    optimizer = metadata.optimizer
    known = tuple(f"{state}." for state in (*MOMENTS, _MASTER))
    others = [name for name in optimizer if name != STEP and not name.startswith(known)]
    # A rate that was constant is saved as a scalar; it must never win over the configuration.
    set_aside = [name for name in others if prod(optimizer[name].shape) <= 1]
    foreign = sorted({name.partition(".")[0] for name in others if name not in set_aside})
    described: dict[str, Any] = {
        "type": f"not AdamW alone (it has {', '.join(foreign[:3])[:120]})" if foreign else "AdamW",
        "keys": {label: key for label, key in MOMENTS.items() if any(_parameters(metadata, label))},
        "groups": [{"params": sorted(_parameters(metadata, next(iter(MOMENTS)))), "settings": {}}],
        "values": {},
        "set_aside": set_aside,
    }
    if STEP in optimizer and prod(optimizer[STEP].shape) == 1:
        described["keys"][STEP] = "step"
        described["values"] = {"$shared_step": STEP, STEP: {"kind": "step"}}
    return described
