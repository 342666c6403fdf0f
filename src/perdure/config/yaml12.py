"""YAML 1.2 text into plain Python values, with the line and column of every key.

ruamel.yaml parses; scalars are read by the core schema of YAML 1.2: `1e-3` is a number, `no` and dates
are text. Anchors and merge keys (`<<`) are followed; duplicate keys, tags, and nesting
or expansion beyond reason are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent, Event
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from perdure.config.faults import Path

__all__ = ["Document", "Problem", "YAMLText", "parse_override", "parse_yaml", "plain_scalar"]

MAX_DEPTH = 64
MAX_NODES = 100_000

_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,4000}")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Problem:
    """What is wrong at a line and column, both from 1; `path` is the key concerned, where there is one."""

    line: int
    column: int
    text: str
    path: Path = ()


@dataclass
class Document:
    """A parsed text: its value, where each key stands, and what was wrong with it."""

    value: object = None
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


# What copying from a page of the web leaves; to YAML it is the beginning of a word.
_FALSE_SPACE = re.compile(r"^ *([\u00a0\u2000-\u200b\u202f\u3000])", re.MULTILINE)


class YAMLText(Exception):
    """Text that is not YAML; nothing can be read from it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def parse_yaml(text: str) -> Document:
    """Read one YAML document.

    Raises:
        YAMLText: for text that cannot be parsed at all. Other problems are listed in the result.
    """
    root = _compose(text)
    document = Document()
    if root is not None:
        document.value = _Builder(document).value(root, (), 0)
    return document


def parse_override(text: str) -> object:
    """Read the value of a `key=value` word: a YAML scalar or a flow collection; nothing is the empty text.

    Raises:
        YAMLText: for text that cannot be parsed, or of which YAML would ignore a part as a comment.
    """
    if not text.strip():
        return ""
    root = _compose(text)
    document = Document()
    if root is None or (root.end_mark is not None and root.end_mark.index < len(text.rstrip())):
        raise YAMLText(Problem(1, 1, "everything from # on would be a comment; put the value in quotes"))
    value = _Builder(document).value(root, (), 0)
    if document.problems:
        raise YAMLText(document.problems[0])
    return value


def _compose(text: str) -> Node | None:
    if (found := _FALSE_SPACE.search(text)) is not None:
        line, column = text.count("\n", 0, found.start(1)) + 1, found.start(1) - found.start() + 1
        raise YAMLText(
            Problem(line, column, f"a line begins with U+{ord(found[1]):04X}, which only looks like a space")
        )
    try:
        depth = 0
        for event in YAML(typ="safe", pure=True).parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise YAMLText(Problem(*_place(event), f"nested deeper than {MAX_DEPTH} levels"))
            if getattr(event, "ctag", None) is not None:
                raise YAMLText(Problem(*_place(event), f"the tag {event.ctag}; values are written without tags"))
        yaml = YAML(typ="safe", pure=True)
        yaml.composer.warn_double_anchors = False
        root: Node | None = yaml.compose(text)
        return root
    except ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise YAMLText(Problem(line, column, f"not YAML: the character U+{ord(text[error.position]):04X}")) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        text = ": ".join(part for part in (error.context, error.problem) if part)
        raise YAMLText(Problem(line, column, f"not YAML: {text}")) from None
    except (YAMLError, ValueError) as error:
        raise YAMLText(Problem(1, 1, f"not YAML: {' '.join(str(error).split())}")) from None


class _Builder:
    """Turns nodes into values; keeps the marks and problems in `document`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._open: set[int] = set()
        self._nodes = 0

    def value(self, node: Node, path: Path, depth: int) -> object:
        self._nodes += 1
        if id(node) in self._open:
            raise YAMLText(Problem(*_place(node), "an anchor that contains itself"))
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise YAMLText(
                Problem(*_place(node), f"more than {MAX_NODES} values or {MAX_DEPTH} levels with its anchors")
            )
        if isinstance(node, ScalarNode):
            return node.value if node.style is not None else plain_scalar(node.value)
        self._open.add(id(node))
        try:
            return self._mapping(node, path, depth) if isinstance(node, MappingNode) else self._list(node, path, depth)
        finally:
            self._open.discard(id(node))

    def _list(self, node: Node, path: Path, depth: int) -> list[object]:
        items: list[object] = []
        for index, item in enumerate(node.value):
            here = (*path, index)
            self._document.marks[here] = _place(item)
            items.append(self.value(item, here, depth + 1))
        return items

    def _mapping(self, node: MappingNode, path: Path, depth: int) -> dict[object, object]:
        pairs = [(key, value) for key, value in node.value if not _is_merge(key)]
        merged: dict[object, object] = {}
        # Merged first, and from the last to the first, so that the marks that stay are those of the values that win.
        for value in [value for key, value in node.value if _is_merge(key)]:
            for source in reversed(value.value) if isinstance(value, SequenceNode) else [value]:
                if isinstance(source, MappingNode):
                    values = self.value(source, path, depth + 1)
                    assert isinstance(values, dict)
                    merged.update(values)
                else:
                    self._problem(source, path, "expected a mapping after <<")
        own: dict[object, object] = {}
        lines: dict[object, int] = {}
        for key_node, value_node in pairs:
            key = self.value(key_node, path, depth + 1) if isinstance(key_node, ScalarNode) else None
            if isinstance(key, bool) or not isinstance(key, str | int):
                self._problem(key_node, path, "expected a name as key; put it in quotes if it is meant as text")
            elif key in own:
                self._problem(key_node, (*path, key), f"written twice; first on line {lines[key]}")
            else:
                lines[key] = key_node.start_mark.line + 1
                here = (*path, key)
                self._document.marks[here] = _place(key_node)
                own[key] = self.value(value_node, here, depth + 1)
        return {**merged, **own}

    def _problem(self, node: Node, path: Path, text: str) -> None:
        self._document.problems.append(Problem(*_place(node), text, path))


def _is_merge(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.style is None and node.value == "<<"


def _place(node: Node | Event) -> tuple[int, int]:
    return (node.start_mark.line + 1, node.start_mark.column + 1)


def plain_scalar(text: str) -> object:
    """A plain scalar by the core schema of YAML 1.2 (section 10.3.2)."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) or _INFINITE.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf"))
    if _NAN.fullmatch(text):
        return float("nan")
    return text
