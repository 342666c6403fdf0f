"""Positioned reads from one file that say what went wrong and where."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from perdure.errors import DataError

__all__ = ["ByteFile"]


class ByteFile:
    """A file that is opened on first use, in each process anew, and read at any offset.

    Not a memory map: there, a file that has been cut would kill the process instead of raising.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self._descriptor: int | None = None

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on.

        Raises:
            DataError: the file cannot be read, or ends before.
        """
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DataError(f"{self.path}: cannot be opened: {error.strerror or error}") from error
            weakref.finalize(self, os.close, self._descriptor)
        try:
            content = os.pread(self._descriptor, size, offset)
            while len(content) < size and (
                more := os.pread(self._descriptor, size - len(content), offset + len(content))
            ):
                content += more
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read at byte {offset}: {error.strerror or error}") from error
        if len(content) < size:
            raise DataError(f"{self.path}: ends before byte {offset + size}; it was {self.size} bytes long")
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}
