"""Fills a small file system of its own to every brim and saves into it.

Run as a program inside a mount namespace, with an empty directory on which a tmpfs is to be mounted:
`unshare -Urm python -m tests.crash.full_disk DIRECTORY`. Prints {"failed", "saved", "faults"}.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

from tests.crash.engine_run import Run, train

from perdure import Progress
from perdure.catalog.verify import verify
from perdure.errors import SaveError
from perdure.storage.local import LocalStorage

ROOM = 400_000
NAMES = 40


class Unasked(LocalStorage):
    """Says that there is room enough, so that the disk itself has to say no."""

    def free_bytes(self, path: str) -> int:
        return 1 << 40


def brim(path: str, left: int) -> str:
    """Fills the file system until `left` bytes are free."""
    filler = os.path.join(path, "filler")
    with open(filler, "wb") as file:
        figures = os.statvfs(path)
        file.write(bytes(max(figures.f_bavail * figures.f_frsize - left, 0)))
    return filler


def names(path: str, left: int) -> list[str]:
    """Makes files until only `left` more names fit."""
    figures = os.statvfs(path)
    made = [os.path.join(path, f"name-{n}") for n in range(max(figures.f_favail - left, 0))]
    for name in made:
        with open(name, "wb"):
            pass
    return made


def attempt(path: str, what: str, left: int, background: bool, counts: Counter[str]) -> list[str]:
    """One save into what is left, and one more when there is room again."""
    root, faults = os.path.join(path, "root"), []
    where = f"{left} {what} left, {'async' if background else 'sync'}"
    train(root, "A", storage=Unasked())
    run = Run()
    with run.checkpointer(root, Unasked(), background, 2) as checkpointer:
        checkpointer.load()
        filled = [brim(path, left)] if what == "bytes" else names(path, left)
        run.update("B")
        try:
            checkpointer.save(Progress(2, 8, 4))
            checkpointer.wait()
            counts["saved"] += 1
        except SaveError as error:
            counts["failed"] += 1
            if "No space left" not in str(error) or not ("step 2" in str(error) or "iteration 2" in str(error)):
                faults.append(f"{where}: {error}")
        sound = verify(os.path.join(root, "iteration_00000001"), read_data=True)
        faults += [f"{where}: {p.what}" for p in sound.problems]
        for name in filled:
            os.unlink(name)
        run.update("B")
        checkpointer.save(Progress(3, 12, 4))
    other = Run()
    with other.checkpointer(root, None, False, 2) as checkpointer:
        checkpointer.load()
    if other.digest() != Run.after("ABB").digest():
        faults.append(f"{where}: resumed {other.word.text!r}")
    faults += [f"{where}: {p.what}" for p in verify(root, read_data=True).problems]
    faults += [f"{where}: left over: {n}" for n in os.listdir(root) if n.startswith(".")]
    shutil.rmtree(root)
    return faults


def refused(path: str) -> list[str]:
    """A save that is asked to fit first is refused before a byte is written."""
    root = os.path.join(path, "root")
    run = Run()
    with run.checkpointer(root, None, False, 2) as checkpointer:
        checkpointer.load()
        run.update("A")
        figures = os.statvfs(path)
        try:
            checkpointer.save(Progress(1, 4, 4))
        except SaveError as error:
            free = f"where {figures.f_bavail * figures.f_frsize} are free"
            return [] if free in str(error) and "step 1 needs" in str(error) else [str(error)]
    return ["a save that does not fit was not refused"]


def main(path: str) -> dict[str, object]:
    options = f"size={ROOM},nr_inodes={NAMES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    faults = refused(path)
    counts: Counter[str] = Counter()
    for background in (False, True):
        for left in range(0, 80_000, 8192):
            faults += attempt(path, "bytes", left, background, counts)
        for left in range(0, 10, 2):
            faults += attempt(path, "names", left, background, counts)
    return {"faults": faults, **counts}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
