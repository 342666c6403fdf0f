"""metrics.jsonl and ledger.jsonl: append-only, one write per line, a header line per attempt.

Readers follow the chain of parents and supersede by stream position (`superseded`), so nothing is
ever rewritten. What a full disk refuses is kept and written when there is room again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import xxhash

__all__ = ["History", "read_lines", "superseded", "take_back"]

T = TypeVar("T")


class History:
    """One append-only file of JSON lines.

    The first line of an attempt tells torn text of the attempt before from whole lines, and is written
    only when there is something to say after it.

    Args:
        digest: keep the digest of all bytes of the file.
        warn: is told once per outage that lines wait for room.
    """

    def __init__(
        self,
        path: str,
        header: dict[str, Any],
        *,
        digest: bool = False,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._path, self._header, self._warn = path, header, warn
        self._fd = -1
        self._lines: list[bytes] = []
        self._failing = False
        # A background save makes the file durable while training goes on writing to it.
        self._lock = threading.Lock()
        self._hasher = xxhash.xxh3_128() if digest else None
        self.size = 0

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line (non-finite numbers as null, which every reader of JSON takes); never fails a step."""
        with self._lock:
            self._lines.append(msgspec.json.encode(record) + b"\n")
            self._try_to_flush()

    def sync(self) -> tuple[int, str]:
        """Makes the file durable; its length and the digest of its bytes.

        Raises:
            OSError: lines are still waiting for room.
        """
        with self._lock:
            self._flush()
            if self._fd < 0 or self._hasher is None:
                return 0, ""
            told = self.size, "xxh3-128:" + self._hasher.hexdigest()
            fd = os.dup(self._fd)
        # Outside of the lock: no step waits for a disk.
        try:
            os.fsync(fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error
        finally:
            os.close(fd)
        return told

    def close(self) -> None:
        with self._lock:
            self._failing = False
            self._try_to_flush()
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _try_to_flush(self) -> None:
        try:
            self._flush()
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._warn(f"warning: {self._path} cannot be written now, its lines wait in memory: {error.strerror}")
            self._failing = True

    def _flush(self) -> None:
        try:
            if self._fd < 0 and self._lines:
                self._open()
            while self._lines:
                written = os.write(self._fd, self._lines[0])
                self._count(self._lines[0][:written])
                self._lines[0] = self._lines[0][written:]
                if not self._lines[0]:
                    del self._lines[0]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size
        last = os.pread(self._fd, 1, self.size - 1) if self.size else b"\n"
        if self._hasher is not None:
            at = 0
            while chunk := os.pread(self._fd, 1 << 20, at):
                self._hasher.update(chunk)
                at += len(chunk)
        start = [msgspec.json.encode(self._header) + b"\n"]
        self._lines[:0] = start if last == b"\n" else [b"\n", *start]

    def _count(self, data: bytes) -> None:
        self.size += len(data)
        if self._hasher is not None:
            self._hasher.update(data)


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
    """The step lines that stand, in the order of training.

    A header says from which attempt's save its own attempt goes on, and at which position that save was made.
    What other attempts did since, and that attempt beyond the position, is superseded.
    """
    standing: list[dict[str, Any]] = []
    for line in lines:
        if "resumed" in line:
            position = line.get("parent_samples", line["consumed_samples"])
            take_back(standing, line.get("parent_attempt"), position, lambda row: (row["samples"][0], row["attempt"]))
        elif "samples" in line:
            standing.append(line)
    return standing


def take_back(standing: list[T], parent: str | None, position: int, place: Callable[[T], tuple[int, str]]) -> list[T]:
    """Removes from the standing lines, and returns, what an attempt replaces that goes on from a save.

    Args:
        standing: lines in the order of training.
        parent: the attempt that made the save; None where that is not known.
        position: of the save in the sample stream.
        place: a line's first stream position and its attempt.
    """
    kept = len(standing)
    while kept:
        first, attempt = place(standing[kept - 1])
        if first < position and parent in (None, attempt):
            break
        kept -= 1
    removed = standing[kept:]
    del standing[kept:]
    return removed
