"""A disk in memory that knows what has reached the platter: for power cuts, after which un-fsynced things are gone.

A name is durable once its directory was synced, a file's bytes once the file was. `materialise` writes what a
machine could find after a power cut into a real folder, in one of four views.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from perdure.storage.base import Buffer, Directory, FileReader, FileWriter, Storage

__all__ = ["VIEWS", "Disk", "PowerCut", "View"]

View = Literal["dropped", "deleted", "names-only", "torn"]
VIEWS: tuple[View, ...] = ("dropped", "deleted", "names-only", "torn")
"""What survived of the un-synced. dropped: nothing; deleted: deletions alone; names-only: every change of names,
but no bytes; torn: names and half of the bytes."""


class PowerCut(BaseException):
    """The machine is off."""


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None


@dataclass(eq=False)
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)


class Disk(Storage):
    """A disk whose top holds a copy of a real folder, all of it durable.

    Args:
        base: the folder.
        at: the path under which the top is known.
        cut: the number of the changing operation (from 1) before which the power goes; 0: never.
        exchanges: whether it can swap two names.
    """

    def __init__(self, base: str, *, at: str = "/", cut: int = 0, exchanges: bool = True) -> None:
        self.top = _copied(base)
        self.log: list[tuple[str, str]] = []
        self._at, self._cut, self._exchanges = at, cut, exchanges
        self._lock = threading.RLock()

    def power_off(self) -> None:
        """What happens at the cut; must not return."""
        raise PowerCut

    def materialise(self, path: str, view: View) -> None:
        """Writes into the real, empty folder `path` what is found after the power came back."""
        _write(self.top, path, view, _living(self.top))

    def list(self, path: str) -> list[str]:
        return sorted(self._folder(path).entries)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def is_directory(self, path: str) -> bool:
        return isinstance(self._find(path), Folder)

    def open_directory(self, path: str) -> Directory:
        return _Handle(path, self._folder(path))

    def read(self, path: str, limit: int) -> bytes:
        return _Handle(os.path.dirname(path), self._parent(path)).read(os.path.basename(path), limit)

    def free_bytes(self, path: str) -> int:
        return 1 << 40

    def make_directory(self, path: str) -> None:
        with self._operation("make_directory", path):
            if self.exists(path):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._parent(path).entries[os.path.basename(path)] = Folder()

    def create(self, path: str, size: int) -> FileWriter:
        with self._operation("create", path):
            if self.exists(path):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            file = self._parent(path).entries[os.path.basename(path)] = File()
        return _Writer(self, path, file)

    def write(self, path: str, data: Buffer) -> None:
        # Three moments at which the power can go: nothing, bytes without fsync, fsynced.
        with self._operation("write", path):
            file = self._parent(path).entries.get(os.path.basename(path))
            if not isinstance(file, File):
                file = self._parent(path).entries[os.path.basename(path)] = File()
            file.data[:] = data
            file.durable = None
        with self._operation("write", path):
            file.durable = bytes(file.data)

    def append(self, path: str, data: Buffer, durable: bool) -> None:
        with self._operation("append", path):
            file = self._parent(path).entries.setdefault(os.path.basename(path), File())
            assert isinstance(file, File)
            file.data += data
            if durable:
                file.durable = bytes(file.data)

    def rename(self, source: str, target: str) -> None:
        with self._operation("rename", target):
            node, there = self._find(source), self._find(target)
            if node is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            if isinstance(there, Folder) and there.entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
            del self._parent(source).entries[os.path.basename(source)]
            self._parent(target).entries[os.path.basename(target)] = node

    def link(self, source: str, target: str) -> None:
        with self._operation("link", target):
            node = self._find(source)
            if not isinstance(node, File):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), source)
            if self.exists(target):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._parent(target).entries[os.path.basename(target)] = node

    def exchange(self, a: str, b: str) -> None:
        with self._operation("exchange", b):
            if not self._exchanges:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), a)
            here, there = self._parent(a).entries, self._parent(b).entries
            one, other = os.path.basename(a), os.path.basename(b)
            here[one], there[other] = there[other], here[one]

    def unlink(self, path: str) -> None:
        with self._operation("unlink", path):
            if not isinstance(self._find(path), File):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            del self._parent(path).entries[os.path.basename(path)]

    def remove_directory(self, path: str) -> None:
        with self._operation("remove_directory", path):
            if self._folder(path).entries:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
            del self._parent(path).entries[os.path.basename(path)]

    def sync_directory(self, path: str) -> None:
        with self._operation("sync_directory", path):
            folder = self._folder(path)
            folder.durable = dict(folder.entries)

    @contextmanager
    def _operation(self, name: str, path: str) -> Iterator[None]:
        with self._lock:
            if len(self.log) + 1 == self._cut:
                self.power_off()
            self.log.append((name, path))
            yield

    def _find(self, path: str) -> File | Folder | None:
        node: File | Folder | None = self.top
        for part in os.path.relpath(path, self._at).split("/"):
            if part == ".":
                continue
            node = node.entries.get(part) if isinstance(node, Folder) else None
        return node

    def _folder(self, path: str) -> Folder:
        node = self._find(path)
        if not isinstance(node, Folder):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node

    def _parent(self, path: str) -> Folder:
        return self._folder(os.path.dirname(path))


class _Writer(FileWriter):
    def __init__(self, disk: Disk, path: str, file: File) -> None:
        self._disk, self._path, self._file = disk, path, file

    def pwrite(self, data: Buffer, offset: int) -> None:
        with self._disk._operation("pwrite", self._path):
            end = offset + len(data)
            self._file.data.extend(bytes(max(0, end - len(self._file.data))))
            self._file.data[offset:end] = data

    def finish(self, size: int) -> None:
        with self._disk._operation("finish", self._path):
            del self._file.data[size:]
            self._file.durable = bytes(self._file.data)

    def abort(self) -> None: ...


class _Reader(FileReader):
    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def pread_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self.size:
            raise EOFError
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None: ...


class _Handle(Directory):
    def __init__(self, path: str, folder: Folder) -> None:
        self.path, self._folder = path, folder

    def names(self) -> list[str]:
        return sorted(self._folder.entries)

    def open(self, name: str) -> FileReader:
        node = self._folder.entries.get(name)
        if not isinstance(node, File):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return _Reader(bytes(node.data))

    def read(self, name: str, limit: int) -> bytes:
        reader = self.open(name)
        data = bytearray(reader.size)
        reader.pread_into(memoryview(data), 0)
        return bytes(data)

    def close(self) -> None: ...

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *error: object) -> None: ...


def _copied(path: str) -> Folder:
    folder = Folder()
    for entry in os.scandir(path):
        if entry.is_dir():
            folder.entries[entry.name] = _copied(entry.path)
        else:
            with open(entry.path, "rb") as file:
                data = file.read()
            folder.entries[entry.name] = File(bytearray(data), data)
    folder.durable = dict(folder.entries)
    return folder


def _living(folder: Folder) -> set[int]:
    """Identities of everything that still has a name."""
    found: set[int] = set()
    for node in folder.entries.values():
        found.add(id(node))
        if isinstance(node, Folder):
            found |= _living(node)
    return found


def _write(folder: Folder, path: str, view: View, living: set[int]) -> None:
    for name, node in (folder.durable if view in ("dropped", "deleted") else folder.entries).items():
        there = os.path.join(path, name)
        if view == "deleted" and id(node) not in living:
            continue
        if isinstance(node, Folder):
            os.mkdir(there)
            _write(node, there, view, living)
            continue
        data = node.durable
        if data is None or (view == "torn" and data != node.data):
            data = bytes(node.data[: len(node.data) // 2]) if view == "torn" else (data or b"")
        with open(there, "wb") as file:
            file.write(data)
