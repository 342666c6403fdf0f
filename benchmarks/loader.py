"""Batches per second against torch's DataLoader with the same settings: samples that draw and samples that don't.

python benchmarks/loader.py
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from perdure import ResumableLoader

BATCH, STEPS, ROUNDS = 16, 1000, 5


class Plain(Dataset[torch.Tensor]):
    """65 tokens a sample, from memory."""

    def __init__(self) -> None:
        self.tokens = torch.arange(1 << 16)

    def __len__(self) -> int:
        return 1000 * BATCH * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index % 60000
        return self.tokens[start : start + 65]


class Noisy(Plain):
    """The same with noise from torch's stream."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.randint(0, 2, (65,))


class Masked(Plain):
    """The same with draws from Python's and numpy's streams."""

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = super().__getitem__(index).clone()
        tokens[int(np.random.randint(65))] = random.randrange(256)
        return tokens


def ours(dataset: Plain, workers: int) -> Iterator[Any]:
    with ResumableLoader(dataset, global_batch_size=BATCH, num_workers=workers, prefetch=2, seed=1) as loader:
        for step in loader.take():
            yield step.micro_batches[0].data


def torchs(dataset: Plain, workers: int) -> Iterator[Any]:
    yield from DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)


def cost_per_batch(make: Callable[[Plain, int], Iterator[Any]], dataset: Plain, workers: int) -> tuple[float, float]:
    """Seconds of the clock, and of all processors, workers and their start included."""
    before = processor_seconds()
    batches = make(dataset, workers)
    for _ in range(50):
        next(batches)
    began = time.perf_counter()
    for _ in range(STEPS):
        next(batches)
    spent = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return spent / STEPS, (processor_seconds() - before) / (STEPS + 50)


def processor_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    print(f"{'samples':8s} {'workers':>7s} {'perdure':>10s} {'torch':>10s} {'ratio':>6s} {'processors':>10s}")
    for workers in (0, 1, 2):
        for kind in (Plain, Noisy, Masked):
            # torch draws its order as one list up front, so its data set is kept short.
            short = kind()
            short.__class__ = type(kind.__name__, (kind,), {"__len__": lambda self: BATCH * (STEPS + 100)})
            mine, theirs = [], []
            for _ in range(ROUNDS):
                mine.append(cost_per_batch(ours, kind(), workers))
                theirs.append(cost_per_batch(torchs, short, workers))
            wall = [statistics.median(run[0] for run in runs) for runs in (mine, theirs)]
            busy = [statistics.median(run[1] for run in runs) for runs in (mine, theirs)]
            results[f"{kind.__name__}, {workers} workers"] = {
                "perdure_s": wall[0],
                "torch_s": wall[1],
                "perdure_processor_s": busy[0],
                "torch_processor_s": busy[1],
            }
            print(
                f"{kind.__name__:8s} {workers:7d} {wall[0] * 1e6:8.1f}µs {wall[1] * 1e6:8.1f}µs "
                f"{wall[0] / wall[1]:6.2f} {busy[0] / busy[1]:10.2f}"
            )
    print(f"per batch of {BATCH}; processors: ratio of the processor time of all processes")
    target = Path(__file__).parent / "results" / "loader.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
