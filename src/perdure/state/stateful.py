"""Objects that a user registers: their state as tensors plus JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from perdure.errors import UnsupportedStateError
from perdure.state.jsonable import from_json, to_json
from perdure.state.shards import NamedTensor, describe

__all__ = ["Stateful", "check_registered", "collect", "rebuild", "references"]


@runtime_checkable
class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict` whose state is tensors, numbers, text, lists and dictionaries.

    A method `layout_of(path)` gives the tensor at a path of the state (`weights.layer.bias`) as it lies now, or None: a
    sharded one is then saved and filled shard by shard, and the shards may differ between ranks.

    An attribute `per_rank = True` keeps one state per rank instead of one for all; such a state is
    restored on the same number of ranks only.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


def check_registered(objects: Mapping[Any, Any]) -> None:
    """Refuses, by name, what cannot be registered.

    Raises:
        UnsupportedStateError: no `state_dict`/`load_state_dict`, or a name that cannot be stored.
    """
    for name, value in objects.items():
        if not isinstance(name, str) or not name or "@" in name:
            raise UnsupportedStateError(f"extra: {name!r} cannot be a registered name: a non-empty text without '@'")
        # Tensors are called `<name>.<path>`: two objects must not meet in one name, nor an object the model's modules.
        above = next((other for other in ("model", *objects) if name.startswith(f"{other}.")), None)
        if above is not None or name == "model":
            raise UnsupportedStateError(
                f"extra: {name!r} cannot be a registered name: "
                + ("it begins like the model's own state" if above in (None, "model") else f"it begins like {above!r}"),
                hint="give it a name without a dot",
            )
        if isinstance(value, type):
            raise UnsupportedStateError(
                f"extra: {name!r} is the class {value.__qualname__}, which has no state",
                hint="register an object of it",
            )
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            raise UnsupportedStateError(
                f"extra: {name!r} of type {type(value).__qualname__} has no state_dict() and load_state_dict()",
                hint="give it both, or leave it out",
            )


def collect(name: str, state: Any, *, sharded: bool = True) -> tuple[Any, list[NamedTensor]]:
    """The state of the object registered as `name`: its JSON tree and its tensors (`<name>.<path>`).

    Args:
        sharded: tensors may be sharded over ranks: a load will know how they lie.

    Raises:
        UnsupportedStateError: something in it cannot be held; the message says where.
    """
    tensors: list[NamedTensor] = []
    taken: set[str] = set()

    def reference(tensor: Tensor, where: str) -> Any:
        if hasattr(tensor, "placements") and not sharded:
            raise UnsupportedStateError(
                f"extra: {where[:300]}: a tensor that is sharded over ranks cannot be saved in a registered object",
                hint="give whole tensors in state_dict(), or the object a method layout_of(path); state of a second "
                "optimizer is kept where both are one: see `Several optimizers` in docs/guides/own-loop.md",
            )
        unique, count = where, 1
        while unique in taken:
            count += 1
            unique = f"{where}#{count}"
        taken.add(unique)
        tensors.append(describe("extra", unique, tensor))
        return {"$tensor": unique}

    return to_json(state, name, reference), tensors


def rebuild(tree: Any, tensor: Callable[[str], Tensor], name: str) -> Any:
    """The state that `collect` was given, from its tree and its loaded tensors."""
    return from_json(tree, tensor, f"extra: {name}")


def references(tree: Any) -> list[str]:
    """The names of the tensors in the tree of an object."""
    found: list[str] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if set(value) == {"$tensor"} and isinstance(value["$tensor"], str):
                found.append(value["$tensor"])
            else:
                stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return found
