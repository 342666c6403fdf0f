"""Flips single bits of an iteration, one after the other, and asks `verify --read-data`'s function each time.

Run as a program: `python -m tests.crash.flips [EVERY]` flips each EVERY-th bit of all its files and prints a JSON
object: for each kind of place its bits flipped and found, and the sentences for those that were not.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.checkpoints import Tensor, build_checkpoint, floats

from perdure.catalog.read import ShardFiles, read_iteration
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.format.metadata import Section

__all__ = ["flipped", "places", "sweep"]

STATE: dict[Section, dict[str, Tensor]] = {
    "model": {"w": floats(*map(float, range(120)), shape=(10, 12)), "b": Tensor(bytes(range(14)), (7,), "BF16")},
    "optimizer": {"adam_m.w": floats(*([0.5] * 120), shape=(10, 12)), "adam_step": Tensor(bytes(8), (), "I64")},
    "extra": {"flags": Tensor(b"\1\0\1", (3,), "BOOL")},
}


@contextmanager
def flipped(path: str, bit: int) -> Iterator[None]:
    """One bit of a file is another for a while."""
    with open(path, "r+b", buffering=0) as file:
        before = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit % 8]), bit // 8)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, bit // 8)


def places(root: Root, name: str) -> dict[str, list[tuple[int, str]]]:
    """For each file of an iteration its runs of bytes, as (end, tensor); the tensor is "" outside of the data."""
    found: dict[str, list[tuple[int, str]]] = {}
    path = root.join(name)
    with root.storage.open_directory(path) as directory:
        content = read_iteration(directory)
        with ShardFiles(directory, content.metadata, content.commit) as files:
            for index, record in enumerate(content.metadata.files):
                header = files.header(index)
                entries = sorted(header.entries.items(), key=lambda item: item[1].begin)
                data = [(header.data_start + entry.end, key) for key, entry in entries]
                found[record.name] = [(header.data_start, ""), *data]
    for name in sorted(os.listdir(path)):
        found.setdefault(name, [(os.path.getsize(os.path.join(path, name)), "")])
    return found


def sweep(every: int = 1) -> dict[str, object]:
    """Flips each `every`-th bit of an iteration; a bit is found when its file is named, and in data its tensor."""
    tried: dict[str, int] = {}
    found: dict[str, int] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Root(folder)
        build_checkpoint(root, 10, state=STATE)
        iteration = root.join("iteration_00000010")
        turn = 0
        for file, runs in places(root, "iteration_00000010").items():
            path, start = os.path.join(iteration, file), 0
            for end, tensor in runs:
                kind = "tensor data" if tensor else "header" if file.endswith(".safetensors") else file
                for bit in range(start * 8, end * 8):
                    turn += 1
                    if turn % every:
                        continue
                    with flipped(path, bit):
                        problems = verify(iteration, read_data=True).problems
                    tried[kind] = tried.get(kind, 0) + 1
                    if any(p.file == file and (not tensor or p.tensor == tensor) for p in problems):
                        found[kind] = found.get(kind, 0) + 1
                    else:
                        missed.append(f"{file}: bit {bit}: {[p.what for p in problems]}")
                start = end
        assert verify(folder, read_data=True).ok
    return {"tried": tried, "found": found, "missed": missed}


if __name__ == "__main__":
    print(json.dumps(sweep(int(sys.argv[1]) if len(sys.argv) > 1 else 1)))
