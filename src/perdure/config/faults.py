"""Faults of a configuration: what is wrong with which key, and where that key was written.

A fault is `(path, text)`; an `Origin` knows where each path came from; together they make lines such as
`run.yaml:12:3: checkpoint.save_interleave_steps: unknown key; did you mean save_interleaved_steps?`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pydantic import BaseModel

from perdure.errors import ConfigError

__all__ = ["Fault", "Origin", "Path", "SectionError", "config_error", "found", "key_text", "parse_key"]

Path: TypeAlias = "tuple[str | int, ...]"
"""A key as its parts: names, and indices of list items (also integer keys of free mappings)."""

_SHOWN = 60
_PART = re.compile(r"([^.\[\]]+)|\[(-?\d+)\]")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        path: the key concerned; empty for the configuration as a whole.
        text: what is wrong: what was expected, and what was found.
        hint: what to do instead, where that takes a sentence.
        mark: line and column, where they are not those of `path`.
        word: the word of the command line that could not be read as an override.
    """

    path: Path
    text: str
    hint: str | None = None
    mark: tuple[int, int] | None = None
    word: str | None = None

    def below(self, parent: Path) -> Fault:
        """The same fault seen from further up."""
        return replace(self, path=(*parent, *self.path))


@dataclass(frozen=True)
class Origin:
    """Where each key of a configuration was written.

    `marks` holds (line, column), both from 1, of keys in `file`; `overrides` the command-line words.
    Two origins always compare equal, so that configurations compare by what they say alone.
    """

    file: str | None = field(default=None, compare=False)
    marks: Mapping[Path, tuple[int, int]] = field(default_factory=dict, compare=False)
    overrides: Mapping[Path, str] = field(default_factory=dict, compare=False)

    def line(self, fault: Fault) -> str:
        """The fault as one line, at its key or at the nearest enclosing key that was written."""
        text = f"{key_text(fault.path)}: {fault.text}" if fault.path else fault.text
        at, source = self._find(fault)
        if isinstance(source, str):
            return f"command line: {_shorten(source, 120)}: {fault.text if at == fault.path else text}"
        if source is not None:
            return f"{self.file}:{source[0]}:{source[1]}: {text}"
        return text if self.file is None else f"{self.file}: {text}"

    def order(self, fault: Fault) -> tuple[int, int, int]:
        """Sort key: file order, then the command line, then what was written nowhere."""
        _, source = self._find(fault)
        return (2, 0, 0) if source is None else (1, 0, 0) if isinstance(source, str) else (0, *source)

    def _find(self, fault: Fault) -> tuple[Path, tuple[int, int] | str | None]:
        """Where a fault was written (a mark, or a word of the command line), and the key that stands there."""
        if fault.word is not None or fault.mark is not None:
            return fault.path, fault.word if fault.mark is None else fault.mark
        for length in range(len(fault.path), 0, -1):
            path = fault.path[:length]
            if path in self.overrides:
                return path, self.overrides[path]
            if path in self.marks:
                return path, self.marks[path]
        # A section that the command line alone names, with one of its keys.
        words = (word for path, word in self.overrides.items() if path[:1] == fault.path)
        return (), next(words, None)


class SectionError(ConfigError):
    """Faults of one section built in Python; `faults` are relative to it."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        lines, hint = _lines(self.faults, Origin())
        super().__init__(lines, hint=hint)


def config_error(faults: Iterable[Fault], origin: Origin) -> ConfigError:
    """One error that tells all `faults`, one a line, in the order in which they were written."""
    lines, hint = _lines(sorted(faults, key=origin.order), origin)
    return ConfigError(lines, hint=hint)


def _lines(faults: Iterable[Fault], origin: Origin) -> tuple[str, str | None]:
    found_faults = list(faults)
    hint = next((fault.hint for fault in found_faults if fault.hint is not None), None)
    return "\n".join(dict.fromkeys(origin.line(fault) for fault in found_faults)), hint


def key_text(path: Path) -> str:
    """`("callbacks", 0, "type")` as `callbacks[0].type`."""
    text = ""
    for part in path:
        text += (
            f"[{part}]" if isinstance(part, int) else f".{_shorten(part, _SHOWN)}" if text else _shorten(part, _SHOWN)
        )
    return text


def parse_key(key: str) -> Path:
    """`callbacks[0].type` as `("callbacks", 0, "type")`."""
    return tuple(name or int(index) for name, index in _PART.findall(key))


def found(value: object) -> str:
    """A value as it is told after `found`."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {_shorten(value, _SHOWN)!r}" if value else "an empty text"
    if isinstance(value, int | float):
        return _shorten(_number(value), _SHOWN)
    if isinstance(value, BaseModel):
        return "a mapping"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        text = "[" + ", ".join(found(item).removeprefix("the text ") for item in value[:8]) + "]"
        return text if len(value) <= 8 and len(text) <= _SHOWN else f"a list of {len(value)}"
    return f"a Python {type(value).__name__}"


def _number(value: int | float) -> str:
    if isinstance(value, float):
        return repr(value)
    return hex(value) if value.bit_length() > 4096 else str(value)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
