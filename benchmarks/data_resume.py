"""One epoch with interruptions and changes: samples repeated, samples missed, seconds to resume; against peers.

The chain: 8 ranks with batches of 64 and no worker; 4 ranks, 96, 2 workers; 5 ranks, 40, 5 workers, each
stopped where the next batch size does not divide the samples so far, on to the end of the epoch. Ranks are
loaders in one process, those of MosaicML Streaming processes of their own, since it talks between ranks.

python benchmarks/data_resume.py            peers that cannot be imported are named and left out
`make bench` installs all but mosaicml-streaming, which takes many packages with it: pip install mosaicml-streaming
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from perdure import ResumableLoader

LENGTH, SEED = 6000, 11


@dataclass(frozen=True)
class Phase:
    ranks: int
    batch: int
    workers: int
    steps: int | None  # None: to the end of the epoch

    @property
    def per_rank(self) -> int:
        return self.batch // self.ranks


PHASES = (Phase(8, 64, 0, 20), Phase(4, 96, 2, 17), Phase(5, 40, 5, None))


@dataclass
class Outcome:
    system: str
    seen: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    note: str = ""

    def row(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "repeated": sum(count - 1 for count in self.seen.values()),
            "missed": LENGTH - len(self.seen),
            "seconds_to_resume": max(self.seconds, default=0.0),
            "note": self.note,
        }


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


# ---- one rank's iterator of lists of ids, for each system


def perdure_rank(phase: Phase, rank: int, consumed: int) -> Iterator[list[int]]:
    loader = ResumableLoader(
        Numbers(),
        global_batch_size=phase.batch,
        seed=SEED,
        num_workers=phase.workers,
        rank=rank,
        ranks=phase.ranks,
    )
    loader.seek(consumed)
    with loader:
        for step in loader.take():
            micro = step.micro_batches[0]
            # What belongs to the next epoch is not of this one; the batch is whole all the same.
            yield [index for index, position in zip(micro.ids, micro.positions, strict=True) if position < LENGTH]
            if step.last >= LENGTH:
                return


def accelerate_rank(phase: Phase, rank: int, skipped: int) -> Iterator[list[int]]:
    from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader, skip_first_batches

    sampler = SeedableRandomSampler(Numbers(), generator=torch.Generator(), data_seed=SEED)
    loader: Any = DataLoader(Numbers(), batch_size=phase.per_rank, sampler=sampler, num_workers=phase.workers)
    loader = prepare_data_loader(
        loader, num_processes=phase.ranks, process_index=rank, put_on_device=False, rng_types=[], even_batches=False
    )
    for batch in skip_first_batches(loader, skipped) if skipped else loader:
        yield batch.tolist()


class TorchdataRank:
    """A rank's loader with its state; other ranks' states are tried where its own is not there."""

    def __init__(self, phase: Phase, rank: int, states: list[Any], workers: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(
            Numbers(), num_replicas=phase.ranks, rank=rank, shuffle=True, seed=SEED, drop_last=False
        )
        self.loader = StatefulDataLoader(Numbers(), batch_size=phase.per_rank, sampler=sampler, num_workers=workers)
        if states:
            self.loader.load_state_dict(states[rank % len(states)])

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.loader)


# ---- chains


def chain(outcome: Outcome, make: Callable[[Phase, int, int, int], Iterator[list[int]]]) -> Outcome:
    """`make(phase, rank, steps so far, samples so far)`; all ranks go on step by step."""
    steps = samples = 0
    for phase in PHASES:
        began = time.perf_counter()
        ranks = [make(phase, rank, steps, samples) for rank in range(phase.ranks)]
        done = 0
        while phase.steps is None or done < phase.steps:
            batches = [ids for rank in ranks if (ids := next(rank, None)) is not None]
            if done == 0:
                # The ranks wait for each other in this one process; a job's would not.
                outcome.seconds.append((time.perf_counter() - began) / phase.ranks)
            if not batches:
                break
            for ids in batches:
                outcome.seen.update(ids)
            done += 1
            samples += phase.batch
        steps += done
        for rank in ranks:
            rank.close()  # type: ignore[attr-defined]
    return outcome


def perdure() -> list[Outcome]:
    return [chain(Outcome("Perdure"), lambda phase, rank, steps, samples: perdure_rank(phase, rank, samples))]


def accelerate() -> list[Outcome]:
    by_step = Outcome("accelerate, as many steps skipped as were done (HF Trainer)")
    by_sample = Outcome("accelerate, samples so far // new batch size skipped")
    return [
        chain(by_step, lambda phase, rank, steps, samples: accelerate_rank(phase, rank, steps)),
        chain(by_sample, lambda phase, rank, steps, samples: accelerate_rank(phase, rank, samples // phase.batch)),
    ]


def torchdata() -> list[Outcome]:
    outcomes = []
    for workers in ("as in the chain", "0 throughout"):
        outcome = Outcome(f"torchdata StatefulDataLoader, workers {workers}")
        states: list[Any] = []
        try:
            for phase in PHASES:
                began = time.perf_counter()
                count = phase.workers if workers == "as in the chain" else 0
                ranks = [TorchdataRank(phase, rank, states, count) for rank in range(phase.ranks)]
                iterators, done = [iter(rank) for rank in ranks], 0
                while phase.steps is None or done < phase.steps:
                    batches = [ids for it in iterators if (ids := next(it, None)) is not None]
                    if done == 0:
                        outcome.seconds.append((time.perf_counter() - began) / phase.ranks)
                    if not batches:
                        break
                    for ids in batches:
                        outcome.seen.update(ids)
                    done += 1
                states = [rank.loader.state_dict() for rank in ranks]
        except Exception as error:
            outcome.note = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        outcomes.append(outcome)
    return outcomes


# ---- MosaicML Streaming: a process per rank

_STREAMING_RANK = """
import json, os, sys, time
from benchmarks_data_resume import without_torchvision
without_torchvision()
import torch.distributed as dist
from streaming import StreamingDataLoader, StreamingDataset
local, state_file, out, per_rank, workers, steps = sys.argv[1:]
began = time.perf_counter()
dataset = StreamingDataset(local=local, shuffle=True, shuffle_seed=11, batch_size=int(per_rank), shuffle_algo="py1s")
loader = StreamingDataLoader(dataset, batch_size=int(per_rank), num_workers=int(workers), drop_last=False)
if os.path.exists(state_file):
    loader.load_state_dict(json.load(open(state_file)))
ids, first, done = [], None, 0
for batch in loader:
    first = first or time.perf_counter() - began
    ids += [int(value) for value in batch["id"]]
    done += 1
    if done == int(steps):
        break
state = loader.state_dict()
json.dump({"ids": ids, "seconds": first or 0.0, "state": state}, open(f"{out}.{os.environ['RANK']}", "w"), default=int)
os._exit(0)
"""


def without_torchvision() -> None:
    """Streaming imports torchvision for its image data sets, which are not needed here."""
    with contextlib.suppress(Exception):
        importlib.import_module("torchvision")
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["torchvision.datasets"].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules["torchvision.transforms.functional"].to_tensor = None  # type: ignore[attr-defined]


def streaming() -> list[Outcome]:
    without_torchvision()
    from streaming import MDSWriter

    outcome = Outcome("MosaicML Streaming")
    with tempfile.TemporaryDirectory() as folder:
        local = str(Path(folder, "data"))
        with MDSWriter(out=local, columns={"id": "int"}, size_limit=1 << 14) as writer:
            for index in range(LENGTH):
                writer.write({"id": index})
        script = Path(folder, "rank.py")
        script.write_text(_STREAMING_RANK)
        Path(folder, "benchmarks_data_resume.py").symlink_to(Path(__file__).resolve())
        state_file = Path(folder, "state.json")
        for number, phase in enumerate(PHASES):
            out = Path(folder, f"phase{number}")
            words = [local, str(state_file), str(out), str(phase.per_rank), str(phase.workers), str(phase.steps or -1)]
            processes = []
            for rank in range(phase.ranks):
                places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": phase.ranks, "LOCAL_WORLD_SIZE": phase.ranks}
                environment = {**os.environ, **{key: str(value) for key, value in places.items()}}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29650 + number), "OMP_NUM_THREADS": "1"}
                environment["PYTHONPATH"] = os.pathsep.join([folder, *sys.path])
                command = [sys.executable, str(script), *words]
                processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
            errors = [process.communicate(timeout=600)[1] for process in processes]
            told = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(phase.ranks) if _there(out, rank)]
            if len(told) < phase.ranks:
                lines = [error.strip().splitlines()[-1] for error in errors if error.strip()]
                outcome.note = f"refused: {lines[0][:160] if lines else 'a rank died'}"
                break
            outcome.seconds.append(max(rank["seconds"] for rank in told))
            for rank in told:
                outcome.seen.update(rank["ids"])
            if told[0]["state"] is not None:
                state_file.write_text(json.dumps(told[0]["state"]))
    return [outcome]


def _there(out: Path, rank: int) -> bool:
    return Path(f"{out}.{rank}").exists()


PEERS: dict[str, tuple[str, Callable[[], list[Outcome]]]] = {
    "accelerate": ("accelerate.data_loader", accelerate),
    "torchdata": ("torchdata.stateful_dataloader", torchdata),
    "mosaicml-streaming": ("streaming", streaming),
}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes, versions, absent = perdure(), {}, {}
    for package, (module, run) in PEERS.items():
        try:
            if module == "streaming":
                without_torchvision()
            importlib.import_module(module)
        except Exception as error:
            absent[package] = f"{type(error).__name__}: {error}"
            continue
        versions[package] = importlib.metadata.version(package)
        outcomes += run()
    rows = [outcome.row() for outcome in outcomes]
    print(f"one epoch of {LENGTH} samples: ranks 8, 4, 5; batches 64, 96, 40; workers 0, 2, 5; stopped unaligned")
    print(f"{'system':62s} {'repeated':>8s} {'missed':>7s} {'resume':>9s}")
    for row in rows:
        refused = row["note"].startswith("refused")
        counts = ("-", "-") if refused else (row["repeated"], row["missed"])
        print(f"{row['system']:62s} {counts[0]:>8} {counts[1]:>7} {row['seconds_to_resume']:8.3f}s  {row['note']}")
    for package, why in absent.items():
        print(f"{package}: not here ({why})")
    target = Path(__file__).parent / "results" / "data_resume.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"rows": rows, "versions": versions, "absent": absent}, indent=1))


if __name__ == "__main__":
    main()
