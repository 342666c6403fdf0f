"""How every JSON file of ours is decoded: bounded, typed, and with an error that names the file."""

from __future__ import annotations

import gc
from typing import Any, TypeVar

import msgspec

from perdure.errors import DamagedCheckpointError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def decode(data: bytes, kind: type[T], file: str) -> T:
    """Decodes `data` as `kind`; anything else is damage of `file`.

    The garbage collector is paused: a million small records would otherwise be traversed again and again.
    """
    paused = len(data) > 1 << 20 and gc.isenabled()
    if paused:
        gc.disable()
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(f"{file}: not readable as {kind.__name__}: {error}", file=file) from None
    finally:
        if paused:
            gc.enable()


def encode(value: Any) -> bytes:
    """Compact JSON, keys in the order of the record."""
    return msgspec.json.encode(value)
