"""Durable save and checked load of model + AdamW state, against torch.save, safetensors and DCP, interleaved.

    python benchmarks/save_load.py [--only "1 GiB in 592 tensors"] [--rounds N]

Prints medians, ratios to Perdure's and to the raw device, and extra peak memory. "Cold" is after the page
cache was emptied (left out where that isn't allowed), "warm" with the files in it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.measure import drop_caches, has_memory, interleaved, machine, settle, write_results
from common.peers import LOADS, SAVES, newer, path_of
from common.raw import memcpy_seconds, raw_read, raw_write, warm
from common.states import build, flat, size_of

from perdure import CheckpointConfig, Checkpointer
from perdure.engine.progress import Progress


def measure(
    gib: float, tensors: int, rounds: int, folder: Path, note: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All figures at one size; `note` gets what there is after each part."""
    model, optimizer = build(gib, tensors)
    state = flat(model, optimizer)
    size = size_of(state)
    progress = Progress()
    config = CheckpointConfig(save_path=str(folder / "perdure"), save_max=1, auto_resume=True)
    keep = Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None)

    def save_perdure() -> None:
        progress.advance(1)
        keep.save(progress)

    saves: dict[str, Callable[[], object]] = {"perdure": save_perdure}
    loads: dict[str, Callable[[], object]] = {"perdure": keep.load}
    if size >= 1 << 26:
        saves = {"raw device": partial(raw_write, folder / "raw", size), **saves}
    for name in SAVES:
        saves[name] = partial(SAVES[name], state, path_of(folder, name))
        loads[name] = partial(LOADS[name], state, path_of(folder, name))
    other = newer(folder)
    if other is not None:
        saves["torch_checkpointing"], loads["torch_checkpointing"] = (partial(each, state) for each in other)

    def make_warm(name: str) -> None:
        settle()
        warm(folder / "perdure" if name == "perdure" else path_of(folder, name))

    results: dict[str, Any] = {"machine": machine(), "gib": size / (1 << 30), "tensors": len(state)}
    results["memcpy_s"] = memcpy_seconds(gib)
    try:
        results["save"] = interleaved(saves, rounds)
        note(results)
        results["load warm"] = interleaved(loads, rounds, make_warm)
        note(results)
        if drop_caches():
            if "raw device" in saves:
                loads = {"raw device": partial(raw_read, folder / "raw"), **loads}
            results["load cold"] = interleaved(loads, rounds, lambda name: drop_caches() and settle())
    finally:
        keep.close()
    return results


def show(results: dict[str, Any]) -> None:
    print(f"\n{results['gib']:.4g} GiB in {results['tensors']} tensors")
    for kind in ("save", "load warm", "load cold"):
        if kind in results:
            own = results[kind]["perdure"]["median_s"]
            print(f"\n{kind:<26}{'median s':>10}{'GiB/s':>8}{'x perdure':>11}{'extra MiB':>11}")
            for name, row in results[kind].items():
                speed, ratio = results["gib"] / row["median_s"], row["median_s"] / own
                print(f"{name:<26}{row['median_s']:>10.3f}{speed:>8.2f}{ratio:>11.2f}{row['extra_peak_mib']:>11.0f}")


RUNS = {
    "1 GiB in 592 tensors": (1.0, 592, 5),
    "4 GiB in 592 tensors": (4.0, 592, 2),
    "10,000 tensors of 64 bytes": (10_000 * 64 / (1 << 30), 10_000, 3),
}
"""Name -> GiB, tensors, rounds."""


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RUNS, help="one run; default: all that there is memory for")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    for name, (gib, tensors, rounds) in RUNS.items():
        if options.only not in (None, name) or not has_memory(2.5 * gib, name):
            continue
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir="."))
        try:
            keep = partial(write_results, "save_load", name)
            results = measure(gib, tensors, options.rounds or rounds, folder, keep)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        show(results)
        write_results("save_load", name, results)


if __name__ == "__main__":
    main()
