"""A plain state dictionary in one file of `torch.save`: read without running code in it, written tensor by tensor."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.convert.named import from_dictionary
from perdure.convert.state import State, placeholder, staged
from perdure.engine.writer import memory_of
from perdure.errors import CheckpointNotFoundError, UsageError

__all__ = ["open_torch", "safely_loaded", "write_torch"]

_CODE = re.compile(r"(?:GLOBAL|class|Global) ([\w.]+\.\w+)")


def open_torch(path: str | os.PathLike[str], *, optimizer_type: str = "AdamW") -> State:
    """What a file of `torch.save` holds; it is mapped, so that only what is read takes memory.

    Raises:
        CheckpointNotFoundError: no such file.
        UsageError: it can't be read without running code that lies in it, or is no file of torch.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise CheckpointNotFoundError(f"{name} is not a file; expected one that torch.save wrote")
    tree, mapped = _loaded(name)
    if not isinstance(tree, dict):
        raise UsageError(f"{name} holds a {type(tree).__name__}; expected a dictionary of tensors")
    return from_dictionary(name, tree, load=_taken if mapped else _as_it_is, optimizer_type=optimizer_type)


def _taken(tensor: Tensor) -> Tensor:
    """A copy of a mapped tensor; its pages are let go, so that a whole file never stays in memory."""
    copy = tensor.clone()
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    begin = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes()) // page * page - begin
    if size > 0 and sys.platform == "linux":
        # Private pages that nobody wrote to: the kernel reads them again from the file if they are asked for.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    return copy


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _loaded(path: str) -> tuple[Any, bool]:
    """What a file holds, and whether it is mapped; files of old versions cannot be, and are read whole."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True), True
    except OSError:
        raise
    except Exception:
        return safely_loaded(path, path), False


def safely_loaded(source: Any, where: str) -> Any:
    """What a file of `torch.save` holds, if that needs no code but torch's own.

    Raises:
        UsageError: it does, or is no such file.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
    code = _CODE.search(text)
    if code is not None:
        raise UsageError(
            f"{where} holds an object of {code[1]}, which cannot be read without running code that lies in it",
            hint="save plain tensors, numbers and texts: torch.save(model.state_dict(), path)",
        )
    # torch explains at length, and advises to run such code.
    why = text.partition("Weights only load failed")[0].partition(". ")[0][:200]
    raise UsageError(
        f"{where} is damaged, or no file that torch.save wrote{f' ({why})' if ' ' in why else ''}",
        hint="expected what torch.save(model.state_dict(), path) writes",
    )


def write_torch(state: State, target: str, *, advance: Callable[[int], None] = lambda count: None) -> None:
    """Writes the model's plain state dictionary, as `torch.save(model.state_dict(), target)` would; tied names share.

    The file is laid out with empty room for each tensor, which is then filled, so that no two are in memory at once.

    Raises:
        UsageError: the target is there already.
    """
    items = state.section("model")
    tensors: dict[str, Tensor] = {}
    for item in items:
        tensors[item.name] = placeholder(item)
        tensors.update(dict.fromkeys(item.aliases, tensors[item.name]))
    with staged(target, directory=False) as path:
        with open(path, "wb") as empty, torch.serialization.skip_data():
            torch.save(tensors, empty)
        reader: Any = torch._C.PyTorchFileReader(path)
        # torch numbers storages in the order in which it meets them; a tied one is met once.
        records = [f"data/{number}" for number in range(len(items))]
        places = [reader.get_record_offset(record) for record in records]
        del reader
        with open(path, "r+b") as file:
            for item, place in zip(items, places, strict=True):
                tensor = item.load().contiguous()
                file.seek(place)
                file.write(memory_of(tensor))
                advance(item.nbytes)
            file.flush()
            os.fsync(file.fileno())
