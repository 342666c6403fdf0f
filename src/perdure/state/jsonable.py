"""Python values as JSON that comes back as what it was: tuples, integers of any size, infinities, bytes.

What JSON has no word for is a one-key object whose key begins with `$`. Tensors are left to the
caller, who stores them elsewhere. Anything else is refused by name, at save time: nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.errors import DamagedCheckpointError, UnsupportedStateError
from perdure.state.shards import dtype_name

__all__ = ["from_json", "to_json"]

_DEPTH = 100
_PLAIN = 1 << 53


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
        return value if abs(value) < _PLAIN else {"$int": str(value)}
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
    return _numpy_to_json(value, where, tensor, depth)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnsupportedStateError(f"{where[:300]}: a text that is not valid Unicode cannot be saved") from None
    return value


def _dict_to_json(value: dict[Any, Any], where: str, tensor: Callable[[Tensor, str], Any], depth: int) -> Any:
    if type(value).__name__ not in ("dict", "OrderedDict", "defaultdict", "Counter"):
        raise _refusal(value, where)
    plain = all(type(k) is str and not k.startswith("$") for k in value)
    if plain:
        return {_text(k, where): to_json(v, f"{where}.{k}", tensor, depth + 1) for k, v in value.items()}
    pairs = [
        [to_json(k, where, tensor, depth + 1), to_json(v, f"{where}.{k}", tensor, depth + 1)] for k, v in value.items()
    ]
    return {"$dict": pairs}


def _numpy_to_json(value: Any, where: str, tensor: Callable[[Tensor, str], Any], depth: int) -> Any:
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        held = torch.from_numpy(value.copy() if value.shape else value.reshape(1).copy())
        key = "$array" if type(value).__name__ == "ndarray" else "$scalar"
        return {key: [to_json(held, where, tensor, depth + 1), list(value.shape)]}
    raise _refusal(value, where)


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
    if depth > 2 * _DEPTH:
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
            except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
                if isinstance(error, DamagedCheckpointError):
                    raise
                raise DamagedCheckpointError(f"{where}: a malformed {key[:20]}: {error}") from None
    return {k: from_json(v, tensor, where, depth + 1) for k, v in value.items()}


def _tagged(key: str, inner: Any, tensor: Callable[[Any], Tensor], where: str, depth: int) -> Any:
    def items() -> list[Any]:
        return [from_json(v, tensor, where, depth + 1) for v in inner]

    if key in ("$array", "$scalar"):
        array = tensor(inner[0]["$tensor"]).numpy().reshape(inner[1])
        return array if key == "$array" else array[()]
    readers: dict[str, Callable[[], Any]] = {
        "$tensor": lambda: tensor(inner),
        "$int": lambda: int(inner),
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
    }
    if key not in readers:
        raise DamagedCheckpointError(f"{where}: unknown kind of value {key[:20]!r}")
    return readers[key]()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {name[:40]!r}")
    return found
