"""From names in a configuration to Python objects: import paths, signatures, the keys of a section.

A `type:` is a registered name or an import path `package.module:Object`; every other key of such a section is an
argument of that object and is checked against its signature before anything is called.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from perdure.errors import UsageError

__all__ = ["KeyFaults", "accepted_keys", "check_keys", "did_you_mean", "import_object", "resolve", "section_keys"]


class KeyFaults(UsageError):
    """Faults of single keys, all of them at once.

    `faults` holds pairs of the dotted key (`model.hidden_size`) and what is wrong with it, so that a caller who knows
    the configuration file can add line and column.
    """

    def __init__(self, faults: Sequence[tuple[str, str]], *, hint: str | None = None) -> None:
        super().__init__("\n".join(f"{key}: {text}" for key, text in faults), hint=hint)
        self.faults = tuple(faults)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`; did you mean NAME?` for the nearest valid name, or the empty string when none is near."""
    by_lower = {each.lower(): each for each in valid}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


def import_object(path: str) -> Any:
    """The object that `package.module:Object` (or `package.module:Outer.inner`) names.

    Raises:
        UsageError: the path is not of that form, the module cannot be imported, or it has no such object. An
            exception inside the imported module is kept as the cause.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"`{path}` is not an import path", hint="write it as package.module:Object")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"`{path}`: module `{module_name}` cannot be imported ({said})",
            hint="install it, or put its folder on PYTHONPATH",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, [name for name in dir(found) if not name.startswith("_")])
            raise UsageError(f"`{path}`: `{module_name}` has no `{attribute}`{near}")
        found = getattr(found, part)
    return found


def resolve(name: str, registered: Mapping[str, Any], *, key: str) -> Any:
    """The object for a `type:` value: an import path (it holds a colon), or a registered name.

    Raises:
        KeyFaults: at `key`, an unknown name with the nearest registered one, or an import path that fails.
    """
    if ":" in name:
        try:
            return import_object(name)
        except UsageError as error:
            raise KeyFaults([(key, error.message)], hint=error.hint) from error
    if name not in registered:
        text = f"unknown type `{name}`{did_you_mean(name, registered)}"
        raise KeyFaults([(key, text)], hint=f"one of {', '.join(registered)}, or package.module:Object")
    return registered[name]


def accepted_keys(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Arguments of a function or class that can be passed by name; None when it takes any (`**kwargs`)."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: each for name, each in parameters.items() if each.kind in by_name}


def check_keys(
    function: Callable[..., Any], keys: Collection[str], *, supplied: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Compare configuration keys with what a constructor takes.

    Args:
        function: class or function that the keys will be passed to by name.
        keys: the keys a user wrote.
        supplied: arguments that the caller passes itself; a user may not.

    Returns:
        Pairs (key, what is wrong): unknown keys with the nearest valid one, keys that are not the user's to set, and
        missing required ones. Empty when the call will be accepted.
    """
    name = getattr(function, "__qualname__", str(function))
    accepted = accepted_keys(function)
    faults = [(key, f"is passed to {name} by Perdure and cannot be set here") for key in keys if key in supplied]
    if accepted is None:
        return faults
    valid = [key for key in accepted if key not in supplied]
    faults += [
        (key, f"unknown key, {name} does not take it{did_you_mean(key, valid)}")
        for key in keys
        if key not in accepted and key not in supplied
    ]
    faults += [
        (key, f"missing, {name} requires it")
        for key in valid
        if key not in keys and accepted[key].default is inspect.Parameter.empty
    ]
    return faults


def section_keys(section: Any) -> tuple[dict[str, Any], set[str]]:
    """Keys and values of a configuration section, and which of them were written rather than defaulted.

    Args:
        section: a plain mapping (everything counts as written) or a section object of `perdure.config`.
    """
    if isinstance(section, Mapping):
        return dict(section), set(section)
    values = {name: getattr(section, name) for name in type(section).model_fields}
    values.update(section.model_extra or {})
    return values, set(section.model_fields_set)
