"""What metadata.json says of an optimizer: whether a file says such a thing at all."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from perdure.format.metadata import TensorRecord

__all__ = ["description_fault"]

_DTYPES = {"int": "I64", "float": "F64"}


class _Group(msgspec.Struct):
    params: list[str]
    settings: dict[str, Any]


class _Value(msgspec.Struct):
    """A state that is more than a tensor: how what is stored is to be given back."""

    kind: Literal["host", "int", "float", "step", "json"]
    value: Any = msgspec.UNSET


class _Description(msgspec.Struct):
    """Of `values`, `$shared_step` is a text and `$without_step` a list; the others are values."""

    type: str = ""
    keys: dict[str, str] = {}
    groups: list[_Group] = []
    values: dict[str, str | list[str] | _Value] = {}
    dormant: list[str] = []
    set_aside: list[str] = []


def description_fault(described: dict[str, Any], records: dict[str, TensorRecord]) -> str | None:
    """What keeps `training.optimizer` from being what a save writes; None for nothing.

    Args:
        records: the tensors of the optimizer.
    """
    try:
        found = msgspec.convert(described, _Description)
    except msgspec.ValidationError as error:
        return str(error)
    special: dict[str, type] = {"$shared_step": str, "$without_step": list}
    for name, value in found.values.items():
        if not isinstance(value, special.get(name, _Value)):
            return f"values: {name[:300]}: not what stands there"
        if isinstance(value, _Value) and (fault := _value_fault(value, records.get(name))) is not None:
            return f"values: {name[:300]}: {fault}"
    return None


def _value_fault(value: _Value, record: TensorRecord | None) -> str | None:
    if value.kind == "json":
        return "no value" if value.value is msgspec.UNSET else None
    if record is None:
        return None
    shape = record.shape[:-1] if record.logical.startswith("complex") else record.shape
    number = prod(shape) == 1 and record.dtype == _DTYPES.get(value.kind, record.dtype)
    return None if number else f"{record.dtype} {list(record.shape)[:10]} is no number of the kind {value.kind!r}"
