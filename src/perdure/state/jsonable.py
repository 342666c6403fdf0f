"""Python values as JSON that comes back as what it was: tuples, integers of any size, infinities, bytes.

What JSON has no word for is a one-key object whose key begins with `$`. Tensors are left to the
caller, who stores them elsewhere. Anything else is refused by name, at save time: nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from perdure.errors import DamagedCheckpointError, UnsupportedStateError
from perdure.state.shards import dtype_name

__all__ = ["from_json", "to_json"]

_DEPTH = 100
# In the JSON a level may be three: a tagged object, its list, a pair in it.
_JSON_DEPTH = 3 * _DEPTH + 10
_PLAIN = 1 << 53
# What numpy and torch both know, in this machine's byte order.
_ARRAYS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}


def to_json(value: Any, where: str, tensor: Callable[[Tensor, str], Any], depth: int = 0) -> Any:
    """`value` as JSON; `tensor(t, where)` says what stands for a tensor.

    Raises:
        UnsupportedStateError: naming where the value that cannot be held is.
    """
    if depth > _DEPTH:
        raise UnsupportedStateError(f"{where[:300]}: nested more than {_DEPTH} deep (does it contain itself?)")
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(value, where)
    if type(value) is int:
        return value if abs(value) < _PLAIN else {"$int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        return tensor(value, where)
    if type(value) is list or type(value) is tuple:
        items = [to_json(v, f"{where}.{i}", tensor, depth + 1) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, dict):
        return _dict_to_json(value, where, tensor, depth)
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [to_json(value.real, where, tensor), to_json(value.imag, where, tensor)]}
    if type(value) in (set, frozenset):
        ordered = sorted(value, key=lambda v: (type(v).__name__, repr(v)))
        return {f"${type(value).__name__}": [to_json(v, where, tensor, depth + 1) for v in ordered]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) is numpy.ndarray and value.dtype.name in _ARRAYS and value.dtype.isnative:
        held = torch.from_numpy(value.copy())
        return {"$array": [to_json(held, where, tensor, depth + 1), list(value.shape)]}
    if isinstance(value, numpy.generic) and value.dtype.name in _ARRAYS:
        return {"$scalar": [value.dtype.name, to_json(value.item(), where, tensor, depth + 1)]}
    raise _refusal(value, where)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnsupportedStateError(f"{where[:300]}: a text that is not valid Unicode cannot be saved") from None
    return value


def _dict_to_json(value: dict[Any, Any], where: str, tensor: Callable[[Tensor, str], Any], depth: int) -> Any:
    if type(value) is OrderedDict:
        return {"$ordered": _dict_to_json(dict(value), where, tensor, depth + 1)}
    if type(value) is Counter:
        return {"$counter": _dict_to_json(dict(value), where, tensor, depth + 1)}
    if type(value) is defaultdict:
        made = value.default_factory
        name = None if made is None else next((n for n, kind in _FACTORIES.items() if kind is made), "")
        if name != "":
            return {"$default": [name, _dict_to_json(dict(value), where, tensor, depth + 1)]}
    if type(value) is not dict:
        raise _refusal(value, where)
    plain = all(type(k) is str and not k.startswith("$") for k in value)
    if plain:
        return {_text(k, where): to_json(v, f"{where}.{k}", tensor, depth + 1) for k, v in value.items()}
    pairs = [
        [to_json(k, where, tensor, depth + 1), to_json(v, f"{where}.{k}", tensor, depth + 1)] for k, v in value.items()
    ]
    return {"$dict": pairs}


def _refusal(value: Any, where: str) -> UnsupportedStateError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsupportedStateError(
        f"{where[:300]}: an object of type {kind} cannot be saved",
        hint="keep numbers, text, lists, dictionaries and tensors in the state; make these of the rest in state_dict()",
    )


def from_json(value: Any, tensor: Callable[[Any], Tensor], where: str = "state", depth: int = 0) -> Any:
    """The value that `to_json` was given; `tensor(reference)` finds a tensor again.

    Raises:
        DamagedCheckpointError: the JSON is not what `to_json` writes.
    """
    if depth > _JSON_DEPTH:
        raise DamagedCheckpointError(f"{where}: nested too deep")
    if isinstance(value, list):
        return [from_json(v, tensor, where, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key.startswith("$"):
            try:
                return _tagged(key, inner, tensor, where, depth)
            except (TypeError, ValueError, AttributeError, RuntimeError, LookupError, ArithmeticError) as error:
                if isinstance(error, DamagedCheckpointError):
                    raise
                raise DamagedCheckpointError(f"{where}: a malformed {key[:20]}: {error}") from None
    return {k: from_json(v, tensor, where, depth + 1) for k, v in value.items()}


def _tagged(key: str, inner: Any, tensor: Callable[[Any], Tensor], where: str, depth: int) -> Any:
    def items() -> list[Any]:
        return [from_json(v, tensor, where, depth + 1) for v in inner]

    def inside(value: Any) -> Any:
        return from_json(value, tensor, where, depth + 1)

    readers: dict[str, Callable[[], Any]] = {
        "$tensor": lambda: tensor(inner),
        "$int": lambda: int(inner, 0),
        "$float": lambda: float(inner),
        "$tuple": lambda: tuple(items()),
        "$bytes": lambda: base64.b64decode(inner, validate=True),
        "$complex": lambda: complex(*items()),
        "$set": lambda: set(items()),
        "$frozenset": lambda: frozenset(items()),
        "$dtype": lambda: _dtype(inner),
        "$size": lambda: torch.Size(inner),
        "$device": lambda: torch.device(inner),
        "$dict": lambda: dict(items()),
        "$ordered": lambda: OrderedDict(inside(inner)),
        "$counter": lambda: Counter(inside(inner)),
        "$default": lambda: defaultdict(None if inner[0] is None else _FACTORIES[inner[0]], inside(inner[1])),
        "$array": lambda: inside(inner[0]).numpy().reshape(inner[1]),
        "$scalar": lambda: _scalar(inner[0], inside(inner[1])),
    }
    if key not in readers:
        raise DamagedCheckpointError(f"{where}: unknown kind of value {key[:20]!r}")
    return readers[key]()


def _scalar(name: str, value: Any) -> Any:
    if name not in _ARRAYS:
        raise ValueError(f"no kind of number {name[:40]!r}")
    return numpy.dtype(name).type(value)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name[:40]!r}")
    return found
