"""Writing and reading take a fixed amount of memory beside the state, and at most the largest tensor's staging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, resource, sys, torch
from perdure.engine.reader import Fill, read_tensors
from perdure.engine.writer import FileEntry, WriteBuffers, write_file
from perdure.format.box import whole
from perdure.format.metadata import ShardRecord, TensorRecord
from perdure.format.safetensors import header_length, parse_header
from perdure.state.shards import Piece
from perdure.storage.local import LocalStorage

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

folder, what = sys.argv[1:]
torch.set_num_threads(1)
shapes = {f"t{n}": (1024, 8192) for n in range(8)}  # 32 MiB each
shapes |= {"one row": (1, 8 << 20), "small": (1000,)}
state = {name: torch.empty(shape) for name, shape in shapes.items()}
for number, tensor in enumerate(state.values()):
    tensor.fill_(number)
if os.fork() == 0:
    # Its peak is not the reader's.
    buffers = WriteBuffers()
    write_file(LocalStorage(), folder + "/warm", "warm", [FileEntry("x", "F32", state["small"])], {}, buffers)
    before = peak()
    entries = [FileEntry(name, "F32", t.t() if what == "turned" and name == "t3" else t) for name, t in state.items()]
    written = write_file(LocalStorage(), folder + "/f", "f", entries, {}, buffers)
    buffers.close()
    with open(folder + "/written.json", "w") as file:
        json.dump([peak() - before, written.digests], file)
    os._exit(0)
os.wait()
with open(folder + "/written.json") as file:
    writing, digests = json.load(file)

class Source:
    def __init__(self):
        self.reader = LocalStorage().open_directory(folder).open("f")
        start = bytearray(8)
        self.reader.pread_into(memoryview(start), 0)
        raw = bytearray(header_length(bytes(start), self.reader.size, "f"))
        self.reader.pread_into(memoryview(raw), 0)
        self.header = parse_header(bytes(raw), self.reader.size, "f")
    def locate(self, section, name, shard):
        return self.reader, self.header.data_start + self.header.entries[name].begin
    def file_name(self, shard):
        return "f"

def fill(name, tensor):
    shape = tuple(tensor.shape)
    digest, blocks = digests[name]
    record = TensorRecord("F32", shape, [ShardRecord(0, (0,) * len(shape), shape, digest, blocks)])
    return Fill("model", name, record, (Piece(whole(shape), tensor),))

if what == "turned":
    # Memory laid out otherwise than the file: everything goes by slabs.
    targets = {n: t.view(t.shape[::-1]).t() if n not in ("small", "t3") else t for n, t in state.items()}
    targets["t3"] = state["t3"].t()
else:
    targets = state
read_tensors(Source(), [fill("small", targets["small"])], threads=2)
for tensor in targets.values():
    tensor.zero_()
before = peak()
read_tensors(Source(), [fill(n, t) for n, t in targets.items()], threads=2)
print(writing, peak() - before)
assert all(bool((t == number).all()) for number, t in enumerate(targets.values()))
"""


@pytest.mark.parametrize("what", ["straight", "turned"])
def test_extra_memory_is_bounded_whatever_the_state(what: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), what],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    writing, reading = map(float, done.stdout.split())
    staging = 32 if what == "turned" else 0
    assert writing <= 64 + staging
    assert reading <= 64
