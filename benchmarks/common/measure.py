"""Interleaved measurement: every case once per round, medians over the rounds, extra peak memory."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Peak", "drop_caches", "has_memory", "interleaved", "machine", "write_results"]

MIB = 1 << 20
RESULTS = Path(__file__).parent.parent / "results"


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
    """Empties the page cache where that is allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def settle() -> None:
    """Lets what earlier cases left (dirty pages, freed blocks) reach the disk."""
    os.sync()
    time.sleep(0.15)


def interleaved(
    cases: dict[str, Callable[[], object]], rounds: int, before: Callable[[str], object] = lambda name: settle()
) -> dict[str, Any]:
    """Runs each case `rounds` times in turn after one round to warm up.

    A case that gives a number is measured by that (seconds); any other by its wall time.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    memory: dict[str, int] = dict.fromkeys(cases, 0)
    for number in range(rounds + 1):
        for name, work in cases.items():
            before(name)
            with Peak() as peak:
                began = time.perf_counter()
                given = work()
                seconds = given if isinstance(given, float) else time.perf_counter() - began
            if number:
                times[name].append(seconds)
                memory[name] = max(memory[name], peak.extra)
    return {
        name: {"median_s": statistics.median(times[name]), "all_s": times[name], "extra_peak_mib": memory[name] / MIB}
        for name in cases
    }


def machine() -> dict[str, Any]:
    """The machine in general terms."""
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) // (1 << 20)
    return {
        "processors": os.cpu_count(),
        "memory_gib": memory,
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def has_memory(gib: float, name: str) -> bool:
    """Whether so much memory is free; says so when it isn't."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / (1 << 20)
    if free < gib:
        print(f"{name}: left out, it takes {gib:.1f} GiB of memory and {free:.1f} are free")
    return free >= gib


def write_results(name: str, run: str, results: dict[str, Any]) -> None:
    """Puts one run into benchmarks/results/<name>.json, beside the others that are there."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    runs = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**runs, run: results}, indent=1))
