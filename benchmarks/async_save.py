"""Asynchronous saves: how long a step stalls, when the save is done, and how much training time is lost meanwhile.

    python benchmarks/async_save.py [--only "1 GiB in 592 tensors"] [--rounds N]

Training is matrix products of about 50 ms a step on all processors. "lost" is what the steps from the save's
start until its commit took beyond as many undisturbed steps of the same round. Against DCP's async save by
thread and by process, and with its reused shared-memory stager, and against the least that a stall can be: the
same tensors copied by one thread into memory that is kept for it. That is measured in turn like the others, since
memory that was left alone for seconds may be slow to come back where the machine is a virtual one.
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
from common.measure import Peak, has_memory, machine, settle, write_results
from common.raw import raw_write
from common.states import build, flat, size_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from perdure import CheckpointConfig, Checkpointer
from perdure.engine.progress import Progress
from perdure.storage.memory import address_of, aligned

Save = Callable[[], Callable[[], bool]]
"""Starts a save; gives what tells whether it is done."""


class Work:
    """Steps of about 50 ms."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        self._times = 1
        began = time.perf_counter()
        for _ in range(10):
            self.step()
        self._times = max(round(0.05 / ((time.perf_counter() - began) / 10)), 1)

    def step(self) -> float:
        """One step; its seconds."""
        began = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._a, self._b)
        return time.perf_counter() - began


def measure(gib: float, tensors: int, rounds: int, folder: Path, every: bool) -> dict[str, Any]:
    """Medians of stall, total and lost time, in seconds, and the extra peak memory."""
    model, optimizer = build(gib, tensors)
    state = flat(model, optimizer)
    config = CheckpointConfig(save_path=str(folder / "perdure"), save_max=1, async_save=True)
    keep = Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None)
    cases: dict[str, Save] = {"hand-written copy": _copy(state), "perdure": _perdure(keep)}
    cases["DCP async, thread"] = _dcp(state, folder / "thread", AsyncCheckpointerType.THREAD, None)
    if every:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        stager = DefaultStager(options)
        cases["DCP async, thread, stager kept"] = _dcp(state, folder / "kept", AsyncCheckpointerType.THREAD, stager)
        cases["DCP async, process"] = _dcp(state, folder / "process", AsyncCheckpointerType.PROCESS, None)
    work = Work()
    size = size_of(state)
    rows: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in cases}
    results: dict[str, Any] = {"gib": size / (1 << 30), "tensors": len(state)}
    raw = []
    try:
        for number in range(rounds + 1):
            began = time.perf_counter()
            raw_write(folder / "raw", size)
            raw.append(time.perf_counter() - began)
            for name, save in list(cases.items())[:: 1 if number % 2 else -1]:
                settle()
                row = _one(work, save)
                if number:
                    rows[name].append(row)
    finally:
        keep.close()
    results |= {"raw_write_s": statistics.median(raw), "cases": {}}
    for name, each in rows.items():
        stall, total, lost, extra = (statistics.median(column) for column in zip(*each, strict=True))
        results["cases"][name] = {"stall_s": stall, "total_s": total, "lost_s": lost, "extra_peak_mib": extra}
    return results


def _one(work: Work, save: Save) -> tuple[float, float, float, float]:
    usual = statistics.median(work.step() for _ in range(12))
    with Peak() as peak:
        began = time.perf_counter()
        done = save()
        stall = time.perf_counter() - began
        steps, spent = 0, 0.0
        while not done():
            spent += work.step()
            steps += 1
        total = time.perf_counter() - began
        # Memory bandwidth and processors are free again only some steps later.
        for _ in range(4):
            spent += work.step()
            steps += 1
    usual = min(usual, statistics.median(work.step() for _ in range(12)))
    return stall, total, stall + max(spent - steps * usual, 0.0), peak.extra / (1 << 20)


def _copy(state: dict[str, torch.Tensor]) -> Save:
    memory = aligned(size_of(state))

    def save() -> Callable[[], bool]:
        at = address_of(memory)
        for tensor in state.values():
            ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
            at += tensor.nbytes
        return lambda: True

    return save


def _perdure(keep: Checkpointer) -> Save:
    progress = Progress()

    def save() -> Callable[[], bool]:
        keep.wait()
        progress.advance(1)
        keep.save(progress)

        def done() -> bool:
            keep.poll()
            return keep.last_commit is not None and keep.last_commit.iteration == progress.global_step

        return done

    return save


def _dcp(state: dict[str, torch.Tensor], path: Path, kind: AsyncCheckpointerType, stager: Any) -> Save:
    def save() -> Callable[[], bool]:
        shutil.rmtree(path, ignore_errors=True)
        future: Any = dcp.async_save(state, checkpoint_id=str(path), async_checkpointer_type=kind, async_stager=stager)
        future = getattr(future, "upload_completion", future)
        return lambda: bool(future.done()) and (future.result(), True)[1]

    return save


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['gib']:.4g} GiB in {results['tensors']} tensors; ", end="")
    print(f"raw write {results['raw_write_s']:.3f} s")
    print(f"{'':<34}{'stall s':>9}{'total s':>9}{'lost s':>9}{'extra MiB':>11}")
    for name, row in results["cases"].items():
        print(
            f"{name:<34}{row['stall_s']:>9.3f}{row['total_s']:>9.2f}{row['lost_s']:>9.2f}{row['extra_peak_mib']:>11.0f}"
        )


RUNS = {"1 GiB in 592 tensors": (1.0, 592, 7, True), "4 GiB in 592 tensors": (4.0, 592, 3, False)}
"""Name -> GiB, tensors, rounds, whether all of DCP's ways are measured or the default one."""


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="one run; default: all that there is memory for")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    for name, (gib, tensors, rounds, every) in RUNS.items():
        if options.only not in (None, name) or not has_memory((6 if every else 4.5) * gib, name):
            continue
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir="."))
        try:
            results = {"machine": machine(), **measure(gib, tensors, options.rounds or rounds, folder, every)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        show(results)
        write_results("async_save", name, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
