"""Ranks as forks of this process: torch is imported once for many layouts, and each layout is a job of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["job", "told"]


def job(
    folder: Path, ranks: int, work: Callable[[int], None], deadline_s: float = 200, grace_s: float = 2
) -> list[int]:
    """Runs `work(rank)` on every rank of a new job; the exit status of each, or minus the signal that ended it.

    When a rank fails, the others have `grace_s` more. What ranks wrote lies in `folder` as `rank-<n>.txt`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    children = {_fork(folder, rank, ranks, meeting, work): rank for rank in range(ranks)}
    left, codes, end = dict(children), [0] * ranks, time.monotonic() + deadline_s
    while left:
        pid, status = _wait(left)
        if pid:
            codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
            end = min(end, time.monotonic() + grace_s) if status else end
        elif time.monotonic() > end:
            for each in left:
                os.kill(each, signal.SIGKILL)
            end = float("inf")
    return codes


def told(folder: Path) -> str:
    """What the ranks of the last job in a folder wrote."""
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("rank-*.txt")))


def _wait(left: dict[int, int]) -> tuple[int, int]:
    for pid in left:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return found, status
    time.sleep(0.005)
    return 0, 0


def _fork(folder: Path, rank: int, ranks: int, meeting: Path, work: Callable[[int], None]) -> int:
    with warnings.catch_warnings():
        # The child touches no thread of the parent's.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(folder / f"rank-{rank}.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
        warnings.simplefilter("ignore")
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=150)
            )
        work(rank)
        if ranks > 1:
            dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
