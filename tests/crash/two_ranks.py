"""Two ranks, their parameters sharded: a disk that fails one of them, and bits that only one of them reads.

Run as a program, which loads torch once and forks every rank: `python -m tests.crash.two_ranks`. Prints a JSON list of
what is wrong, and a count of what was tried.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist
from tests.crash.engine_run import Run, train
from tests.crash.flips import flipped, places
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from perdure import Progress
from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import SaveError
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage

DEADLINE_S = 150


class Sharded(Run):
    """The same run, its parameters cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def update(self, letter: str) -> None:
        generator = torch.Generator().manual_seed(1000 * len(self.word.text) + ord(letter))
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        self.optimizer.step()
        self.word.text += letter
        self.word.mean = self.word.mean * 0.5 + self.whole(self.model.bias.detach())[:3]

    def whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value


def job(work: Callable[[int], list[str]], folder: str, ranks: int = 2) -> list[list[str]]:
    """Runs `work` on forked ranks; what each gives, or raised."""
    store = tempfile.mktemp(dir=folder)
    pipes = []
    for rank in range(ranks):
        receiver, sender = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os.close(receiver)
            # Whoever hangs ends with the place where it did on stderr.
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
                )
                told = work(rank)
            except BaseException as error:
                told = [f"raised {type(error).__name__}: {error}"]
            with os.fdopen(sender, "w") as pipe:
                json.dump(told, pipe)
            os._exit(0)
        os.close(sender)
        pipes.append((child, os.fdopen(receiver)))
    found = []
    for child, pipe in pipes:
        text = pipe.read()
        pipe.close()
        os.waitpid(child, 0)
        found.append(json.loads(text) if text else ["died without a word"])
    return found


def resumed(path: str, kind: Callable[[], Run] = Sharded) -> list[str]:
    """The word and the digest that a load gives."""
    run = kind()
    with run.checkpointer(path, None, False, 9) as checkpointer:
        checkpointer.load()
    return [run.word.text, run.digest()]


def saves(path: str, word: str) -> list[str]:
    run = Sharded()
    with run.checkpointer(path, None, False, 9) as checkpointer:
        checkpointer.load()
        for letter in word[len(run.word.text) :]:
            run.update(letter)
            done = len(run.word.text)
            checkpointer.save(Progress(done, 4 * done, 4))
    return []


def failing(path: str, victim: int, operation: str, code: int, background: bool, rank: int) -> list[str]:
    """A save whose files one rank cannot write; then one that it can. Gives the error's text, or what is wrong."""
    broken = [False]

    def ours(name: str, where: str) -> bool:
        return broken[0] and rank == victim and name == operation and where.endswith(".safetensors")

    run = Sharded()
    storage = FaultStorage(LocalStorage(), at=1, action="raise", code=code, only=ours)
    told = "no error"
    with run.checkpointer(path, storage, background, 9) as checkpointer:
        checkpointer.load()
        run.update("B")
        broken[0] = True
        try:
            checkpointer.save(Progress(2, 8, 4))
            checkpointer.wait()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        broken[0] = False
        run.update("B")
        checkpointer.save(Progress(3, 12, 4))
    return [told]


def main() -> dict[str, object]:
    wrong: list[str] = []
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        one, two, path = (os.path.join(folder, name) for name in ("one", "two", "root"))
        train(one, "AA")
        wrong += [line for lines in job(lambda rank: saves(two, "AA"), folder) for line in lines]
        truth = {word: Run.after(word).digest() for word in ("A", "AA", "ABB")}
        for victim, operation, code, background in product(
            (0, 1), ("create", "finish"), (errno.ENOSPC, errno.EIO), (False, True)
        ):
            tried += 1
            shutil.copytree(two, path)
            shutil.rmtree(os.path.join(path, "iteration_00000002"))
            with open(os.path.join(path, "latest_checkpointed_iteration.txt"), "w", encoding="ascii") as file:
                file.write("1")
            where = f"rank {victim}, {operation}, {os.strerror(code)}, {'async' if background else 'sync'}"
            told = job(lambda rank: failing(path, victim, operation, code, background, rank), folder)  # noqa: B023
            for rank, lines in enumerate(told):
                text = " ".join(lines)
                sound = "step 2" in text and os.strerror(code) in text and f"{victim:07d}-0000002.safetensors" in text
                if not sound or not text.startswith((SaveError.__name__, "RanksError")):
                    wrong.append(f"{where}: on rank {rank}: {text}")
            wrong += [f"{where}: {p.what}" for p in verify(path, read_data=True).problems]
            if resumed(path, Run) != ["ABB", truth["ABB"]]:
                wrong.append(f"{where}: resumed {resumed(path, Run)}")
            shutil.rmtree(path)
        for source, ranks in product((one, two), (1, 2)):
            spots = places(Root(source), "iteration_00000002")
            for name, runs in spots.items():
                if not name.endswith(".safetensors"):
                    continue
                # The first and the last byte of a file's data: they go to different ranks where it is resharded.
                for byte in (runs[0][0], runs[-1][0] - 1):
                    tried += 1
                    shutil.copytree(source, path)
                    where = f"{os.path.basename(source)} -> {ranks} ranks, {name}, byte {byte}"
                    with flipped(os.path.join(path, "iteration_00000002", name), byte * 8 + 3):
                        if ranks == 1:
                            found = [resumed(path, Run)]
                        else:
                            found = job(lambda rank: resumed(path), folder)
                        wrong += [f"{where}: {text}" for text in found if text != ["A", truth["A"]]]
                        events = [e["event"] for e in read_events(Root(path))]
                        if events.count("damage") != 1 or events.count("fallback") != 1:
                            wrong.append(f"{where}: {events}")
                    shutil.rmtree(path)
    return {"wrong": wrong, "tried": tried}


if __name__ == "__main__":
    print(json.dumps(main()))
