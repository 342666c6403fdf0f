"""events.jsonl: what happened to a root, one JSON object per line; appended to, never rewritten."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from perdure.catalog.root import GONE, NOT_A_FILE, Iteration, Root
from perdure.format.digest import is_digest
from perdure.format.jsonio import encode
from perdure.format.names import EVENTS

__all__ = ["append_event", "damage_marks", "end_torn_line", "mark_damaged", "read_events"]

_TAIL = 64 << 20  # more than a million events; older ones are history


def append_event(root: Root, event: str, *, now: float | None = None, durable: bool = False, **fields: Any) -> None:
    """Appends `{"time", "event", ...fields}` as one line, in one write.

    Raises:
        OSError: it could not be written; the caller decides whether that matters.
    """
    line = {"time": round(time.time() if now is None else now, 3), "event": event, **fields}
    root.storage.append(root.join(EVENTS), encode(line) + b"\n", durable)


def read_events(root: Root) -> list[dict[str, Any]]:
    """The events, oldest first. A torn or foreign line is left out; a missing file is an empty history."""
    events: list[dict[str, Any]] = []
    for line in _tail(root).splitlines():
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            continue
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            events.append(value)
    return events


def mark_damaged(root: Root, iteration: Iteration, why: str, *, now: float | None = None) -> None:
    """Records that this writing of the iteration is damaged, so that a restart doesn't try it again.

    Goes into the events of `root`, which is the save root: never into a root that is only read.
    """
    append_event(
        root,
        "damage",
        now=now,
        durable=True,
        iteration=iteration.iteration,
        sequence=iteration.commit.sequence,
        lineage=iteration.commit.lineage,
        commit=iteration.commit.digest,
        path=iteration.path,
        why=why[:1000],
    )


def damage_marks(root: Root) -> set[str]:
    """Commit digests of the iterations that were found damaged, and to which nobody has rewound since."""
    marks: set[str] = set()
    for event in read_events(root):
        commit = event.get("commit")
        if event["event"] == "damage" and isinstance(commit, str) and is_digest(commit):
            marks.add(commit)
        elif event["event"] == "rewind" and isinstance(commit, str):
            marks.discard(commit)
    return marks


def end_torn_line(root: Root) -> bool:
    """Ends a line that a crash tore, so that the next event doesn't hang on to it."""
    data = _tail(root, 1)
    if data in (b"", b"\n"):
        return False
    root.storage.append(root.join(EVENTS), b"\n", False)
    return True


def _tail(root: Root, limit: int = _TAIL) -> bytes:
    try:
        with root.storage.open_directory(root.path) as directory:
            reader = directory.open(EVENTS)
            try:
                data = bytearray(min(reader.size, limit))
                reader.pread_into(memoryview(data), reader.size - len(data))
                return bytes(data)
            finally:
                reader.close()
    except OSError as error:
        if error.errno in GONE or error.errno in NOT_A_FILE:
            return b""
        raise
