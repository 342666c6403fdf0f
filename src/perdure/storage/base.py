"""What the engine asks of a place where bytes live. It knows nothing of checkpoints.

Every operation that changes something durable is one method, so that a fault storage can count,
fail or die at each (faults.py). Paths are strings; names inside a directory are single components.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

__all__ = ["Directory", "FileReader", "FileWriter", "Storage"]

Buffer = bytes | bytearray | memoryview


class FileWriter(Protocol):
    """A file being written under its final name inside a directory that nobody reads yet."""

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Writes all of `data` at `offset`; thread-safe for disjoint ranges."""

    def finish(self, size: int) -> None:
        """Cuts the file to `size` bytes, makes it durable, and closes it."""

    def abort(self) -> None:
        """Closes the file without promising anything; never raises."""


class FileReader(Protocol):
    """An open file; `size` in bytes as found when it was opened."""

    size: int

    def pread_into(self, buffer: memoryview, offset: int) -> None:
        """Fills `buffer` from `offset`; thread-safe. A file that ends early raises EOFError."""

    def close(self) -> None: ...


class Directory(Protocol):
    """An open directory: everything below is reached by this handle, also after a rename of its path."""

    path: str

    def names(self) -> list[str]: ...

    def open(self, name: str) -> FileReader:
        """Opens a regular file for reading; a symbolic link or anything else raises OSError."""

    def read(self, name: str, limit: int) -> bytes:
        """The whole of a small file; one over `limit` bytes raises OSError (EFBIG)."""

    def close(self) -> None: ...

    def __enter__(self) -> Directory: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """The operations. All raise OSError with its errno."""

    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def exists(self, path: str) -> bool:
        """Whether anything (a dangling link too) has this path."""

    def is_directory(self, path: str) -> bool:
        """Whether the path is a directory itself, not a link to one."""

    def open_directory(self, path: str) -> Directory: ...

    def read(self, path: str, limit: int) -> bytes: ...

    def free_bytes(self, path: str) -> int: ...

    def make_directory(self, path: str) -> None: ...

    def create(self, path: str, size: int) -> FileWriter:
        """A new file (it must not exist) with room for `size` bytes."""

    def write(self, path: str, data: Buffer) -> None:
        """Writes a small file and makes its content durable (not its name: `sync_directory`)."""

    def append(self, path: str, data: Buffer, durable: bool) -> None:
        """Appends in one write, creating the file if need be."""

    def rename(self, source: str, target: str) -> None:
        """Renames; an existing file `target` is replaced, an existing non-empty directory raises."""

    def link(self, source: str, target: str) -> None:
        """Gives a file a second name (it must not exist) in the same file system; raises OSError where none can be."""

    def exchange(self, a: str, b: str) -> None:
        """Swaps two names in one operation; raises OSError (EINVAL or ENOSYS) where that cannot be."""

    def unlink(self, path: str) -> None: ...

    def remove_directory(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory durable."""
