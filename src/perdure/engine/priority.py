"""Threads that give way: what saves in the background must not slow what trains."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading

__all__ = ["lower_priority"]

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273}
_WHO_PROCESS, _BEST_EFFORT, _LOWEST = 1, 2, 7
# A tenth of a busy processor: less and a save hardly ends, and its digests cost training the same.
_NICE = 10


def lower_priority() -> None:
    """Gives the calling thread a small share of busy processors, and the least of the disk; never fails.

    On Linux a thread has its own; elsewhere nothing is done, as it would be the whole process's.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT << 13 | _LOWEST)
