"""Kills a save before and after each of its storage operations, or cuts the power there, and looks at what is found.

Run as a program, in a process of its own that never loads torch, so that forking is cheap and safe:
`python -m tests.crash.storage_sweep SCENARIO kill|power` prints a tally.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product

from tests.checkpoints import Tensor, build_checkpoint, floats, write_shards
from tests.crash.disk import VIEWS, Disk, PowerCut
from tests.crash.tally import WITHIN, Tally, forked

from perdure.catalog.choose import choose
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import recover, set_tracker, stage
from perdure.catalog.retention import keep, remove
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import CheckpointNotFoundError
from perdure.storage.base import Storage
from perdure.storage.faults import Action, FaultStorage
from perdure.storage.local import LocalStorage

LINEAGE = "a1b2c3d4"


class NoExchange(LocalStorage):
    """A file system that cannot swap two names."""

    def exchange(self, a: str, b: str) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), a)


def save(root: Root, iteration: int, sequence: int, parent: int, attempt: str = "0b") -> None:
    """A save as the engine makes it, retention to two iterations included."""
    state = {"model": {"w": floats(*map(float, range(sequence, sequence + 40)), shape=(5, 8))}}
    build_checkpoint(root, iteration, sequence=sequence, parent=parent, attempt=attempt, state=state)  # type: ignore[arg-type]
    verdicts = keep(root.iterations(), 2, lineage=LINEAGE, pinned={sequence: "just saved"})
    for old, verdict in verdicts.items():
        if verdict.remove:
            assert remove(root, old) == []


def base_empty(root: Root) -> None:
    pass


def base_two(root: Root) -> None:
    save(root, 10, 1, 0)
    save(root, 20, 2, 1)


def base_dirty(root: Root) -> None:
    """Leftovers of every kind beside two sound iterations, one of them waiting under its replaced name."""
    base_two(root)
    os.rename(root.join("iteration_00000010"), root.join(".iteration_00000010.replaced-1"))
    shutil.copytree(root.join("iteration_00000020"), root.join(".iteration_00000020.replaced-2"))
    shutil.copytree(root.join("iteration_00000020"), root.join(".iteration_00000005.removed-9"))
    staging = stage(root, 30, "0c", 3)
    write_shards(staging, f"{LINEAGE}-3", {"model": {"w": Tensor(b"abcd", (1,))}})
    for name in (".latest_checkpointed_iteration.txt.tmp",):
        with open(root.join(name), "w", encoding="ascii") as file:
            file.write("3")


def overwrite(root: Root) -> None:
    save(root, 20, 3, 1, attempt="0d")


SCENARIOS: dict[str, tuple[Callable[[Root], None], Callable[[Root], None], type[LocalStorage]]] = {
    "first": (base_empty, lambda root: save(root, 10, 1, 0), LocalStorage),
    "next-with-retention": (base_two, lambda root: save(root, 30, 3, 2), LocalStorage),
    "overwrite": (base_two, overwrite, LocalStorage),
    "overwrite-without-exchange": (base_two, overwrite, NoExchange),
    "clean-up": (base_dirty, lambda root: None, LocalStorage),
    "rewind": (base_two, lambda root: set_tracker(root, 10), LocalStorage),
}


def act(path: str, scenario: str, storage: Storage, locked: bool = True) -> None:
    """What the process does that is cut off: lock, clean up, save."""
    root = Root(path, storage)
    lock = RootLock.acquire(path, attempt="0e") if locked else None
    recover(root, "0e")
    SCENARIOS[scenario][1](root)
    if lock is not None:
        lock.release()


def state_of(root: Root) -> dict[str, str]:
    """Names and commit digests, and the tracker's text: what a run leaves, in short."""
    found = {i.dirname: i.commit.digest for i in root.iterations()}
    return found | {"tracker": root.tracker().text}


def faults_after(path: str, scenario: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What is wrong with a root that a killed process left."""
    found: list[str] = []
    kind = SCENARIOS[scenario][2]
    root = Root(path, kind())
    truths = {before["tracker"], after["tracker"]}
    try:
        chosen = choose(root).iteration
        if str(chosen.iteration) not in truths:
            found.append(f"chose {chosen.dirname}, expected one of {sorted(truths)}")
        known = {v for k, v in (before | after).items() if k != "tracker"} | set(before.values())
        found += [f"{i.dirname} is a mixture" for i in root.iterations() if i.commit.digest not in known]
        for iteration in root.iterations():
            if not iteration.dirname.startswith("."):
                found += [p.what for p in verify(iteration.path, read_data=True).problems]
    except CheckpointNotFoundError as error:
        if len(before) > 1:
            found.append(f"nothing is left: {error.message}")
    lock = RootLock.acquire(path, attempt="0f")
    told = recover(root, "0f")
    found += [line for line in told if line.startswith("warning")]
    found += [f"left over: {name}" for name in os.listdir(path) if name.startswith(".")]
    lock.release()
    # The same command once more must end where an undisturbed run ends.
    act(path, scenario, kind())
    if state_of(root) != after:
        found.append(f"the next run ended in {state_of(root)}, not in {after}")
    found += [p.what for p in verify(path, read_data=True).problems]
    return found


def sweep(scenario: str) -> Tally:
    """Every operation of a scenario, the process killed before it, in the middle of it, and after it."""
    kind = SCENARIOS[scenario][2]
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        base, before, after, operations = prepared(scenario, folder)
        tally.operations[scenario] = len(operations)
        actions: tuple[Action, ...] = ("kill-before", "kill-within", "kill-after")
        for number, action in product(range(1, len(operations) + 1), actions):
            operation = operations[number - 1][0]
            if action == "kill-within" and operation not in WITHIN:
                continue
            path = shutil.copytree(base, os.path.join(folder, "root"))
            storage = FaultStorage(kind(), at=number, action=action)
            code, said = forked(partial(act, path, scenario, storage))
            faults = faults_after(path, scenario, before, after)
            if code != -signal.SIGKILL:
                faults.append(f"the process was not killed: {code} {said}")
            tally.note((scenario, operation, action), number, faults)
            shutil.rmtree(path)
    return tally


def cut_power(scenario: str) -> Tally:
    """Every operation of a scenario, the power cut before it, with un-synced names and bytes lost or torn."""
    exchanges = SCENARIOS[scenario][2] is LocalStorage
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        base, before, after, _ = prepared(scenario, folder)
        whole = Disk(base, exchanges=exchanges)
        act("/", scenario, whole, locked=False)
        operations = [*(name for name, _ in whole.log), "end"]
        tally.operations[scenario] = len(operations) - 1
        for number, view in product(range(1, len(operations) + 1), VIEWS):
            disk = Disk(base, cut=number, exchanges=exchanges)
            with suppress(PowerCut):
                act("/", scenario, disk, locked=False)
            path = os.path.join(folder, "root")
            os.mkdir(path)
            disk.materialise(path, view)
            tally.note((scenario, operations[number - 1], view), number, faults_after(path, scenario, before, after))
            shutil.rmtree(path)
    return tally


def prepared(scenario: str, folder: str) -> tuple[str, dict[str, str], dict[str, str], list[tuple[str, str]]]:
    """The root before, in short and after an undisturbed run, and that run's operations."""
    build, _, kind = SCENARIOS[scenario]
    base = os.path.join(folder, "base")
    os.mkdir(base)
    build(Root(base))
    whole = shutil.copytree(base, os.path.join(folder, "whole"))
    counter = FaultStorage(kind())
    act(whole, scenario, counter)
    return base, state_of(Root(base)), state_of(Root(whole)), list(counter.log)


if __name__ == "__main__":
    print((sweep if sys.argv[2] == "kill" else cut_power)(sys.argv[1]).encode())
