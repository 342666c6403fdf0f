"""torch.distributed.checkpoint directories: read and written chunk by chunk, by one process, with plain files."""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 - their index is a pickle; only the names in `_ALLOWED` are ever looked up
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from perdure.convert.named import EXTRA, from_dictionary, own_record
from perdure.convert.state import Item, State, logical, placeholder, staged
from perdure.convert.torchfile import safely_loaded
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, UsageError
from perdure.format.box import Box, cover_fault
from perdure.state.jsonable import from_json
from perdure.state.optimizer import MASTER

__all__ = ["open_dcp", "write_dcp"]

_INDEX = ".metadata"
_INDEX_LIMIT = 2 << 30
_CLASSES = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_CLASSES, name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}  # fmt: skip


class _IndexReader(pickle.Unpickler):
    """Reads their index; a name that isn't expected there is an error, so that nothing of a file's own is ever run."""

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _ALLOWED
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise UsageError(f"it asks for {module}.{name}, which an index of torch.distributed.checkpoint never needs")
        return super().find_class(module, name)


def open_dcp(path: str | os.PathLike[str], *, optimizer_type: str = "AdamW") -> State:
    """What a directory of `torch.distributed.checkpoint.save` holds, however many ranks wrote it.

    Raises:
        CheckpointNotFoundError: no such directory, or no index in it.
        UsageError: it can't be read without running code that lies in it.
        DamagedCheckpointError: a file or a part of a tensor is missing.
    """
    directory = os.fspath(path)
    index = _read_index(directory)
    tree: dict[str, Any] = {}
    tensors: dict[int, tuple[Tensor, str, TensorStorageMetadata]] = {}
    paths = index.planner_data if isinstance(index.planner_data, dict) else {}
    for key, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(directory, key, entry)
            value: Any = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="cpu")
            if value.numel():
                tensors[value.data_ptr()] = (value, key, entry)
        elif isinstance(entry, BytesStorageMetadata):
            value = _read_piece(directory, index, MetadataIndex(key), key)
        else:
            raise DamagedCheckpointError(f"{directory}: {key}: an entry of an unknown kind in its index", tensor=key)
        _put(tree, paths.get(key, (key,)), value)

    def load(tensor: Tensor) -> Tensor:
        known = tensors.get(tensor.data_ptr()) if tensor.numel() else None
        return tensor if known is None else _read_tensor(directory, index, known[1], known[2])

    return from_dictionary(directory, _lists(tree), load=load, optimizer_type=optimizer_type)


def _read_index(directory: str) -> Metadata:
    path = os.path.join(directory, _INDEX)
    if not os.path.isfile(path):
        raise CheckpointNotFoundError(
            f"{directory} is no directory of torch.distributed.checkpoint: there is no {_INDEX} in it"
        )
    if os.path.getsize(path) > _INDEX_LIMIT:
        raise DamagedCheckpointError(f"{path}: over {_INDEX_LIMIT} bytes", file=path)
    with open(path, "rb") as file:
        try:
            index = _IndexReader(file).load()
        except UsageError as error:
            raise UsageError(f"{path} is refused: {error.message}") from None
        except Exception as error:
            raise DamagedCheckpointError(
                f"{path}: not readable: {' '.join(str(error).split())[:200]}", file=path
            ) from None
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise DamagedCheckpointError(f"{path}: not an index of torch.distributed.checkpoint", file=path)
    return index


def _check_chunks(directory: str, key: str, entry: TensorStorageMetadata) -> None:
    boxes = {Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks}
    shape: list[int] = [int(size) for size in entry.size]
    fault = cover_fault(boxes, shape)
    if fault is not None and all(shape):
        raise DamagedCheckpointError(f"{directory}: {key}: {fault}", tensor=key)


def _put(tree: dict[Any, Any], path: Any, value: Any) -> None:
    steps = list(path)
    at = tree
    for step in steps[:-1]:
        at = at.setdefault(step, {})
    at[steps[-1]] = value


def _lists(tree: Any) -> Any:
    """Dictionaries whose keys count from 0 are the lists that they were."""
    if not isinstance(tree, dict):
        return tree
    inner = {key: _lists(value) for key, value in tree.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner


def _read_tensor(directory: str, index: Metadata, key: str, entry: TensorStorageMetadata) -> Tensor:
    whole: Tensor | None = None
    for number, chunk in enumerate(entry.chunks):
        piece = _read_piece(directory, index, MetadataIndex(key, chunk.offsets, number), key)
        if not isinstance(piece, Tensor) or piece.dtype != entry.properties.dtype or piece.shape != chunk.sizes:
            raise DamagedCheckpointError(f"{directory}: {key}: a part is not what the index says", tensor=key)
        if piece.shape == entry.size:
            return piece
        if whole is None:
            whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype, device="cpu")
        whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = piece
    assert whole is not None
    return whole


def _read_piece(directory: str, index: Metadata, where: MetadataIndex, key: str) -> Any:
    """One entry of a data file, each of which is a small file of `torch.save` in itself."""
    place = cast("_StorageInfo | None", index.storage_data.get(where))
    if place is None:
        raise DamagedCheckpointError(f"{directory}: {key}: the index does not say where it is", tensor=key)
    if getattr(place, "transform_descriptors", None):
        raise UsageError(f"{directory}: {key} was stored with {place.transform_descriptors}, which is not read here")
    name = str(place.relative_path)
    path = os.path.join(directory, name)
    if os.path.isabs(name) or ".." in name.split("/"):
        raise DamagedCheckpointError(f"{directory}: {key}: its file {name[:120]!r} is outside", tensor=key)
    if not os.path.isfile(path):
        raise DamagedCheckpointError(f"{path}: missing", file=path, tensor=key)
    with open(path, "rb") as file:
        window = io.BufferedReader(_Window(file, int(place.offset), int(place.length)))
        return safely_loaded(window, f"{path}: {key}")


class _Window(io.RawIOBase):
    """A range of an open file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count


# ---- writing


def write_dcp(state: State, target: str, *, advance: Callable[[int], None] = lambda count: None) -> None:
    """Writes model, optimizer and progress, with the keys that `get_state_dict` gives: for `dcp.load` anywhere.

    The tensors of registered objects lie under `extra`; how they fit together is in our own record.

    Raises:
        UsageError: the target is there already.
    """
    loaders: dict[str, Item] = {}
    tree = {
        "model": _model(state, loaders),
        **_optimizer(state, loaders),
        **_extra(state, loaders),
        **own_record(state),
    }
    with staged(target) as directory, warnings.catch_warnings():
        # That it saves in a single process is what is meant here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save(tree, storage_writer=_Writer(directory), planner=_Planner(loaders, advance), no_dist=True)
        except CheckpointException as wrapped:
            # What went wrong is inside, by rank; there is only one.
            raise next(iter(wrapped.failures.values()))[0] from None


def _model(state: State, loaders: dict[str, Item]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for item in state.section("model"):
        for name in (item.name, *item.aliases):
            tensors[name] = placeholder(item)
            loaders[f"model.{name}"] = item
    return tensors


def _optimizer(state: State, loaders: dict[str, Item]) -> dict[str, Any]:
    """The optimizer as torch names it: `state.<parameter>.<key>`, and the groups with names for parameters."""
    described = state.training.get("optimizer")
    items = {item.name: item for item in state.section("optimizer")}
    if not isinstance(described, dict) or not items:
        return {}
    keys: dict[str, str] = {**described.get("keys", {}), MASTER: MASTER}
    shared = described.get("values", {}).get("$shared_step")
    states: dict[str, dict[str, Any]] = {}
    for name, item in items.items():
        label, _, parameter = name.partition(".")
        if name == shared or label not in keys:
            continue
        states.setdefault(parameter, {})[keys[label]] = placeholder(item)
        loaders[f"optimizer.state.{parameter}.{keys[label]}"] = item
    if shared in items:
        without = set(described.get("values", {}).get("$without_step", ()))
        for parameter in [name for name in states if name not in without]:
            states[parameter]["step"] = placeholder(items[shared])
            loaders[f"optimizer.state.{parameter}.step"] = items[shared]
    groups = [
        {
            **from_json(group["settings"], lambda reference: torch.tensor(0, device="cpu")),
            "params": list(group["params"]),
        }
        for group in described.get("groups", [])
    ]
    return {"optimizer": {"state": states, "param_groups": groups}}


def _extra(state: State, loaders: dict[str, Item]) -> dict[str, Any]:
    items = state.section("extra")
    loaders.update({f"{EXTRA}.{item.name}": item for item in items})
    return {EXTRA: {item.name: placeholder(item) for item in items}} if items else {}


class _Planner(DefaultSavePlanner):
    """Tensors are placeholders; the real one is read when it is written."""

    def __init__(self, loaders: dict[str, Item], advance: Callable[[int], None]) -> None:
        super().__init__()
        self._loaders, self._advance = loaders, advance

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        item = self._loaders.get(write_item.index.fqn)
        if item is None:
            return super().resolve_data(write_item)
        self._advance(item.nbytes)
        return logical(item, item.load())


class _Writer(FileSystemWriter):
    """Their writer keeps every tensor until a file ends; this one lets go of each."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = "__0_0.distcp"
        results = []
        with open(os.path.join(self.path, name), "wb") as file:
            for item in plan.items:
                start = file.tell()
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    assert isinstance(data, io.BytesIO)
                    file.write(data.getbuffer())
                else:
                    torch.save(data, cast("Any", file))
                place = _StorageInfo(name, start, file.tell() - start)
                results.append(WriteResult(index=item.index, size_in_bytes=place.length, storage_data=place))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
