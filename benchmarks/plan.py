"""A save plan for many ranks, made on one machine from synthetic layouts, against DCP's planner.

    python benchmarks/plan.py [--rounds 3] [--peer-ranks 64]

What one rank does is timed: its own columns encoded, everybody's read, the plan made, its own writes listed.
Prints seconds, bytes that each rank receives, and peak memory over what the process had before (each measured
in a process of its own); writes benchmarks/results/plan.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import torch

from perdure.engine.columns import Held, encode_held, share_of
from perdure.engine.plan import make_plan
from perdure.format.box import Box
from perdure.state.shards import NamedTensor, Piece

# The tensors of a decoder layer: what is cut by tensors in dimension 0, in 1, or not at all.
KINDS = [
    ("attention.wq", (8192, 8192), 0),
    ("attention.wk", (1024, 8192), 0),
    ("attention.wv", (1024, 8192), 0),
    ("attention.wo", (8192, 8192), 1),
    ("mlp.gate", (28672, 8192), 0),
    ("mlp.up", (28672, 8192), 0),
    ("mlp.down", (8192, 28672), 1),
    ("attention_norm", (8192,), None),
    ("mlp_norm", (8192,), None),
    ("bias", (28672,), 0),
]
CASES = {
    "1,024 ranks x 1,000 tensors, sharded": (1024, 1000, (1, 1024, 1)),
    "1,024 x 1,000, replicate 16 x shard 64": (1024, 1000, (16, 64, 1)),
    "1,024 x 1,000, shard 128 x tensor 8": (1024, 1000, (1, 128, 8)),
    "1,024 x 1,000, replicated": (1024, 1000, (1024, 1, 1)),
    "16,384 ranks x 2,000 tensors, sharded": (16384, 2000, (1, 16384, 1)),
    "16,384 x 2,000, replicate 64 x shard 256": (16384, 2000, (64, 256, 1)),
    "16,384 x 2,000, replicate 2 x shard 8,192": (16384, 2000, (2, 8192, 1)),
    "16,384 x 2,000, shard 2,048 x tensor 8": (16384, 2000, (1, 2048, 8)),
    "16,384 x 2,000, replicated": (16384, 2000, (16384, 1, 1)),
    "1,024 x 1,000, sharded, every shape different": (1024, 1000, (1, 1024, -1)),
}


def kinds(tensors: int, every: bool) -> list[tuple[str, tuple[int, ...], int | None]]:
    if not every:
        return [
            (f"layers.{n // len(KINDS)}.{KINDS[n % len(KINDS)][0]}", *KINDS[n % len(KINDS)][1:]) for n in range(tensors)
        ]
    return [(f"tensors.{n}", (1024 + n, 64), None) for n in range(tensors)]


def box_of(shape: tuple[int, ...], dim: int | None, rank: int, mesh: tuple[int, int, int]) -> Box | None:
    """What a rank has: cut by tensors along `dim`, then by FSDP along dimension 0."""
    _, shard, tensor = mesh
    offset, size = [0] * len(shape), list(shape)
    for where, index, count in ((dim, rank % tensor, tensor), (0, rank // tensor % shard, shard)):
        if where is None or count == 1:
            continue
        chunk = -(-size[where] // count)
        begin = min(index * chunk, size[where])
        offset[where] += begin
        size[where] = min(chunk, size[where] - begin)
    return Box(tuple(offset), tuple(size)) if all(size) else None


def held_by(
    rank: int, listed: list[tuple[str, tuple[int, ...], int | None]], mesh: tuple[int, int, int]
) -> list[NamedTensor]:
    memory, known, found = torch.zeros(()), {}, []
    for name, shape, dim in listed:
        if (shape, dim) not in known:
            box = box_of(shape, dim, rank, mesh)
            known[shape, dim] = () if box is None else (Piece(box, memory.expand(box.shape)),)
        found.append(NamedTensor("model", name, "BF16", "", shape, known[shape, dim]))
    return found


def everybody(ranks: int, tensors: int, mesh: tuple[int, int, int]) -> list[Held]:
    """What the ranks tell: tensors of one shape and cut share a row, so one of each is enough to make it."""
    every = mesh[2] < 0
    mesh = (mesh[0], mesh[1], abs(mesh[2]))
    listed = kinds(tensors, every)
    first = {(shape, dim): (name, shape, dim) for name, shape, dim in reversed(listed)}
    some = sorted(first.values(), key=listed.index)
    tables: dict[bytes, bytes] = {}
    held = []
    for rank in range(ranks):
        row = encode_held(held_by(rank, some, mesh))
        if row.table not in tables:
            tables[row.table] = encode_held(held_by(rank, listed, mesh)).table
        held.append(Held(tables[row.table], row.boxes))
    return held


def received(held: list[Held]) -> int:
    """Bytes that a rank receives: a digest of each, then each rank's boxes and slice, padded to the longest."""
    holders: dict[bytes, int] = {}
    for each in held:
        holders[each.table] = holders.get(each.table, 0) + 1
    longest = max(
        len(msgspec.msgpack.encode([h.boxes, share_of(h.table, 0, holders[h.table])])) for h in held[:1] + held[-1:]
    )
    return (longest + len(msgspec.msgpack.encode(bytes(32)))) * len(held)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str) -> dict[str, float]:
    ranks, tensors, mesh = CASES[name]
    own = held_by(0, kinds(tensors, mesh[2] < 0), (mesh[0], mesh[1], abs(mesh[2])))
    held = everybody(ranks, tensors, mesh)
    before = peak()
    started = time.perf_counter()
    held[0] = encode_held(own)
    plan = make_plan(held)
    shards = plan.writes_of(0)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "received_mib": received(held) / (1 << 20),
        "peak_mib": (peak() - before) / (1 << 20),
        "writes_of_rank_0": len(shards),
        "most_over_mean": max(plan.loads) / plan.loads.mean(),
    }


def peer(ranks: int, tensors: int, mesh: tuple[int, int, int]) -> tuple[float, int]:
    """Seconds of DCP's global planning on its coordinator for the same layout, and the bytes it is sent pickled."""
    import pickle

    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    listed = kinds(tensors, False)
    plans = []
    for rank in range(ranks):
        items = []
        for name, shape, dim in listed:
            box = box_of(shape, dim, rank, mesh)
            if box is None:
                continue
            offset = torch.Size(box.offset)
            chunk = ChunkStorageMetadata(offset, torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size(shape))
            items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    size = sum(len(pickle.dumps(plan)) for plan in plans)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    started = time.perf_counter()
    planner.create_global_plan(plans)
    return time.perf_counter() - started, size


def against_peer(ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    tensors, found = 1000, {}
    for label, mesh in (("sharded", (1, ranks, 1)), ("replicate x shard", (ranks // 16, 16, 1))):
        ours, theirs, size = [], [], 0
        held = everybody(ranks, tensors, mesh)
        own = held_by(0, kinds(tensors, False), mesh)
        for _ in range(rounds):
            started = time.perf_counter()
            held[0] = encode_held(own)
            make_plan(held).writes_of(0)
            ours.append(time.perf_counter() - started)
            seconds, size = peer(ranks, tensors, mesh)
            theirs.append(seconds)
        a, b = statistics.median(ours), statistics.median(theirs)
        found[label] = {
            "perdure_s": a,
            "dcp_s": b,
            "ratio": b / a,
            "perdure_mib": received(held) / 2**20,
            "dcp_mib": size / 2**20,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-ranks", type=int, default=64)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    results: dict[str, dict[str, float]] = {}
    print(f"{'':<50}{'s':>8}{'received MiB':>14}{'peak MiB':>10}{'busiest/mean':>14}")
    for name in CASES:
        runs = []
        for _ in range(options.rounds):
            done = subprocess.run(
                [sys.executable, __file__, "--case", name], capture_output=True, text=True, check=True
            )
            runs.append(json.loads(done.stdout))
        result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results[name] = result
        print(
            f"{name:<50}{result['seconds']:>8.2f}{result['received_mib']:>14.1f}{result['peak_mib']:>10.0f}"
            f"{result['most_over_mean']:>14.3f}"
        )
    compared = against_peer(options.peer_ranks, options.rounds)
    for label, row in compared.items():
        print(
            f"{options.peer_ranks} ranks x 1,000, {label}: {row['perdure_s']:.3f} s and {row['perdure_mib']:.1f} MiB, "
            f"DCP {row['dcp_s']:.2f} s and {row['dcp_mib']:.0f} MiB: {row['ratio']:.0f} times"
        )
    target = Path(__file__).parent / "results" / "plan.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"cases": results, f"{options.peer_ranks} ranks": compared}, indent=1))


if __name__ == "__main__":
    main()
