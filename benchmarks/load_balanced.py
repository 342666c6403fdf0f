"""Cold loads of a replicated state by several ranks on one machine: load_balanced against everyone reading everything.

    python benchmarks/load_balanced.py [--gib 1] [--rounds 5] [--ranks 2 4]

Interleaved: one rank alone, then N ranks with load_balanced False, True, and True over the process group only, and what
one would write by hand for a single file (common/by_hand.py). Prints medians in seconds (the slowest rank's), ratios to
one rank's read, bytes and CPU seconds of all ranks; writes benchmarks/results/load_balanced.json. Cold needs the right
to drop the page cache; else it says warm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common.by_hand import ByHand, Shared
from common.raw import raw_write
from torch import nn

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.engine import segment


def build(gib: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model like save_load.py's: weights and two moments make `gib`."""
    count = 196
    size = int(gib * (1 << 30) / 12 / count)
    model = nn.Module()
    for number in range(count):
        model.register_parameter(f"p{number}", nn.Parameter(torch.ones(size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def work(
    rank: int, ranks: int, store: str, root: str, gib: float, rounds: int, told: str, raw: str, shared: Shared
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model, optimizer = build(gib)
    alone = dist.new_group([0])
    del alone
    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values()) if t.dim()]
    by_hand = ByHand(rank, ranks, shared, raw, tensors)
    found: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    bytes_read: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name in ("one rank", "everyone reads", "balanced", "balanced, process group", "by hand"):
            segment._SHARES = "group" not in name
            if rank == 0:
                drop_caches()
            dist.barrier()
            seconds, count, used = 0.0, 0, time.process_time()
            if name == "by hand":
                began = time.perf_counter()
                count = by_hand.load()
                seconds = time.perf_counter() - began
            elif name == "one rank":
                if rank == 0:
                    seconds, count = load(model, optimizer, root, False, One())
            else:
                seconds, count = load(model, optimizer, root, name.startswith("balanced"), None)
            both = torch.tensor([seconds, 0.0], dtype=torch.float64)
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
            total = torch.tensor([count, time.process_time() - used], dtype=torch.float64)
            dist.all_reduce(total)
            # The first round touches memory and makes connections.
            if turn:
                found[name].append(float(both[0]))
                bytes_read[name] = int(total[0])
                cpu[name].append(float(total[1]))
    if rank == 0:
        Path(told).write_text(json.dumps({"seconds": found, "bytes": bytes_read, "cpu": cpu}))
    dist.barrier()
    dist.destroy_process_group()


class One:
    """Ranks of a job of one process, within a larger one."""

    def __new__(cls) -> Any:
        from perdure.engine.ranks import Ranks

        ranks = Ranks.__new__(Ranks)
        from perdure.engine.watch import Phase

        ranks.deadline_s, ranks._group, ranks._watch, ranks.rank, ranks.size, ranks.phase = (
            300,
            None,
            None,
            0,
            1,
            Phase(),
        )
        return ranks


def load(model: nn.Module, optimizer: Any, root: str, balanced: bool, ranks: Any) -> tuple[float, int]:
    config = CheckpointConfig(load_path=root, enable_save=False, load_balanced=balanced)
    with Checkpointer(config, model=model, optimizer=optimizer, ranks=ranks, say=lambda line: None) as checkpointer:
        started = time.perf_counter()
        checkpointer.load()
        seconds = time.perf_counter() - started
        assert checkpointer.loaded is not None
        return seconds, checkpointer.loaded.bytes_read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    results: dict[str, Any] = {"gib": options.gib, "cold": drop_caches()}
    print("cold" if results["cold"] else "warm: this user may not drop the page cache")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=".") as folder:
        root = f"{folder}/root"
        model, optimizer = build(options.gib)
        with Checkpointer(
            CheckpointConfig(save_path=root), model=model, optimizer=optimizer, say=lambda x: None
        ) as each:
            each.save(Progress(1, 1, 1), wait=True)
        raw = Path(f"{folder}/raw").absolute()
        raw_write(raw, 3 * sum(p.nbytes for p in model.parameters()))
        del model, optimizer
        for ranks in options.ranks:
            told = f"{folder}/told-{ranks}.json"
            store = os.path.abspath(f"{folder}/store-{ranks}")
            shared = Shared(mp.get_context("spawn"), ranks)
            try:
                given = (ranks, store, root, options.gib, options.rounds, told, str(raw), shared)
                mp.spawn(work, given, nprocs=ranks)
            finally:
                shared.close()
            measured = json.loads(Path(told).read_text())
            alone = statistics.median(measured["seconds"]["one rank"])
            rows = {}
            for name, times in measured["seconds"].items():
                median = statistics.median(times)
                rows[name] = {"s": median, "ratio": median / alone, "bytes": measured["bytes"][name]}
                rows[name]["cpu_s"] = processor = statistics.median(measured["cpu"][name])
                gib = measured["bytes"][name] / (1 << 30)
                print(
                    f"{ranks} ranks: {name:<26}{median:>7.2f} s{median / alone:>7.2f} of one rank's{gib:>7.2f} GiB read"
                    f"{processor:>7.2f} s CPU"
                )
            results[f"{ranks} ranks"] = rows
    target = Path(__file__).parent / "results" / "load_balanced.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
