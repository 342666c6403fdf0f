"""Reading a configuration from a file, a mapping and the command line; writing the resolved one."""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from perdure.config.base import Section
from perdure.config.faults import Fault, Origin, Path, config_error, found, key_text
from perdure.config.schema import TrainConfig
from perdure.config.yaml12 import YAMLText, parse_override, parse_yaml, plain_scalar
from perdure.errors import ConfigError
from perdure.format.names import path_text

__all__ = ["dump_config", "load_config", "load_config_mapping"]

MAX_BYTES = 4 << 20

_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "UTF-8 with a byte order mark",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_OVERRIDE_KEY = re.compile(r"[^\s.=\[\]]+(\.[^\s.=\[\]]+)*")


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a configuration file.

    Args:
        path: a UTF-8 file of YAML 1.2; its name is shown in errors as given.
        overrides: words `section.key=value`; the value is YAML 1.2 too, and of two for one key the later one counts.

    Raises:
        ConfigError: every fault of file and overrides in one error, one a line, as `file:line:column: key: fault`
            or `command line: word: fault`.
        UsageError: `path` is none.
    """
    file = path_text(path, "config")
    faults: list[Fault] = []
    try:
        document = parse_yaml(_read(file))
    except YAMLText as error:
        mark = (error.problem.line, error.problem.column)
        raise config_error([Fault((), error.problem.text, mark=mark)], Origin(file)) from None
    faults += [Fault(each.path, each.text, mark=(each.line, each.column)) for each in document.problems]
    if document.value is None:
        raise ConfigError(f"{file}: empty; expected sections such as training, model and checkpoint")
    if not isinstance(document.value, dict):
        text = f"expected a mapping of sections at the top, found {found(document.value)}"
        raise config_error([Fault((), text)], Origin(file))
    data, marks, words = document.value, document.marks, dict[Path, str]()
    for word in overrides:
        faults += _override(word, data, marks, words)
    return TrainConfig.from_origin(data, Origin(file, marks, words), faults)


def load_config_mapping(data: Mapping[str, object]) -> TrainConfig:
    """Check a configuration given as a mapping of sections, each a mapping or a section object.

    Raises:
        ConfigError: every fault in one error, one a line, as `key: fault`.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"expected a mapping of sections, found {found(data)}")
    return TrainConfig.from_origin(data, Origin())


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration, defaults included, as YAML that `load_config` reads back as an equal one.

    Raises:
        ConfigError: a key given in Python holds something that YAML has no form for.
    """
    yaml = YAML(typ="rt", pure=True)
    yaml.Representer = _Representer
    yaml.width = 1 << 30
    yaml.allow_unicode = True
    stream = io.StringIO()
    yaml.dump(_plain(config, (), config), stream)
    return stream.getvalue()


class _Representer(RoundTripRepresenter):
    """Writes null as `null`."""

    def null(self, value: None) -> ScalarNode:
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:null", "null")
        return node


_Representer.add_representer(type(None), _Representer.null)


def _read(file: str) -> str:
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise ConfigError(f"{file}: is a directory; expected a configuration file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{file}: cannot be read: {reason}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file}: larger than {MAX_BYTES >> 20} MiB; expected a configuration file")
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            raise ConfigError(f"{file}: {encoding}; expected plain UTF-8", hint="save the file as UTF-8 without a mark")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - (before.rfind(b"\n") + 1) + 1
        byte = data[error.start]
        raise ConfigError(f"{file}:{line}:{column}: the byte 0x{byte:02x} is not UTF-8; expected a text file") from None


def _override(
    word: str, data: dict[Any, Any], marks: dict[Path, tuple[int, int]], words: dict[Path, str]
) -> list[Fault]:
    """Set what a word of the command line says; gives the faults that keep it from being set."""
    key, sign, text = word.partition("=")
    if not sign or not _OVERRIDE_KEY.fullmatch(key):
        return [Fault((), "expected section.key=value; lists are set whole, as in callbacks=[...]", word=word)]
    try:
        text.encode("utf-8")
        value = parse_override(text)
    except UnicodeEncodeError:
        return [Fault((), "expected UTF-8", word=ascii(word))]
    except YAMLText as error:
        return [Fault((), error.problem.text, word=word)]
    path = tuple(key.split("."))
    target = data
    for depth, name in enumerate(path[:-1], 1):
        if target.get(name) is None:
            target[name] = {}
        target = target[name]
        if not isinstance(target, dict):
            return [Fault((), f"{key_text(path[:depth])} is {found(target)}, not a mapping", word=word)]
    target[path[-1]] = value
    for stale in [mark for mark in marks if mark[: len(path)] == path]:
        del marks[stale]
    for replaced in [other for other in words if other[: len(path)] == path]:
        del words[replaced]
    words[path] = word
    return []


def _plain(value: object, path: Path, config: TrainConfig) -> object:
    """A value as YAML can hold it; text that would be read as something else is put in quotes."""
    if isinstance(value, Section):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        return _plain({**fields, **value.extras()}, path, config)
    if isinstance(value, Mapping):
        return {_plain(key, path, config): _plain(item, (*path, str(key)), config) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, index), config) for index, item in enumerate(value)]
    if type(value) is str:
        return value if plain_scalar(value) == value and value.isprintable() else DoubleQuotedScalarString(value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise config.fault(key_text(path), f"expected text, a number, a list or a mapping to write, {found(value)} found")
