"""Two ranks on one machine: save, load and the stall of an asynchronous save, replicated and with FSDP2, against DCP.

    python benchmarks/ranks_save.py [--only "FSDP2, 1 GiB"] [--rounds N]

The size is that of the whole state, which FSDP2 shares out and replication holds on each rank. All ranks are timed
between barriers; the slowest counts. The least that a stall can be is measured in turn with it: what the rank saves,
copied by one thread into memory that is kept for it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from common.measure import drop_caches, has_memory, machine, settle, write_results
from common.raw import raw_write, sync_tree, warm
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from perdure import CheckpointConfig, Checkpointer
from perdure.engine.progress import Progress
from perdure.storage.memory import address_of, aligned

RANKS = 2
STALLS = 3
"""Stalls vary, and take little time: so many are measured per round."""


class Model(nn.Module):
    """`count` square matrices."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


def build(layout: str, gib: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    count = max(tensors // 3, 1)
    model = Model(count, int((gib * (1 << 30) / 12 / count) ** 0.5))
    if layout == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for part in model.parts:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {f"model.{k}": v.detach() for k, v in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state |= {f"optim.{key}.{name}": value for key, value in optimizer.state[parameter].items()}
    return state


def copying(tensors: list[Tensor]) -> Callable[[], None]:
    """Copies tensors into memory that is kept for them."""
    memory = aligned(sum(tensor.nbytes for tensor in tensors))

    def copy() -> None:
        at = address_of(memory)
        for tensor in tensors:
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes

    return copy


def timed(work: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def work_of(rank: int, layout: str, gib: float, tensors: int, rounds: int, folder: str, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model, optimizer = build(layout, gib, tensors)
    state, place, progress = flat(model, optimizer), Path(folder), Progress()
    configs = {
        "sync": CheckpointConfig(save_path=str(place / "sync"), save_max=1, auto_resume=True),
        "async": CheckpointConfig(save_path=str(place / "async"), save_max=1, async_save=True),
        "balanced": CheckpointConfig(enable_save=False, load_path=str(place / "sync"), load_balanced=True),
    }
    keep = {k: Checkpointer(c, model=model, optimizer=optimizer, say=lambda line: None) for k, c in configs.items()}

    def first(job: Callable[[], object]) -> None:
        dist.barrier()
        if rank == 0:
            job()
        dist.barrier()

    def save(name: str) -> Callable[[], object]:
        return lambda: keep[name].save(progress)

    def dcp_save() -> None:
        dcp.save(state, checkpoint_id=str(place / "dcp"))
        if rank == 0:
            sync_tree(place / "dcp")

    def dcp_load() -> None:
        dcp.load(state, checkpoint_id=str(place / "dcp"))

    # Of what all ranks hold whole, each saves its share.
    own: list[Any] = list(state.values()) if layout == "FSDP2" else list(state.values())[rank::RANKS]
    copy = copying([t.to_local() if hasattr(t, "to_local") else t for t in own])
    found: dict[str, list[float]] = {}
    size = sum(t.numel() * t.element_size() for t in state.values())

    def note(name: str, seconds: float, number: int) -> None:
        if number:
            found.setdefault(name, []).append(seconds)

    for number in range(rounds + 1):
        first(settle)
        note("raw write, one rank", timed(lambda: raw_write(place / "raw", size) if rank == 0 else None), number)
        first(settle)
        progress.advance(1)
        note("save: perdure", timed(save("sync")), number)
        first(lambda: (shutil.rmtree(place / "dcp", ignore_errors=True), settle()))
        note("save: DCP", timed(dcp_save), number)
        for turn in range(STALLS):
            for name in ("hand-written copy", "perdure")[:: -1 if turn % 2 else 1]:
                first(settle)
                if name == "perdure":
                    progress.advance(1)
                    began = time.perf_counter()
                    note("async stall: perdure", timed(save("async")), number)
                    keep["async"].wait()
                    note("async total: perdure", time.perf_counter() - began, number)
                else:
                    note("async stall: hand-written copy", timed(copy), number)
        first(lambda: (shutil.rmtree(place / "dcpa", ignore_errors=True), settle()))
        futures: list[Any] = []
        began = time.perf_counter()
        stall = timed(lambda: futures.append(dcp.async_save(state, checkpoint_id=str(place / "dcpa"))))  # noqa: B023
        note("async stall: DCP thread", stall, number)
        futures[0].result()
        note("async total: DCP thread", time.perf_counter() - began, number)
        for cached in ("warm", "cold"):
            for name, load, files in (
                ("perdure", keep["sync"].load, "sync"),
                ("perdure, load_balanced", keep["balanced"].load, "sync"),
                ("DCP", dcp_load, "dcp"),
            ):
                first(lambda files=files: warm(place / files) if cached == "warm" else drop_caches())  # type: ignore[misc]  # noqa: B023
                note(f"load {cached}: {name}", timed(load), number)
    for each in keep.values():
        each.close()
    if rank == 0:
        results.put({"bytes_per_rank": size, "median_s": {k: statistics.median(v) for k, v in found.items()}})
    dist.barrier()
    dist.destroy_process_group()


def measure(layout: str, gib: float, tensors: int, rounds: int, port: int) -> dict[str, Any]:
    """Medians in seconds."""
    folder = tempfile.mkdtemp(prefix="bench-", dir=".")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    context = mp.get_context("spawn")
    results = context.Queue()
    try:
        mp.spawn(work_of, (layout, gib, tensors, rounds, os.path.abspath(folder), results), nprocs=RANKS)
        found: dict[str, Any] = results.get(timeout=10)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


RUNS = {
    "replicated, 1 GiB": ("replicated", 1.0, 3),
    "FSDP2, 1 GiB": ("FSDP2", 1.0, 3),
    "replicated, 4 GiB": ("replicated", 4.0, 1),
    "FSDP2, 4 GiB": ("FSDP2", 4.0, 1),
}
"""Name -> layout, GiB, rounds."""
MEMORY = {"replicated": 7.0, "FSDP2": 5.0}
"""What a run takes, in sizes of the state: each rank's own, and what DCP, we and the copy by hand stage of it."""
TENSORS = 592


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="one run; default: all that there is memory for")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    for number, (name, (layout, gib, rounds)) in enumerate(RUNS.items()):
        if options.only not in (None, name) or not has_memory(MEMORY[layout] * gib, name):
            continue
        about = {"machine": machine(), "layout": layout, "gib": gib, "tensors": TENSORS, "ranks": RANKS}
        results = about | measure(layout, gib, TENSORS, options.rounds or rounds, 29590 + number)
        print(f"\n{name}, {RANKS} ranks")
        for what, seconds in results["median_s"].items():
            print(f"{what:<36}{seconds:>8.3f} s")
        write_results("ranks_save", name, results)


if __name__ == "__main__":
    main()
