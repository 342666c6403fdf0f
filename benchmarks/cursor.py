"""Jumping to a step of a data set of 10^12 samples, shuffled: `set_init_step`, and the cost per index.

python benchmarks/cursor.py
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import numpy as np

from perdure import ResumableLoader
from perdure.data.order import Permutation

LENGTH = 10**12


class Endless:
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    loader = ResumableLoader(Endless(), global_batch_size=1000, seed=1)
    jumps = []
    for step in (10**6, 10**8, 10**9, 999_999_999, 12_345):
        began = time.perf_counter()
        loader.set_init_step(step)
        jumps.append(time.perf_counter() - began)
    order = Permutation(LENGTH, 1, 0)
    batches = []
    for number in range(200):
        positions = np.arange(number * 256, number * 256 + 256, dtype=np.uint64)
        began = time.perf_counter()
        order.batch(positions)
        batches.append((time.perf_counter() - began) / 256)
    result = {"set_init_step_s": statistics.median(jumps), "per_index_s": statistics.median(batches)}
    print(f"set_init_step {result['set_init_step_s'] * 1e6:.1f} µs")
    print(f"{result['per_index_s'] * 1e6:.3f} µs per index in batches of 256")
    target = Path(__file__).parent / "results" / "cursor.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
