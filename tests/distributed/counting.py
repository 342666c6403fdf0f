"""A storage that notes every byte which is read of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from perdure.storage.base import Directory, FileReader
from perdure.storage.local import LocalStorage

__all__ = ["Counting"]


class Counting(LocalStorage):
    """The local file system; `ranges` are what was read below open directories, as (file, begin, end)."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def open_directory(self, path: str) -> Directory:
        directory = super().open_directory(path)
        plain_open = directory.open

        def open_file(name: str) -> FileReader:
            reader = plain_open(name)
            plain_pread = reader.pread_into

            def pread_into(buffer: memoryview, offset: int) -> None:
                plain_pread(buffer, offset)
                self.ranges.append((name, offset, offset + len(buffer)))

            reader.pread_into = pread_into  # type: ignore[method-assign]
            return reader

        # A small file is read through `open` too.
        directory.open = open_file  # type: ignore[method-assign]
        return directory

    def write_down(self, path: Path) -> None:
        """Leaves what was read for the test to look at."""
        path.write_text(json.dumps(self.ranges))
