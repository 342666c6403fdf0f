"""What a program passes to `Trainer` in place of sections, looked at before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from perdure.data.stepping import SteppedLoader
from perdure.errors import UsageError
from perdure.train.callbacks.base import Callback
from perdure.train.feed import data_state

__all__ = ["check_given", "needs_closure", "registered"]


def check_given(model: Any, optimizer: Any, callbacks: Sequence[Any]) -> None:
    """Raises UsageError for what is not of the kind that is asked for: a class instead of an object of it, say."""
    wrong = [("model", model, "an nn.Module")] if model is not None and not isinstance(model, nn.Module) else []
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "param_groups")):
        wrong.append(("optimizer", optimizer, "an optimizer over the model's parameters"))
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            wrong.append((f"callbacks[{number}]", callback, "an object of a class made from perdure.Callback"))
    for name, value, expected in wrong:
        what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__qualname__}"
        hint = f"make one: {value.__name__}(...)" if isinstance(value, type) else None
        raise UsageError(f"{name}: expected {expected}, found {what}", hint=hint)


def needs_closure(optimizer: Any) -> bool:
    """Whether a step of an optimizer wants a function that computes the loss anew, as that of `LBFGS` does."""
    try:
        parameters = inspect.signature(optimizer.step).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def registered(extra: Mapping[str, Any], callbacks: Sequence[Callback], loader: SteppedLoader) -> dict[str, Any]:
    """All objects that are saved along, by name: those passed, callbacks that keep state, and data with a state.

    Raises:
        UsageError: a name is taken, or a callback says its state and cannot be given it back.
    """
    own = {**_stateful(callbacks), **data_state(loader)}
    if taken := sorted(own.keys() & extra.keys()):
        raise UsageError(
            f"extra: {taken[0]!r} is what the run itself registers there", hint="give your object another name"
        )
    return {**extra, **own}


def _stateful(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Callbacks that keep state, by class name, numbered in their order where one class occurs more often."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        has = [name for name in ("state_dict", "load_state_dict") if callable(getattr(callback, name, None))]
        if not has:
            continue
        kind = type(callback).__name__
        if len(has) == 1:
            other = "load_state_dict" if has == ["state_dict"] else "state_dict"
            raise UsageError(
                f"callback {kind} has {has[0]}() but no {other}(), so that its state would be lost",
                hint="give it both, or neither",
            )
        name, count = f"callback.{kind}", 1
        while name in found:
            count += 1
            name = f"callback.{kind}-{count}"
        found[name] = callback
    return found
