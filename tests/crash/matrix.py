"""Runs every sweep in full and writes what was tried and lost: `python -m tests.crash.matrix PAGE`.

Counts follow from the program's operations alone, so that the page is the same on every machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.crash.tally import HOWS, Tally

HERE = Path(__file__).resolve().parents[2]
STORAGE = ("first", "next-with-retention", "overwrite", "overwrite-without-exchange", "clean-up", "rewind")
PARTS = 3
TITLES = {
    "kill-before": "killed before",
    "kill-within": "killed within",
    "kill-after": "killed after",
    "dropped": "power cut, dropped",
    "deleted": "power cut, deleted",
    "names-only": "power cut, names only",
    "torn": "power cut, torn",
}
OPERATIONS = {
    "make_directory": "mkdir",
    "create": "open a new file, with room",
    "pwrite": "write",
    "finish": "cut to size, fsync, close",
    "write": "small file: open, write, fsync",
    "append": "append a line",
    "link": "link a file of the save before",
    "rename": "rename",
    "exchange": "exchange two names",
    "unlink": "unlink",
    "remove_directory": "rmdir",
    "sync_directory": "fsync of a directory",
    "end": "(after the last)",
}
HEAD = """\
# Crash matrix

Written by `make crash-matrix`, which makes every one of these tries; a plain `make test` makes a sample of them.
Each cell is *lost / tried*: how often, after a process or a machine had stopped there, something was not as
[Files on disk](format.md) promises it, out of how many tries.

A try is one stop at one storage operation. **Killed** means SIGKILL before the operation, in the middle of its bytes,
or just after it. A **power cut** comes before the operation and takes with it what was not yet synced. What survives
is tried in four views: *dropped*, nothing of it; *deleted*, deletions alone; *names only*, every change of names but
no bytes; *torn*, names and half of the bytes.

After each stop a new process must find a committed iteration, and the right one: never one older than the tracker's
last durable move. On the paths of the engine it must load it equal in every bit to a run that was never stopped, model,
optimizer and registered object; do the interrupted work again; go on; and leave a root with nothing left over, whose
iterations, tracker and tensors are those of the undisturbed run, with every byte verified.

Paths: **storage** is the catalog alone (stage, write, publish, retain), **sync** and **async** are whole runs of the
`Checkpointer` with the save in the training step and in the background.
"""


FLIPS = """\
## Flipped bits

Every bit of every file of one committed iteration is flipped, one at a time, and `perdure verify --read-data` is asked.
A bit counts as found when its file is named, and, where it lies in a tensor's data, its tensor.
"""


def run(arguments: Sequence[str]) -> str:
    """What a sweep in a process of its own prints."""
    path = os.pathsep.join([str(HERE / "src"), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return done.stdout


def engine_part(path: str, part: int) -> Tally:
    """A part of the engine's scenarios on one path."""
    return Tally.decode(run(["tests.crash.engine_sweep", "--path", path, "--part", f"{part + 1}/{PARTS}"]))


def storage() -> Tally:
    """The catalog's sweep, kills and power cuts."""
    whole = Tally()
    for scenario in STORAGE:
        for how in ("kill", "power"):
            one = Tally.decode(run(["tests.crash.storage_sweep", scenario, how]))
            if how == "power":
                one.operations.clear()
            whole.add(one)
    return whole


def page(paths: dict[str, Tally], flips: dict[str, Any]) -> str:
    """The whole page, from the counts of each path and of flipped bits."""
    whole = Tally()
    for tally in paths.values():
        whole.add(tally)
    lines = [HEAD, f"**{whole.tried.total()} tries, {whole.lost.total()} lost.**", ""]
    for name, tally in paths.items():
        lines += [f"## By operation: {name}", ""]
        known = [o for o in OPERATIONS if any(key[1] == o for key in tally.tried)]
        lines += _table("operation", known, lambda o: OPERATIONS[o], tally, lambda key: key[1])
    for name, tally in paths.items():
        lines += [f"## By scenario: {name}", ""]
        shown = {s: f"{s.partition(' (')[0]}: {n} operations" for s, n in tally.operations.items()}
        lines += _table("scenario", list(shown), shown.__getitem__, tally, lambda key: key[0])
    found, tried = sum(flips["found"].values()), sum(flips["tried"].values())
    lines += [
        FLIPS,
        f"**{tried} bits flipped, {found} found.**",
        "",
        "| place | flipped | found |",
        "| --- | ---: | ---: |",
    ]
    lines += [f"| {kind} | {count} | {flips['found'].get(kind, 0)} |" for kind, count in sorted(flips["tried"].items())]
    return "\n".join(lines).rstrip() + "\n"


def _table(
    title: str,
    rows: Iterable[str],
    shown: Callable[[str], str],
    tally: Tally,
    of: Callable[[tuple[str, str, str]], str],
) -> list[str]:
    def cell(row: str | None, how: str) -> str:
        keys = [k for k in tally.tried if k[2] == how and (row is None or of(k) == row)]
        tried = sum(tally.tried[k] for k in keys)
        return f"{sum(tally.lost[k] for k in keys)} / {tried}" if tried else "-"

    lines = [f"| {title} | {' | '.join(TITLES[h] for h in HOWS)} |", "| --- |" + " ---: |" * len(HOWS)]
    lines += [f"| {shown(r)} | {' | '.join(cell(r, h) for h in HOWS)} |" for r in rows]
    return [*lines, f"| **all** | {' | '.join(cell(None, h) for h in HOWS)} |", ""]


def main(target: str) -> int:
    """Writes the page; 1 if anything was lost."""
    # What takes long in each of them is waiting: for forks, and for a processor that is shared.
    with ThreadPoolExecutor(8) as pool:
        engine = {name: [pool.submit(engine_part, name, part) for part in range(PARTS)] for name in ("sync", "async")}
        bits, catalog = pool.submit(run, ["tests.crash.flips"]), pool.submit(storage)
        paths = {"storage": catalog.result()}
        for name, jobs in engine.items():
            paths[name] = Tally()
            for job in jobs:
                paths[name].add(job.result())
        flips = json.loads(bits.result())
    faults = [*flips["missed"], *(fault for tally in paths.values() for fault in tally.faults)]
    for fault in faults:
        print(fault, file=sys.stderr)
    Path(target).write_text(page(paths, flips), encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
