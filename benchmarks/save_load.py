"""Durable save and checked load of model + AdamW state, against torch.save, safetensors and DCP, interleaved.

    python benchmarks/save_load.py [--gib 1] [--rounds 3] [--tensors 592]

Prints a table of medians, ratios to Perdure's median, and extra peak memory; writes benchmarks/results/save_load.json.
Loads are warm (page cache) except where `sync; drop_caches` is allowed, which the table says.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from perdure import CheckpointConfig, Checkpointer
from perdure.engine.progress import Progress

MIB = 1 << 20


def build(gib: float, tensors: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A third of `tensors` parameters whose weights and two moments make `gib`."""
    count = max(tensors // 3, 1)
    size = int(gib * (1 << 30) / 12 / count)
    model = nn.Module()
    for number in range(count):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = {f"model.{k}": v.detach() for k, v in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optim.{key}.{name}"] = value
    return state


def sync_tree(path: Path) -> None:
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def raw_write(path: Path, size: int) -> None:
    """The device's own speed: two threads, O_DIRECT, 8 MiB at a time, from touched memory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)
    block = 8 * MIB

    def work(start: int) -> None:
        buffer = mmap.mmap(-1, block)
        buffer.write(os.urandom(MIB) * 8)
        for at in range(start * block, size - block + 1, 2 * block):
            os.pwrite(fd, buffer, at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(fd)
    os.close(fd)


class Peak:
    """Highest resident size above where it began, sampled every millisecond."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._begin = self.top = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = max(self.top - self._begin, 0)

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.top = max(self.top, self._now())

    @staticmethod
    def _now() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        return True
    except OSError:
        return False


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=592)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, optimizer = build(options.gib, options.tensors)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="."))
    size = sum(t.numel() * t.element_size() for t in flat(model, optimizer).values())
    progress = Progress()
    config = CheckpointConfig(save_path=str(folder / "perdure"), save_max=1, auto_resume=True)
    keep = Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None)

    def save_perdure() -> None:
        progress.advance(1)
        keep.save(progress)

    def torch_save() -> None:
        torch.save(flat(model, optimizer), folder / "t.pt")
        sync_tree(folder / "t.pt")

    def safetensors_save() -> None:
        save_file(flat(model, optimizer), folder / "s.safetensors")
        sync_tree(folder / "s.safetensors")

    def dcp_save() -> None:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        dcp.save(flat(model, optimizer), checkpoint_id=str(folder / "dcp"), no_dist=True)
        sync_tree(folder / "dcp")

    def copy_in(loaded: dict[str, torch.Tensor]) -> None:
        for key, tensor in flat(model, optimizer).items():
            tensor.copy_(loaded[key])

    def load_perdure() -> None:
        keep.load()

    saves: dict[str, Callable[[], None]] = {
        "raw O_DIRECT, 2 threads": lambda: raw_write(folder / "raw", size),
        "perdure": save_perdure,
        "safetensors + fsync": safetensors_save,
        "torch.save + fsync": torch_save,
        "DCP save + fsync": dcp_save,
    }
    loads: dict[str, Callable[[], None]] = {
        "perdure": load_perdure,
        "safetensors + copy": lambda: copy_in(load_file(folder / "s.safetensors")),
        "torch.load(mmap) + copy": lambda: copy_in(torch.load(folder / "t.pt", mmap=True, weights_only=True)),
        "DCP load": lambda: dcp.load(flat(model, optimizer), checkpoint_id=str(folder / "dcp"), no_dist=True),
    }
    results: dict[str, Any] = {
        "gib": size / (1 << 30),
        "tensors": len(flat(model, optimizer)),
        "threads": os.cpu_count(),
    }
    try:
        results["save"] = measure(saves, options.rounds, before=lambda: os.sync())
        results["load warm"] = measure(loads, options.rounds, before=lambda: None)
        if drop_caches():
            results["load cold"] = measure(loads, options.rounds, before=lambda: drop_caches() and None)
    finally:
        keep.close()
        shutil.rmtree(folder, ignore_errors=True)
    show(results)
    target = Path(__file__).parent / "results" / "save_load.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=1))


def measure(cases: dict[str, Callable[[], None]], rounds: int, before: Callable[[], None]) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in cases}
    memory: dict[str, int] = dict.fromkeys(cases, 0)
    for number in range(rounds + 1):
        for name, work in cases.items():
            before()
            with Peak() as peak:
                began = time.perf_counter()
                work()
                seconds = time.perf_counter() - began
            if number:  # the first round warms up
                times[name].append(seconds)
                memory[name] = max(memory[name], peak.extra)
    return {
        name: {"median_s": statistics.median(times[name]), "all_s": times[name], "extra_peak_mib": memory[name] / MIB}
        for name in cases
    }


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['gib']:.2f} GiB in {results['tensors']} tensors, {results['threads']} processors")
    for kind in ("save", "load warm", "load cold"):
        if kind in results:
            own = results[kind]["perdure"]["median_s"]
            print(f"\n{kind:<26}{'median s':>10}{'GiB/s':>8}{'x perdure':>11}{'extra MiB':>11}")
            for name, row in results[kind].items():
                speed = results["gib"] / row["median_s"]
                ratio = row["median_s"] / own
                print(f"{name:<26}{row['median_s']:>10.3f}{speed:>8.2f}{ratio:>11.2f}{row['extra_peak_mib']:>11.0f}")


if __name__ == "__main__":
    main()
