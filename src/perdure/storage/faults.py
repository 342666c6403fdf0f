"""A storage that fails or dies at the n-th operation: for tests of what a crash leaves behind.

Shipped, so that users can try their own set-up: `FaultStorage(LocalStorage(), at=7, action="kill-before")`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from perdure.storage.base import Buffer, Directory, FileReader, FileWriter, Storage

__all__ = ["Action", "FaultStorage"]

Action = Literal["count", "kill-before", "kill-within", "kill-after", "raise"]


class FaultStorage(Storage):
    """Wraps a storage, numbers its changing operations from 1, and acts at number `at`.

    Args:
        inner: the storage that does the work.
        at: the number at which to act; 0 only counts.
        action: `kill-before`, `kill-within` or `kill-after` the operation by SIGKILL, or `raise` an OSError.
            Within a write half of its bytes get through; other operations have no middle and are not begun.
        code: errno for `raise`.
        only: acts on, and numbers, only operations whose (name, path) it accepts.
        sticky: with `raise`, every later operation fails too, as on a full disk.
        reads: number reading operations too, those on open directories and files included.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        at: int = 0,
        action: Action = "count",
        code: int = 28,
        only: Callable[[str, str], bool] | None = None,
        sticky: bool = False,
        reads: bool = False,
    ) -> None:
        self.inner = inner
        self.log: list[tuple[str, str]] = []
        self._at, self._action, self._code, self._only, self._sticky, self._reads = (
            at,
            action,
            code,
            only,
            sticky,
            reads,
        )
        self._lock = threading.Lock()

    def _run(self, name: str, path: str, work: Callable[[], None], half: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._only is not None and not self._only(name, path):
                number = -1
            else:
                self.log.append((name, path))
                number = len(self.log)
        due = number == self._at or (self._sticky and self._at and number > self._at)
        if due and self._action == "raise":
            raise OSError(self._code, f"{os.strerror(self._code)} (injected at operation {number}, {name})", path)
        if due and self._action == "kill-within" and half is not None:
            half()
        if due and self._action in ("kill-before", "kill-within"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            work()
        finally:
            # Also after one that failed by itself, as an exchange does where there is none.
            if due and self._action == "kill-after":
                os.kill(os.getpid(), signal.SIGKILL)

    def _read(self, name: str, path: str) -> None:
        if self._reads:
            self._run(name, path, lambda: None)

    def list(self, path: str) -> list[str]:
        self._read("list", path)
        return self.inner.list(path)

    def exists(self, path: str) -> bool:
        return self.inner.exists(path)

    def is_directory(self, path: str) -> bool:
        return self.inner.is_directory(path)

    def open_directory(self, path: str) -> Directory:
        self._read("open_directory", path)
        directory = self.inner.open_directory(path)
        return _FaultDirectory(self, directory) if self._reads else directory

    def read(self, path: str, limit: int) -> bytes:
        self._read("read", path)
        return self.inner.read(path, limit)

    def free_bytes(self, path: str) -> int:
        return self.inner.free_bytes(path)

    def make_directory(self, path: str) -> None:
        self._run("make_directory", path, lambda: self.inner.make_directory(path))

    def create(self, path: str, size: int) -> FileWriter:
        made: list[FileWriter] = []
        self._run("create", path, lambda: made.append(self.inner.create(path, size)))
        return _FaultWriter(self, path, made[0])

    def write(self, path: str, data: Buffer) -> None:
        half = memoryview(data)[: len(data) // 2]
        self._run("write", path, lambda: self.inner.write(path, data), lambda: self.inner.write(path, half))

    def append(self, path: str, data: Buffer, durable: bool) -> None:
        half = memoryview(data)[: len(data) // 2]
        self._run(
            "append",
            path,
            lambda: self.inner.append(path, data, durable),
            lambda: self.inner.append(path, half, durable),
        )

    def rename(self, source: str, target: str) -> None:
        self._run("rename", target, lambda: self.inner.rename(source, target))

    def link(self, source: str, target: str) -> None:
        self._run("link", target, lambda: self.inner.link(source, target))

    def exchange(self, a: str, b: str) -> None:
        self._run("exchange", b, lambda: self.inner.exchange(a, b))

    def unlink(self, path: str) -> None:
        self._run("unlink", path, lambda: self.inner.unlink(path))

    def remove_directory(self, path: str) -> None:
        self._run("remove_directory", path, lambda: self.inner.remove_directory(path))

    def sync_directory(self, path: str) -> None:
        self._run("sync_directory", path, lambda: self.inner.sync_directory(path))


class _FaultWriter(FileWriter):
    def __init__(self, storage: FaultStorage, path: str, inner: FileWriter) -> None:
        self._storage, self._path, self._inner = storage, path, inner

    def pwrite(self, data: Buffer, offset: int) -> None:
        half = memoryview(data)[: len(data) // 2]
        self._storage._run(
            "pwrite",
            self._path,
            lambda: self._inner.pwrite(data, offset),
            lambda: self._inner.pwrite(half, offset),
        )

    def finish(self, size: int) -> None:
        self._storage._run("finish", self._path, lambda: self._inner.finish(size))

    def abort(self) -> None:
        self._inner.abort()


class _FaultDirectory(Directory):
    def __init__(self, storage: FaultStorage, inner: Directory) -> None:
        self._storage, self._inner, self.path = storage, inner, inner.path

    def names(self) -> list[str]:
        self._storage._read("names", self.path)
        return self._inner.names()

    def open(self, name: str) -> FileReader:
        path = os.path.join(self.path, name)
        self._storage._read("open", path)
        return _FaultReader(self._storage, path, self._inner.open(name))

    def read(self, name: str, limit: int) -> bytes:
        self._storage._read("read", os.path.join(self.path, name))
        return self._inner.read(name, limit)

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _FaultReader(FileReader):
    def __init__(self, storage: FaultStorage, path: str, inner: FileReader) -> None:
        self._storage, self._path, self._inner, self.size = storage, path, inner, inner.size

    def pread_into(self, buffer: memoryview, offset: int) -> None:
        self._storage._read("pread_into", self._path)
        self._inner.pread_into(buffer, offset)

    def close(self) -> None:
        self._inner.close()
