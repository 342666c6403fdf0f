"""Seconds per batch against torch's DataLoader with the same settings.

First over data sets of one's own, whose samples draw random numbers, or do not but may; then over the sources that
come with Perdure, which never draw. What the first cost more without workers is the price of draws that depend on
the position alone, and of leaving the caller's streams as they are: `seeding_s` is the time of its parts.

python benchmarks/loader.py [own | sources]
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import struct
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from perdure import ResumableLoader
from perdure.data.mixture import Mixture
from perdure.data.packing import Packed
from perdure.data.sources.megatron import MegatronIndexed
from perdure.data.sources.text import Text
from perdure.data.sources.tokenfile import TokenFile

BATCH, STEPS, ROUNDS = 16, 1000, 5
SEQ_LENGTH = 512
SOURCE_STEPS = 300


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


def ours(dataset: Any, workers: int) -> Iterator[Any]:
    with ResumableLoader(dataset, global_batch_size=BATCH, num_workers=workers, prefetch=2, seed=1) as loader:
        for step in loader.take():
            yield step.micro_batches[0].data


def torchs(dataset: Any, workers: int) -> Iterator[Any]:
    # Like the loop above, it holds a batch while the next one is made.
    for batch in DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers):  # noqa: UP028
        yield batch


def cost_per_batch(
    make: Callable[[Any, int], Iterator[Any]], dataset: Any, workers: int, steps: int
) -> tuple[float, float]:
    """Seconds of the clock, and of all processors, workers and their start included."""
    before = processor_seconds()
    batches = make(dataset, workers)
    for _ in range(50):
        next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        next(batches)
    spent = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return spent / steps, (processor_seconds() - before) / (steps + 50)


def processor_seconds() -> float:
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in times)


def own_data_sets() -> Iterator[tuple[str, Any, Any, int]]:
    for kind in (Plain, Noisy, Masked):
        # torch draws its order as one list up front, so its data set is kept short.
        short = type(kind.__name__, (kind,), {"__len__": lambda self: BATCH * (STEPS + 100)})
        yield kind.__name__, kind(), short(), STEPS


def sources(folder: Path) -> Iterator[tuple[str, Any, Any, int]]:
    count = BATCH * SEQ_LENGTH * (SOURCE_STEPS + 100) + 1
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 50_000, count).astype("<u2")
    tokens.tofile(folder / "tokens.bin")
    tokens.tofile(folder / "pair.bin")
    lengths = draws.integers(50, 1500, count // 750).astype("<i4")
    lengths = lengths[np.cumsum(lengths) <= count]
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")]) * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    (folder / "pair.idx").write_bytes(head + lengths.tobytes() + offsets.astype("<i8").tobytes() + documents.tobytes())
    (folder / "text.txt").write_bytes(draws.integers(97, 123, count).astype(np.uint8).tobytes())
    token_file, pair = TokenFile(folder / "tokens.bin", SEQ_LENGTH), MegatronIndexed(folder / "pair", SEQ_LENGTH)
    for source in (
        token_file,
        pair,
        Text(folder / "text.txt", SEQ_LENGTH),
        Packed(pair, SEQ_LENGTH),
        Mixture([token_file, pair], weights=[0.7, 0.3]),
    ):
        yield type(source).__name__, source, source, SOURCE_STEPS


def seeding() -> dict[str, float]:
    """Seconds to seed each stream and draw one number from it, and to put Python's aside."""
    generator, number = torch.default_generator, torch.empty((), dtype=torch.int64)
    parts: dict[str, Callable[[], object]] = {
        "torch": lambda: (generator.manual_seed(7), number.random_()),
        "numpy": lambda: (np.random.seed(7), np.random.random_sample()),
        "python": lambda: (random.seed(7), random.random()),
        "python's state": random.getstate,
    }
    return {name: min(timeit.repeat(part, number=5000, repeat=5)) / 5000 for name, part in parts.items()}


def main() -> None:
    torch.set_num_threads(1)
    which = sys.argv[1:] or ["own", "sources"]
    results: dict[str, dict[str, float]] = {"seeding_s": seeding()}
    print(f"{'samples':15s} {'workers':>7s} {'perdure':>10s} {'torch':>10s} {'ratio':>6s} {'processors':>10s}")
    with tempfile.TemporaryDirectory() as folder:
        tried = [*own_data_sets()] if "own" in which else []
        tried += [*sources(Path(folder))] if "sources" in which else []
        for workers in (0, 1, 2):
            for name, dataset, short, steps in tried:
                results[f"{name}, {workers} workers"] = compare(name, dataset, short, workers, steps)
    print(f"per batch of {BATCH}; processors: ratio of the processor time of all processes")
    print("seed and draw once: " + ", ".join(f"{part} {s * 1e6:.1f}µs" for part, s in results["seeding_s"].items()))
    target = Path(__file__).parent / "results" / "loader.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


def compare(name: str, dataset: Any, short: Any, workers: int, steps: int) -> dict[str, float]:
    mine, theirs = [], []
    for _ in range(ROUNDS):
        mine.append(cost_per_batch(ours, dataset, workers, steps))
        theirs.append(cost_per_batch(torchs, short, workers, steps))
    wall = [statistics.median(run[0] for run in runs) for runs in (mine, theirs)]
    busy = [statistics.median(run[1] for run in runs) for runs in (mine, theirs)]
    print(
        f"{name:15s} {workers:7d} {wall[0] * 1e6:8.1f}µs {wall[1] * 1e6:8.1f}µs "
        f"{wall[0] / wall[1]:6.2f} {busy[0] / busy[1]:10.2f}",
        flush=True,
    )
    return {
        "perdure_s": wall[0],
        "torch_s": wall[1],
        "perdure_processor_s": busy[0],
        "torch_processor_s": busy[1],
    }


if __name__ == "__main__":
    main()
