"""Roots as an enemy, or a bad day, would leave them: any value anywhere, signed as if it had been written so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from perdure.format.digest import digest_bytes

__all__ = ["TEXTS", "changes", "mutated", "resign", "values"]

values = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, -(1 << 63), 1 << 31, 1 << 40, 1 << 60, (1 << 62) - 1, 1 << 64, 10**30]
    ),
    st.sampled_from([0.5, -0.0, 1e308, 1e-320, 10**30]),
    st.sampled_from(
        ["", ".", "..", "../secret", "/etc/passwd", "a/b", "a\0b", "F32", "F64", "C64", "nan", "\ud7ff", "x" * 3000]
    ),
    st.sampled_from([[], {}, [[]], [0], [1 << 40], [-1], [1 << 20, 1 << 20], [0] * 70, [None], {"a": {"b": {}}}]),
    st.integers(0, 12),
    st.text(max_size=5),
)

TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": "{}".encode("utf-16"),
    "invalid utf-8": b'{"a":"\xff\xfe\xc0\xaf"}',
    "nul bytes": bytes(5000),
    "a bare word": b"null",
    "not a number": b'{"global_step":NaN,"model":NaN}',
    "a number of a megabyte": b'{"global_step":' + b"9" * (1 << 20) + b',"iteration":1}',
    "a fraction of a megabyte": b'{"global_step":0.' + b"3" * (1 << 20) + b"}",
    "an exponent": b'{"global_step":1e999999999,"bytes":1e400}',
    "deep lists": b"[" * 300_000,
    "deep objects": b'{"model":' * 100_000,
    "deep values that end": b'{"training":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "keys twice": b'{"global_step":1,"global_step":2,"model":{},"model":[]}',
    "a string that does not end": b'{"a":"' + b"x" * 100_000,
    "many keys": b"{" + b",".join(b'"%d":0' % n for n in range(50_000)) + b"}",
    "lone surrogates": b'{"\\ud800":"\\udfff"}',
}
"""Whole files that are no files of ours."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from _places(child, (*path, key))


def changes(table: Any) -> st.SearchStrategy[list[tuple[tuple[Any, ...], str, Any]]]:
    """Up to three changes of a JSON value: (where, what is done there, a value)."""
    what = st.sampled_from(["set", "set", "set", "drop", "double", "rename"])
    return st.lists(st.tuples(st.sampled_from(list(_places(table))), what, values), min_size=1, max_size=3)


def mutated(table: Any, todo: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
    """A changed copy; a change that an earlier one made impossible is left out."""
    table = json.loads(json.dumps(table))
    for path, what, value in todo:
        try:
            holder = table
            for key in path[:-1]:
                holder = holder[key]
            if what == "set":
                holder[path[-1]] = value
            elif what == "drop":
                del holder[path[-1]]
            elif what == "rename":
                holder[str(value)] = holder.pop(path[-1])
            elif isinstance(holder, list):
                holder.append(holder[path[-1]])
            else:
                holder[f"{path[-1]}2"] = holder[path[-1]]
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return table


def resign(directory: Path, fields: dict[str, Any] | None = None) -> None:
    """Makes commit.json agree with the files as they are: every digest holds.

    Args:
        fields: what else it says.
    """
    commit = json.loads((directory / "commit.json").read_bytes()) if fields is None else dict(fields)
    commit.pop("digest", None)
    if fields is None:
        texts = {name: (directory / f"{name}.json").read_bytes() for name in ("metadata", "common")}
        commit |= {f"{name}_digest": digest_bytes(text) for name, text in texts.items()}
        shards = sum(p.stat().st_size for p in directory.glob("*.safetensors"))
        commit["bytes"] = shards + sum(map(len, texts.values()))
    head = json.dumps(commit, separators=(",", ":")).encode()[:-1]
    (directory / "commit.json").write_bytes(head + b',"digest":"' + digest_bytes(head).encode() + b'"}')


def header_of(file: Path) -> dict[str, Any]:
    """A shard's header as JSON."""
    data = file.read_bytes()
    table: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return table


def replace_header(file: Path, table: Any) -> bytes:
    """Gives a shard another header of any length; returns the header's bytes."""
    data = file.read_bytes()
    body = json.dumps(table).encode()
    header = len(body).to_bytes(8, "little") + body
    file.write_bytes(header + data[8 + int.from_bytes(data[:8], "little") :])
    return header
