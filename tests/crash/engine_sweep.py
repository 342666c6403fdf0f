"""Kills whole runs of the engine, synchronous and asynchronous, at every storage operation, and resumes them.

Run as a program, which loads torch once and forks for every try:
`python -m tests.crash.engine_sweep [--every N] [--path PATH] [--part I/N] [SCENARIO ...]` prints a tally.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol

from tests.crash.disk import VIEWS, Disk, View
from tests.crash.engine_run import Run, content, go_back, rewind, train
from tests.crash.storage_sweep import NoExchange
from tests.crash.tally import WITHIN, Tally, forked

from perdure.catalog.publish import stage
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.format.names import TRACKER
from perdure.storage.base import Storage
from perdure.storage.faults import Action, FaultStorage
from perdure.storage.local import LocalStorage

PATHS = ("sync", "async")
# Where what must reach the platter does so at once; the real fsync has its turn in the other tests.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Work(Protocol):
    """What is cut off."""

    def __call__(self, path: str, *, storage: Storage | None, background: bool) -> None: ...


@dataclass(frozen=True)
class Scenario:
    """A root, the work on it, and the truths in their order.

    Attributes:
        base: builds the root.
        work: what is cut off, and done again after.
        truths: words that a resume may find: that of the base, then one for each move of the tracker.
        storage: where bytes live.
        save_max: of the work.
        numbered: the step number of a word.
        sound: whether the base holds no damage.
        frozen: whether half of the weights are never trained.
    """

    base: Callable[[str], None]
    work: Work
    truths: tuple[str, ...]
    storage: type[LocalStorage] = LocalStorage
    save_max: int = 9
    numbered: Callable[[str], int] = len
    sound: bool = True
    frozen: bool = False


def nothing(path: str) -> None:
    os.mkdir(path)


def to(word: str) -> Callable[[str], None]:
    return partial(train, to=word)


def same_step(word: str) -> int:
    """As after a change of the batch size: the third update is step 2 once more."""
    return len(word) - (len(word) > 2)


def rewound(path: str) -> None:
    """Three iterations, the tracker back at the first."""
    train(path, "AAA")
    rewind(path, 1)


def dirty(path: str) -> None:
    """Leftovers of every kind; one of two sound iterations waits under its replaced name, and an event is torn."""
    train(path, "AA")
    root = Root(path)
    os.rename(root.join("iteration_00000001"), root.join(".iteration_00000001.replaced-1"))
    shutil.copytree(root.join("iteration_00000002"), root.join(".iteration_00000002.replaced-2"))
    shutil.copytree(root.join("iteration_00000002"), root.join(".iteration_00000005.removed-9"))
    with open(os.path.join(stage(root, 3, "0c", 3).path, "checkpoint-model-0000000-0000001.safetensors"), "wb") as file:
        file.write(b"half a file")
    for name, text in ((f".{TRACKER}.tmp", "3"), ("events.jsonl", '{"time":1,"eve')):
        with open(root.join(name), "a", encoding="ascii") as file:
            file.write(text)


def damaged(path: str) -> None:
    """Two iterations, a bit of the newer one flipped."""
    train(path, "AA")
    file = os.path.join(path, "iteration_00000002", "checkpoint-model-0000000-0000001.safetensors")
    with open(file, "r+b") as shard:
        shard.seek(-3, os.SEEK_END)
        byte = shard.read(1)[0]
        shard.seek(-3, os.SEEK_END)
        shard.write(bytes([byte ^ 4]))


def rewind_and_train(path: str, *, storage: Storage | None, background: bool) -> None:
    rewind(path, 1, storage)
    train(path, "AB", storage=storage, background=background)


def go_back_and_train(path: str, *, storage: Storage | None, background: bool) -> None:
    """What a run does whose health failed: back to the first checkpoint by itself, and on from there."""
    go_back(path, 4, storage=storage, background=background)
    train(path, "AB", storage=storage, background=background)


SCENARIOS: dict[str, Scenario] = {
    "first saves": Scenario(nothing, partial(train, to="AA"), ("", "A", "AA")),
    "next save, two kept": Scenario(to("AA"), partial(train, to="AAA", save_max=2), ("AA", "AAA"), save_max=2),
    "next save, one kept": Scenario(to("A"), partial(train, to="AA", save_max=1), ("A", "AA"), save_max=1),
    "overwrite after a rewind": Scenario(rewound, partial(train, to="ABB"), ("A", "AB", "ABB")),
    "overwrite, no exchange": Scenario(rewound, partial(train, to="AB"), ("A", "AB"), NoExchange),
    "overwrite the tracked one": Scenario(
        to("AA"),
        partial(train, to="AAC", numbered=same_step),
        ("AA", "AAC"),
        numbered=same_step,
    ),
    "rewind": Scenario(to("AA"), rewind_and_train, ("AA", "A", "AB")),
    "going back by itself": Scenario(to("AAA"), go_back_and_train, ("AAA", "A", "AB")),
    "clean-up at the start": Scenario(dirty, partial(train, to="AAA"), ("AA", "AAA")),
    "fallback from damage": Scenario(damaged, partial(train, to="AB"), ("A", "AB"), sound=False),
    "linked frozen weights": Scenario(
        partial(train, to="AA", frozen=True),
        partial(train, to="AAA", save_max=2, frozen=True),
        ("AA", "AAA"),
        save_max=2,
        frozen=True,
    ),
}


class Machine(Disk):
    """A disk whose power goes with the process: what each view finds is left in a folder of its name."""

    def __init__(self, base: str, path: str, cut: int, exchanges: bool) -> None:
        super().__init__(base, at=path, cut=cut, exchanges=exchanges)
        self._path = path

    def power_off(self) -> None:
        for view in VIEWS:
            os.mkdir(f"{self._path}.{view}")
            self.materialise(f"{self._path}.{view}", view)
        os._exit(0)


@dataclass
class Sweep:
    """One scenario on one path."""

    name: str
    background: bool
    folder: str

    def __post_init__(self) -> None:
        self.scenario = SCENARIOS[self.name]
        os.mkdir(self.folder)
        self.base, self.path = os.path.join(self.folder, "base"), os.path.join(self.folder, "root")
        _well(lambda: self.scenario.base(self.base))
        self.operations = self._logged(lambda: FaultStorage(self.scenario.storage()))
        self.switches = self._logged(lambda: self._machine(0))
        shutil.copytree(self.base, self.path)
        self.wanted = _well(lambda: self.finish(self.path))
        # An undisturbed end is itself a sound one.
        assert not verify(self.path, read_data=True).problems
        shutil.rmtree(self.path)

    def work(self, storage: Storage | None = None) -> None:
        self.scenario.work(self.path, storage=storage or self.scenario.storage(), background=self.background)

    def finish(self, path: str) -> list[str]:
        """What is cut off, done again, and one update more, so that what is late has its turn."""
        scenario = self.scenario
        scenario.work(path, storage=scenario.storage(), background=self.background)
        train(
            path,
            scenario.truths[-1] + "Z",
            storage=scenario.storage(),
            background=self.background,
            save_max=scenario.save_max,
            numbered=scenario.numbered,
            frozen=scenario.frozen,
        )
        return content(path)

    def kill(self, number: int, action: Action) -> list[str]:
        """Faults after a kill at one operation."""
        shutil.copytree(self.base, self.path)
        code, said = forked(lambda: self.work(FaultStorage(self.scenario.storage(), at=number, action=action)))
        faults = [] if code == -signal.SIGKILL else [f"the process was not killed: {code} {said}"]
        moves = _moves(self.operations[: number - (action != "kill-after")])
        faults += inspected([partial(self.inspect, self.path, moves)])[0]
        shutil.rmtree(self.path)
        return faults

    def cut(self, number: int) -> Iterator[tuple[View, list[str]]]:
        """Faults after a power cut before one operation, view by view."""
        os.mkdir(self.path)
        code, said = forked(lambda: self.work(self._machine(number)))
        shutil.rmtree(self.path)
        moves = _moves(self.switches[: number - 1], synced=True)
        if code != 0 or not os.path.isdir(f"{self.path}.{VIEWS[-1]}"):
            yield VIEWS[0], [f"the power was not cut: {code} {said}"]
            return
        views = [partial(self.inspect, f"{self.path}.{view}", moves) for view in VIEWS]
        for view, faults in zip(VIEWS, inspected(views), strict=True):
            shutil.rmtree(f"{self.path}.{view}")
            yield view, faults

    def inspect(self, path: str, moves: int) -> list[str]:
        """Resumes a root, then does the work again and goes on. Gives what is wrong."""
        allowed = self.scenario.truths[moves : moves + 2]
        faults: list[str] = []
        run = Run(self.scenario.frozen)
        with run.checkpointer(path, self.scenario.storage(), self.background, self.scenario.save_max) as opened:
            opened.load()
            word = run.word.text
            if word not in allowed:
                faults.append(f"resumed {word!r}, expected one of {allowed}")
            if run.digest() != Run.after(word, self.scenario.frozen).digest():
                faults.append(f"what was resumed as {word!r} is another state")
        faults += [f"left over: {name}" for name in os.listdir(path) if name.startswith(".")]
        if self.scenario.sound and Root(path).iterations():
            faults += [p.what for p in verify(path, read_data=True).problems]
        found = self.finish(path)
        if found != self.wanted:
            faults.append(f"the run ended in {found}, not in {self.wanted}")
        return faults + [p.what for p in verify(path, read_data=True).problems]

    def _machine(self, cut: int) -> Machine:
        return Machine(self.base, self.path, cut, self.scenario.storage is LocalStorage)

    def _logged(self, make: Callable[[], FaultStorage | Machine]) -> list[tuple[str, str]]:
        """The operations of an undisturbed run of the work."""
        shutil.copytree(self.base, self.path)

        def whole() -> list[str]:
            storage = make()
            self.work(storage)
            return [part for operation in storage.log for part in operation]

        flat = _well(whole)
        shutil.rmtree(self.path)
        return list(zip(flat[::2], flat[1::2], strict=True))


def inspected(looks: Sequence[Callable[[], list[str]]]) -> list[list[str]]:
    """What each look finds, all of them in one new process; an error that one raises is what it finds."""

    def all_of_them() -> list[str]:
        found = []
        for look in looks:
            try:
                found.append(json.dumps(look()))
            except BaseException:
                found.append(json.dumps([traceback.format_exc()]))
        return found

    code, lines = forked(all_of_them)
    return [json.loads(line) for line in lines] if code == 0 else [[f"status {code}", *lines]] * len(looks)


def sweep(names: Sequence[str], every: int = 1, paths: Sequence[str] = PATHS) -> Tally:
    """Every operation of the scenarios on these paths; or each `every`-th try, of each scenario on one of them."""
    tally, turn = Tally(), 0
    all_of_them = product(enumerate(names), enumerate(paths))
    chosen = [(name, path) for (n, name), (p, path) in all_of_them if every == 1 or n % len(paths) == p]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        # Once through everything, with no thread left, so that no fork has to import what torch imports on use.
        for word in ("A", "AA"):
            train(os.path.join(folder, "warm"), word)
        for name, path in chosen:
            run = Sweep(name, path == "async", os.path.join(folder, f"{turn}"))
            key = f"{name} ({path})"
            tally.operations[key] = len(run.operations)
            actions: tuple[Action, ...] = ("kill-before", "kill-within", "kill-after")
            for number, (operation, _) in enumerate(run.operations, 1):
                for action in actions:
                    if action != "kill-within" or operation in WITHIN:
                        turn += 1
                        if turn % every == 0:
                            tally.note((key, operation, action), number, run.kill(number, action))
            for number, (operation, _) in enumerate(run.switches, 1):
                turn += 1
                if turn % every == 0:
                    for view, faults in run.cut(number):
                        tally.note((key, operation, view), number, faults)
    return tally


def _moves(operations: Sequence[tuple[str, str]], synced: bool = False) -> int:
    """How often the tracker was moved in these operations; `synced`: and its directory synced after."""
    moved = done = 0
    for name, path in operations:
        moved += name == "rename" and os.path.basename(path) == TRACKER
        if name == "sync_directory":
            done = moved
    return done if synced else moved


def _well(work: Callable[[], list[str] | None]) -> list[str]:
    """The lines of a fork that must not fail."""
    code, lines = forked(work)
    if code != 0:
        raise RuntimeError("\n".join(lines))
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("scenarios", nargs="*", default=[])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--path", choices=PATHS)
    parser.add_argument("--part", default="1/1")
    given = parser.parse_args()
    # Background saves leave the processor to training; here nobody trains, and everybody would wait for them.
    os.setpriority = lambda which, who, priority: None
    paths = PATHS if given.path is None else (given.path,)
    part, parts = map(int, given.part.split("/"))
    print(sweep((given.scenarios or list(SCENARIOS))[part - 1 :: parts], given.every, paths).encode())
