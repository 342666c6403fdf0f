"""`perdure` with slow storage, or a full disk on one rank: `python -m tests.distributed.slow train run.yaml`."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from perdure.cli.main import main
from perdure.storage.local import LocalStorage

WRITES = float(os.environ.get("PERDURE_TEST_SLOW_WRITES", "0"))
READS = float(os.environ.get("PERDURE_TEST_SLOW_READS", "0"))


def slow(name: str, seconds: float) -> None:
    original: Any = getattr(LocalStorage, name)

    def wrapped(self: LocalStorage, *arguments: Any, **more: Any) -> Any:
        if name == "open_directory" and "iteration_" in str(arguments[0]):
            Path(f"reading-{os.environ['RANK']}").touch()
            time.sleep(seconds)
        elif name != "open_directory" and str(arguments[0]).endswith((".safetensors", ".json")):
            time.sleep(seconds)
        return original(self, *arguments, **more)

    setattr(LocalStorage, name, wrapped)


def full(name: str) -> None:
    original: Any = getattr(LocalStorage, name)

    def wrapped(self: LocalStorage, path: str, *arguments: Any) -> Any:
        if ".partial-" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return original(self, path, *arguments)

    setattr(LocalStorage, name, wrapped)


if __name__ == "__main__":
    if os.environ.get("PERDURE_TEST_FULL_RANK") == os.environ["RANK"]:
        full("create")
        full("write")
    if WRITES:
        slow("create", WRITES)
        slow("write", WRITES)
    if READS:
        slow("open_directory", READS)
    main()
