"""Kills real jobs of one or two ranks at random times while they do nothing but update and save, and resumes them.

Run as a program, which loads torch once and forks every rank: `python -m tests.crash.sigkill RANKS sync|async TRIES
SEED`. Prints {"kills", "saved", "rewinds", "stubborn", "faults"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import IO

import torch.distributed as dist
from tests.crash.engine_run import Run, rewind, train

from perdure import Progress
from perdure.catalog.root import Root
from perdure.catalog.verify import verify

WINDOW_S = 0.5
PATIENCE_S = 30.0
LONGEST = 400


@dataclass
class Rank:
    """A forked rank; rank 0 says a line for each thing that is certain."""

    process: int
    lines: IO[str]


@dataclass
class Start:
    """One start of a job, and where its ranks meet: at a store that outlives them, as a launcher's does."""

    path: str
    ranks: int
    letter: str
    background: bool
    number: int
    port: int


@contextlib.contextmanager
def serve() -> Iterator[int]:
    """A store in a process of its own, since its threads would not survive in the ranks that are forked here."""
    program = (
        "import sys, torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.kill()


def job(this: Start, rank: int, say: Callable[[str], None]) -> None:
    """Resumes and saves after every update, until it is killed. `say` gets the length of what is surely saved."""
    path, letter, background = this.path, this.letter, this.background
    if this.ranks > 1:
        patience = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", this.port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
        own = dist.PrefixStore(str(this.number), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=this.ranks, timeout=patience)
    run = Run()
    with run.checkpointer(path, None, background, 3) as checkpointer:
        checkpointer.load()
        word = run.word.text
        if run.digest() != Run.after(word).digest():
            say(f"fault: what was resumed as {word!r} is another state")
        say(f"loaded {word}")
        while len(run.word.text) < LONGEST:
            run.update(letter)
            done = len(run.word.text)
            checkpointer.save(Progress(done, 4 * done, 4))
            # A background save is certain when the next one has waited for it.
            say(f"saved {done - background}")


def start(this: Start) -> list[Rank]:
    """Forks the ranks of a job."""
    found = []
    for rank in range(this.ranks):
        receiver, sender = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            process = os.fork()
        if process == 0:
            os.close(receiver)
            with os.fdopen(sender, "w", buffering=1) as pipe:
                try:
                    job(this, rank, lambda line: print(line, file=pipe))
                except BaseException as error:
                    print(f"raised {type(error).__name__}: {error}".replace("\n", " "), file=pipe)
            os._exit(1)
        os.close(sender)
        found.append(Rank(process, os.fdopen(receiver)))
    return found


def end(jobs: list[Rank], victims: list[int]) -> tuple[list[str], int]:
    """Kills the victims at once, and waits for the others.

    Gives what rank 0 said since it had loaded, and how many ranks did not end by themselves.
    """
    for victim in victims:
        os.kill(jobs[victim].process, signal.SIGKILL)
    deadline, stubborn = time.monotonic() + PATIENCE_S, 0
    # All are looked after at once: one that was killed but not yet waited for counts as living.
    living = {each.process for each in jobs}
    while living:
        living -= {process for process in living if os.waitpid(process, os.WNOHANG)[0]}
        if living and time.monotonic() > deadline:
            stubborn += len(living)
            for process in living:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            break
        time.sleep(0.01)
    lines = jobs[0].lines.read().splitlines()
    for each in jobs:
        each.lines.close()
    return lines, stubborn


def chain(ranks: int, background: bool, tries: int, draw: random.Random) -> dict[str, object]:
    """One root through many kills, now and then rewound, so that saves overwrite too."""
    faults: list[str] = []
    saved = rewinds = stubborn = 0
    word = ""
    with tempfile.TemporaryDirectory() as folder, serve() as port:
        path = os.path.join(folder, "root")
        train(path, "A")
        word = "A"
        for number in range(tries):
            if draw.random() < 0.4 and len(word) > 2 and (old := Root(path).find(len(word) - 1)) is not None:
                rewinds += 1
                rewind(path, old.iteration)
                word = word[:-1]
            letter = draw.choice("ABC")
            jobs = start(Start(path, ranks, letter, background, number, port))
            first = jobs[0].lines.readline().strip()
            where = f"kill {number}"
            if not first.startswith("loaded ") or not first[7:].startswith(word):
                faults.append(f"{where}: expected to resume at least {word!r}, got {first!r}")
            resumed = first[7:] if first.startswith("loaded ") else word
            time.sleep(draw.random() * WINDOW_S)
            victims = draw.choice([list(range(ranks)), *([n] for n in range(ranks))])
            lines, late = end(jobs, victims)
            stubborn += late
            faults += [f"{where}: {line}" for line in lines if line.startswith("fault")]
            certain = [int(line[6:]) for line in lines if line.startswith("saved ")]
            length = max([*certain, len(resumed)])
            saved += len(certain)
            word = resumed + letter * (length - len(resumed))
        last = Run()
        with last.checkpointer(path, None, background, 3) as checkpointer:
            checkpointer.load()
            found = last.word.text
            if not found.startswith(word) or last.digest() != Run.after(found).digest():
                faults.append(f"at the end: expected at least {word!r}, got {found!r}")
        faults += [f"left over: {name}" for name in os.listdir(path) if name.startswith(".")]
        faults += [p.what for p in verify(path, read_data=True).problems]
    return {"kills": tries, "saved": saved, "rewinds": rewinds, "stubborn": stubborn, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(chain(int(sys.argv[1]), sys.argv[2] == "async", int(sys.argv[3]), random.Random(sys.argv[4]))))
