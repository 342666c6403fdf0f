"""From `type` and further keys of a configuration to a source: registered names and import paths."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from perdure.errors import ConfigError, UsageError

__all__ = ["SOURCES", "build_source", "resolve_source", "source_keys"]

# Name to module and class; imported on use, since some need extras.
SOURCES: dict[str, tuple[str, str]] = {
    "Text": ("perdure.data.sources.text", "Text"),
    "TokenFile": ("perdure.data.sources.tokenfile", "TokenFile"),
    "MegatronIndexed": ("perdure.data.sources.megatron", "MegatronIndexed"),
    "BlendedMegatronDatasetDataLoader": ("perdure.data.sources.megatron", "MegatronIndexed"),
    "HuggingFace": ("perdure.data.sources.tables", "HuggingFace"),
    "HFDataLoader": ("perdure.data.sources.tables", "HuggingFace"),
    "Jsonl": ("perdure.data.sources.tables", "Jsonl"),
    "Parquet": ("perdure.data.sources.tables", "Parquet"),
    "Arrow": ("perdure.data.sources.tables", "Arrow"),
    "Packed": ("perdure.data.packing", "Packed"),
    "Mixture": ("perdure.data.mixture", "Mixture"),
}

Fault = Callable[[str, str], ConfigError]


def _plain_fault(key: str, text: str) -> ConfigError:
    return ConfigError(f"{key}: {text}")


def resolve_source(kind: str, *, fault: Fault = _plain_fault) -> Callable[..., Any]:
    """The class or function that a `type` names: a registered name or `package.module:Object`.

    Raises:
        ConfigError: neither; the nearest registered name is given.
    """
    if kind in SOURCES:
        module, name = SOURCES[kind]
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found
    module, colon, name = kind.partition(":")
    if not colon or not module or not name:
        near = difflib.get_close_matches(kind, SOURCES, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(SOURCES))}"
        raise fault("type", f"no source is called {kind!r}, and it is no import path package.module:Object{guess}")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise fault("type", f"{kind!r} cannot be imported: {error}") from error
    if not callable(target):
        raise fault("type", f"{kind!r} is not something that can be called")
    return target  # type: ignore[no-any-return]


def source_keys(kind: str, *, fault: Fault = _plain_fault) -> dict[str, inspect.Parameter]:
    """The keys that a source takes, from its constructor's signature; one named `**` when it takes any."""
    source = resolve_source(kind, fault=fault)
    try:
        parameters = inspect.signature(source).parameters.values()
    except ValueError as error:
        raise fault("type", f"{kind!r} does not say which keys it takes: {error}") from error
    keys: dict[str, inspect.Parameter] = {}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            keys["**"] = parameter
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            keys[parameter.name] = parameter
    return keys


def build_source(kind: str, keys: Mapping[str, Any] | None = None, *, fault: Fault = _plain_fault) -> Any:
    """Builds the data set that a `dataloader` section describes.

    Args:
        kind: the section's `type`.
        keys: its further keys, passed to the constructor.
        fault: makes the error for a key, for example one that knows file and line.

    Returns:
        A map-style data set: `__len__`, `__getitem__(int)`, and for ours `identity()`.

    Raises:
        ConfigError: an unknown type; an unknown, missing or impossible key.
        DataError: the data cannot be used.
    """
    given = dict(keys or {})
    known = source_keys(kind, fault=fault)
    for key in given:
        if key not in known and "**" not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            guess = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise fault(key, f"unknown key of {kind}; {guess}")
    missing = [n for n, p in known.items() if n != "**" and p.default is inspect.Parameter.empty and n not in given]
    if missing:
        raise fault(missing[0], f"{kind} needs this key")
    try:
        return resolve_source(kind, fault=fault)(**given)
    except ConfigError:
        raise
    except UsageError as error:
        named = next((key for key in given if error.message.startswith(key)), "type")
        raise fault(named, error.message) from error
