"""What a program has metadata.json keep of its own, under `training`: every value comes back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from perdure.errors import UnsupportedStateError, UsageError
from perdure.state.jsonable import from_json, to_json

__all__ = ["from_record", "to_record"]

_OURS = frozenset(("base", "extra", "optimizer", "ranks"))
"""What a save says itself, under the same roof."""


def to_record(given: Any) -> dict[str, Any]:
    """What the program gave, as JSON.

    Raises:
        UsageError: it is no dictionary, or has a key that a save uses itself.
        UnsupportedStateError: something in it cannot be held; it is named.
    """
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise UsageError(f"training(): expected a dictionary by names, found {type(given).__name__}")
    if taken := _OURS & given.keys():
        raise UsageError(f"training(): {min(taken)!r} is what a save keeps itself", hint=f"name it my_{min(taken)}")
    return {key: to_json(value, f"training: {key}", _refuse) for key, value in given.items()}


def from_record(training: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`training` of an iteration, with what the program gave as it was.

    Raises:
        DamagedCheckpointError: it isn't what a save writes.
    """
    return {
        key: value if key in _OURS else from_json(value, _refuse, f"{where}: training: {key}")
        for key, value in training.items()
    }


def _refuse(tensor: Any, where: str = "training") -> Tensor:
    raise UnsupportedStateError(
        f"{where}: a tensor cannot be saved here", hint="register an object that holds it: Checkpointer(extra={...})"
    )
