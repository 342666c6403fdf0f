"""`perdure` on ranks whose disks are their own, each below the same path: `python -m tests.distributed.apart`."""

from __future__ import annotations

import os

from perdure.cli.main import main
from perdure.storage.local import LocalStorage

if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        original = LocalStorage.read

        def read(self: LocalStorage, path: str, limit: int) -> bytes:
            return original(self, path.replace("/checkpoint/", "/elsewhere/"), limit)

        LocalStorage.read = read  # type: ignore[method-assign, assignment]
    main()
