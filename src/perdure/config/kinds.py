"""The kinds of value that keys take, and what is said when a value is of another kind.

Strict: only the YAML words true and false are booleans, an integer may be written 10, 1e1 or 10.0 but
never '10', and no number is taken for text. pydantic checks; `wording` puts its findings into words.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from perdure.config.faults import found
from perdure.format.names import is_address
from perdure.format.rename import parse_rules

__all__ = [
    "Betas",
    "ByteSize",
    "Count",
    "Directory",
    "FilePrefix",
    "Milestones",
    "Nonnegative",
    "PathText",
    "Positive",
    "Ramp",
    "Ratio",
    "RecomputeMode",
    "RenameRules",
    "ShardDegree",
    "SkipRanges",
    "TextList",
    "Threshold",
    "TypeName",
    "Words",
    "annotation_words",
    "is_import_path",
    "kind_words",
    "parse_byte_size",
    "wording",
]

_LARGEST = 2**63 - 1
_TYPE_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B")
_VARIABLE = re.compile(r"\$(\{[^}]*\}?|[A-Z_][A-Z0-9_]*)")
_UNITS = {"": 1, **{f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}}
_UNITS |= {unit: 1000**power for power, unit in enumerate("KMGT", 1)}


def _expected(what: str) -> PydanticCustomError:
    """An error whose text is the expectation; the value found is added where it is told."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shard_degree(value: object) -> object:
    if isinstance(value, int) and value < 1 and value != -1 and not isinstance(value, bool):
        raise _expected("at least 1, or -1 for all data-parallel ranks")
    return value


def _path(value: object) -> object:
    """Paths as text, with a leading `~` expanded as a shell does; `./~` is the file of that name."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    if any(ord(each) < 32 for each in value):
        raise _expected("a path without line breaks and other control characters")
    if is_address(value):
        raise _expected("a path of a mounted file system; addresses are not read or written")
    if (variable := _VARIABLE.search(value)) is not None:
        raise _expected(f"a path; {variable[0]} is not filled in (a shell does so on the command line)")
    expanded = os.path.expanduser(value)
    if expanded.startswith("~"):
        raise _expected("a path; ~ stands for a home directory that is not known (write ./~ for a file of that name)")
    return expanded


def _not_empty(value: str) -> str:
    if not value:
        raise _expected("a path")
    return value


def _prefix(value: str) -> str:
    if not value or len(value) > 100 or len(value.encode(errors="replace")) > 200:
        raise _expected("a file name prefix of 1 to 100 characters (200 bytes)")
    if "/" in value or "\\" in value or not value.isprintable():
        raise _expected("a file name prefix without slashes and control characters")
    return value


def _default_prefix(value: object) -> object:
    return "checkpoint" if value is None else value


def is_import_path(name: str) -> bool:
    """Whether `name` has the form `package.module:Object`."""
    return _IMPORT_PATH.fullmatch(name) is not None


def _type_name(value: str) -> str:
    if not (_TYPE_NAME.fullmatch(value) or is_import_path(value)):
        raise _expected("a registered name or an import path package.module:Object")
    return value


def parse_byte_size(text: str) -> int | None:
    """`8GiB` (also `1.5GB`, `4096B`) in bytes; None for the empty text.

    Raises:
        ValueError: for any other text.
    """
    if not text:
        return None
    match = _BYTE_SIZE.fullmatch(text)
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size such as 8GiB")
    return size


def _byte_size(value: str) -> str:
    try:
        parse_byte_size(value)
    except ValueError:
        raise _expected("a size such as 8GiB, 512MiB or 4096B, or an empty text") from None
    return value


def _text_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    return list(value) if isinstance(value, tuple) else value


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _skip_ranges(value: object) -> object:
    what = "a list of [first, last) pairs of stream positions, ascending and apart"
    if not isinstance(value, list | tuple):
        raise _expected(what)
    ranges: list[tuple[int, int]] = []
    for pair in value:
        ends = [_whole(end) for end in pair] if isinstance(pair, list | tuple) else []
        if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int) for end in ends):
            raise _expected(what)
        first, last = int(str(ends[0])), int(str(ends[1]))
        if not (ranges[-1][1] if ranges else 0) <= first < last <= _LARGEST:
            raise _expected(what)
        ranges.append((first, last))
    return ranges


def _rename_rules(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise _expected("a list of rules")
    try:
        parse_rules(value)
    except ValueError as error:
        raise _expected(f"rules that can be applied ({error})") from None
    return list(value)


@dataclass(frozen=True)
class Words:
    """The name of a kind in the reference page."""

    text: str


_Int = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[_Int, Field(ge=0, le=_LARGEST), Words("integer, at least 0")]
"""An integer; a number without a fraction (1e1, 10.0) counts as one."""
Positive = Annotated[_Int, Field(ge=1, le=_LARGEST), Words("integer, at least 1")]
ShardDegree = Annotated[_Int, BeforeValidator(_shard_degree), Words("integer, at least 1, or -1")]
Nonnegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Words("number, at least 0")]
Threshold = Annotated[float, Field(gt=0), Words("number above 0, or .inf")]
"""A limit; `.inf` turns it off."""
Ratio = Annotated[float, Field(ge=0, le=1), Words("number from 0 to 1")]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[
    list[_Beta], BeforeValidator(_listed), Field(min_length=2, max_length=2), Words("two numbers, each in [0, 1)")
]
Ramp = Annotated[
    list[Positive], BeforeValidator(_listed), Field(min_length=3, max_length=3), Words("three integers, at least 1")
]
Milestones = Annotated[list[Count], BeforeValidator(_listed), Words("list of integers, at least 0")]
TextList = Annotated[list[str], BeforeValidator(_text_list), Words("text or list of texts")]
PathText = Annotated[str, BeforeValidator(_path), Words("path")]
Directory = Annotated[str, BeforeValidator(_path), AfterValidator(_not_empty), Words("path")]
FilePrefix = Annotated[str, BeforeValidator(_default_prefix), AfterValidator(_prefix), Words("text")]
TypeName = Annotated[str, AfterValidator(_type_name), Words("name or import path")]
ByteSize = Annotated[str, AfterValidator(_byte_size), Words("size")]
RenameRules = Annotated[list[Any], BeforeValidator(_rename_rules), Words("list")]
SkipRanges = Annotated[list[tuple[int, int]], BeforeValidator(_skip_ranges), Words("list of [first, last)")]
RecomputeMode = Annotated[
    Literal["None", "full", "select"], BeforeValidator(lambda value: "None" if value is None else value)
]

_WORDS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "bool_type": lambda _: "true or false",
    "int_type": lambda _: "an integer",
    "float_type": lambda _: "a number",
    "string_type": lambda _: "text",
    "list_type": lambda _: "a list",
    "dict_type": lambda _: "a mapping",
    "model_type": lambda _: "a mapping",
    "finite_number": lambda _: "a finite number",
    "literal_error": lambda context: f"one of {context['expected']}".replace("'", "").replace(" or ", ", "),
    "greater_than_equal": lambda context: f"at least {context['ge']:g}",
    "greater_than": lambda context: f"more than {context['gt']:g}",
    "less_than_equal": lambda context: (
        "at most 2^63 - 1" if context["le"] == _LARGEST else f"at most {context['le']:g}"
    ),
    "less_than": lambda context: f"less than {context['lt']:g}",
    "too_short": lambda context: f"{context['min_length']} values",
    "too_long": lambda context: f"{context['max_length']} values",
    "string_unicode": lambda _: "text that can be written as UTF-8",
    "expected": lambda context: str(context["what"]),
}


def wording(error: ErrorDetails) -> str:
    """What pydantic found, in our words: what was expected, and the value found."""
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return "missing"
    words = _WORDS.get(kind)
    text = words(error.get("ctx", {})) if words else error["msg"]
    return f"expected {text}, found {found(value)}{_advice(kind, value)}"


def _advice(kind: str, value: object) -> str:
    if kind == "bool_type" and isinstance(value, str):
        if value.lower() in ("true", "false"):
            return f"; write {value.lower()} without quotes"
        if value.lower() in ("on", "yes", "off", "no"):
            return f"; write {'true' if value.lower() in ('on', 'yes') else 'false'}"
    if (
        kind in ("int_type", "float_type")
        and isinstance(value, str)
        and re.fullmatch(r"[-+]?[\d.]+([eE][-+]?\d+)?", value)
    ):
        return "; remove the quotes"
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    return ""


_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text"}


def kind_words(field: FieldInfo) -> str:
    """The kind of a field's values as the reference page names it."""
    return _kind(field.annotation, field.metadata)


def annotation_words(annotation: Any) -> str:
    """The same for a kind that no field has."""
    return _kind(annotation, [])


def _kind(annotation: Any, metadata: list[Any]) -> str:
    for extra in metadata:
        if isinstance(extra, Words):
            return extra.text
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], list(arguments[1:]))
    if origin in (Union, types.UnionType):
        return ", or ".join(_kind(argument, []) for argument in arguments if argument is not type(None)) + ", or null"
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is list:
        return "list"
    if origin is dict:
        return "mapping"
    return _PLAIN.get(annotation, "any")
