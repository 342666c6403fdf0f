"""Whether all ranks see one directory: asked at start, because a save that goes to several disks is none."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from perdure.catalog.root import Root
from perdure.engine.launcher import deadline_told
from perdure.engine.ranks import Ranks
from perdure.errors import UsageError
from perdure.format.names import temporary_name

__all__ = ["check_shared"]

PATIENCE_S = deadline_told("PERDURE_SHARED_DEADLINE", 30)  # network file systems show a new file late
_LIMIT = 64


def check_shared(root: Root, ranks: Ranks) -> None:
    """Rank 0, which holds the root, writes a file with a word in it; every rank must read that word.

    Raises:
        UsageError: some do not; they are named with their hosts.
    """
    if ranks.size == 1:
        return
    path, storage = root.join(temporary_name("probe")), root.storage

    def write() -> str:
        word = os.urandom(16).hex()
        storage.write(path, word.encode())
        return word

    word = ranks.decide(write, "writing a file for all ranks to see", str)
    end, seen = time.monotonic() + PATIENCE_S, False
    while not seen and time.monotonic() < end:
        with contextlib.suppress(OSError):
            seen = storage.read(path, _LIMIT) == word.encode()
        if not seen:
            time.sleep(0.05)
    found = ranks.gather([seen, socket.gethostname()], "looking for rank 0's file")
    if ranks.is_first:
        with contextlib.suppress(OSError):
            storage.unlink(path)
    blind = [f"rank {rank} on {host}" for rank, (saw, host) in enumerate(found) if not saw]
    if blind:
        more = f" and {len(blind) - 5} more" if len(blind) > 5 else ""
        raise UsageError(
            f"checkpoint.save_path: {root.path} is not one directory for all ranks: {', '.join(blind[:5])}{more} "
            f"did not see within {PATIENCE_S:g} s what rank 0 on {found[0][1]} wrote there",
            hint="put checkpoint.save_path on storage that all hosts share",
        )
