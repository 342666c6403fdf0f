"""How every JSON file of ours is decoded: bounded, typed, and with an error that names the file."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from perdure.errors import DamagedCheckpointError
from perdure.format.collector import collector_paused

__all__ = ["decode", "encode"]

T = TypeVar("T")


def decode(data: bytes, kind: type[T], file: str) -> T:
    """Decodes `data` as `kind`; anything else is damage of `file`."""
    try:
        with collector_paused():
            return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{file}: not readable as {kind.__name__}: {error}", file=file) from None


def encode(value: Any) -> bytes:
    """Compact JSON, keys in the order of the record."""
    return msgspec.json.encode(value)
