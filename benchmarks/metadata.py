"""metadata.json of a million shards: written, read, checked, and planned from, against plain json; one process.

    python benchmarks/metadata.py [--shards 1000000] [--rounds 3]

Prints medians in seconds and peak memory; writes benchmarks/results/metadata.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perdure.engine.demand import Listing, divide
from perdure.engine.reader import Fill
from perdure.format.box import Box
from perdure.format.digest import tag
from perdure.format.metadata import CheckpointMetadata, FileRecord, ShardRecord, TensorRecord
from perdure.format.names import shard_filename
from perdure.state.shards import Piece


def build(shards: int) -> CheckpointMetadata:
    """As 1,000 ranks save it that each hold a thousandth of every tensor."""
    ranks = 1000
    metadata = CheckpointMetadata(training={"seed": 1})
    for rank in range(ranks):
        metadata.files.append(FileRecord(shard_filename("checkpoint", "model", rank, ranks), 1 << 30, tag("0" * 32)))
    for number in range(-(-shards // ranks)):
        own = [ShardRecord(r, (4 * r, 0), (4, 1024), tag(os.urandom(16).hex())) for r in range(ranks)]
        metadata.model[f"model.layers.{number // 9}.part{number % 9}.weight"] = TensorRecord(
            "BF16", (4 * ranks, 1024), own
        )
    return metadata


def fills_of(metadata: CheckpointMetadata, ranks: int) -> list[Fill]:
    """What one of so many ranks needs, each holding a run of rows of every tensor."""
    rows = next(iter(metadata.model.values())).shape[0] // ranks
    box, memory = Box((0, 0), (rows, 1024)), torch.empty(rows, 1024, dtype=torch.bfloat16)
    return [Fill("model", name, record, (Piece(box, memory),)) for name, record in metadata.model.items()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shards", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    metadata = build(options.shards)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        seconds[name].append(time.perf_counter() - started)
        return result

    def plan(own: list[Fill]) -> None:
        listing = Listing(metadata)
        divide(listing, [np.packbits(listing.needed(own)).tobytes()] * 8)

    size = 0
    fills = fills_of(metadata, 8)
    for _ in range(options.rounds):
        data = timed("encode", metadata.encode)
        size = len(data)
        read = timed("decode", lambda data=data: CheckpointMetadata.decode(data))
        timed("check", read.check)
        del read
        timed("plan a load on 8 ranks", lambda: plan(fills))
        plain = timed("json.loads", lambda data=data: json.loads(data))
        timed("json.dumps", lambda plain=plain: json.dumps(plain))
        del plain
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10)
    print(f"{options.shards:,} shards, {size / (1 << 20):.0f} MiB, peak {peak:,.0f} MiB")
    for name, median in medians.items():
        print(f"{name:<26}{median:>8.2f} s")
    target = Path(__file__).parent / "results" / "metadata.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"shards": options.shards, "bytes": size, "seconds": medians}, indent=1))


if __name__ == "__main__":
    main()
