"""metrics.jsonl and ledger.jsonl: append-only, one write per line, a header line per attempt.

Readers follow the chain of parents and supersede by stream position (`superseded`), so nothing is
ever rewritten.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

__all__ = ["History", "read_lines", "superseded"]


class History:
    """One append-only file of JSON lines.

    The first line of an attempt tells torn text of the attempt before from whole lines, and is written
    only when there is something to say after it.
    """

    def __init__(self, path: str, header: dict[str, Any], *, digest: bool = False) -> None:
        self._path, self._header = path, header
        self._fd = -1
        self._hasher = xxhash.xxh3_128() if digest else None
        self.size = 0

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line (non-finite numbers as null, which every reader of JSON takes)."""
        if self._fd < 0:
            self._open()
        self._put(msgspec.json.encode(record) + b"\n")

    def sync(self) -> tuple[int, str]:
        """Makes the file durable; its length and the digest of its bytes."""
        if self._fd < 0 or self._hasher is None:
            return 0, ""
        os.fsync(self._fd)
        return self.size, "xxh3-128:" + self._hasher.hexdigest()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size
        last = os.pread(self._fd, 1, self.size - 1) if self.size else b"\n"
        if self._hasher is not None:
            at = 0
            while chunk := os.pread(self._fd, 1 << 20, at):
                self._hasher.update(chunk)
                at += len(chunk)
        if last != b"\n":
            self._put(b"\n")
        self._put(msgspec.json.encode(self._header) + b"\n")

    def _put(self, line: bytes) -> None:
        os.write(self._fd, line)
        self.size += len(line)
        if self._hasher is not None:
            self._hasher.update(line)


def number(value: float) -> float | None:
    """A float for JSON: null where it is not finite."""
    return value if math.isfinite(value) else None


def read_lines(path: str) -> list[dict[str, Any]]:
    """Every whole line; a torn one is ignored."""
    found = []
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
    return found


def superseded(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step lines that stand: a header says where its attempt began, and what lay beyond is superseded."""
    standing: list[dict[str, Any]] = []
    for line in lines:
        if "resumed" in line:
            begin = line["consumed_samples"]
            while standing and standing[-1]["samples"][0] >= begin:
                standing.pop()
        elif "samples" in line:
            standing.append(line)
    return standing
