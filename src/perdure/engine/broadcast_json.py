"""The JSON files of an iteration as rank 0 found them, for the other ranks to read from memory."""

from __future__ import annotations

import errno
import os
from types import TracebackType

import msgspec

from perdure.format.names import COMMIT, COMMON, METADATA
from perdure.storage.base import Directory, FileReader

__all__ = ["Told"]

_LARGEST = 2 << 30


class _Found(msgspec.Struct, array_like=True):
    """What reading one file gave: its bytes, or the error."""

    data: bytes = b""
    errno: int = 0
    text: str = ""


class Told(Directory):
    """A directory that holds what `read` found in another one, on this rank or on rank 0.

    A file that could not be read raises the same OSError here. Opening files is left to the real directory.
    """

    def __init__(self, path: str, told: bytes) -> None:
        self.path = path
        self._found = msgspec.msgpack.decode(told, type=dict[str, _Found])

    @staticmethod
    def read_all(directory: Directory) -> bytes:
        """The JSON files of a directory as bytes to be told; never raises OSError."""
        found = {}
        for name in (COMMIT, METADATA, COMMON):
            try:
                found[name] = _Found(directory.read(name, _LARGEST))
            except EOFError as error:
                found[name] = _Found(text=str(error))
            except OSError as error:
                found[name] = _Found(errno=error.errno or errno.EIO, text=error.strerror or str(error))
        return msgspec.msgpack.encode(found)

    def names(self) -> list[str]:
        return sorted(self._found)

    def open(self, name: str) -> FileReader:
        raise OSError(errno.ENOTSUP, "only told of, not here", os.path.join(self.path, name))

    def read(self, name: str, limit: int) -> bytes:
        found = self._found.get(name, _Found(errno=errno.ENOENT, text=os.strerror(errno.ENOENT)))
        path = os.path.join(self.path, name)
        if found.errno:
            raise OSError(found.errno, found.text, path)
        if found.text:
            raise EOFError(found.text)
        if len(found.data) > limit:
            raise OSError(
                errno.EFBIG, f"{len(found.data)} bytes, more than the {limit} that such a file can have", path
            )
        return found.data

    def close(self) -> None: ...

    def __enter__(self) -> Directory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
