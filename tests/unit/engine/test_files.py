"""Tensors through real files and back: any dtype, stride, cut and name; flips found; the library agrees."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from perdure.engine import writer
from perdure.engine.reader import Fill, read_tensors
from perdure.engine.writer import CHUNK, FileEntry, WriteBuffers, WrittenFile, write_file
from perdure.errors import DamagedCheckpointError
from perdure.format.box import Box, whole
from perdure.format.digest import BLOCK, digest_bytes
from perdure.format.dtypes import BY_TORCH
from perdure.format.metadata import Section, ShardRecord, TensorRecord
from perdure.format.safetensors import header_length, parse_header
from perdure.state.shards import Piece, describe
from perdure.storage.base import FileReader
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage

DTYPES = [getattr(torch, name) for name in BY_TORCH]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


@pytest.fixture(scope="module")
def buffers() -> Iterator[WriteBuffers]:
    made = WriteBuffers()
    yield made
    made.close()


@dataclass
class Written:
    """One written file, as the reader wants it; counts where it is read."""

    path: Path
    written: WrittenFile
    records: dict[str, TensorRecord]
    readers: list[FileReader] = field(default_factory=list)

    def locate(self, section: Section, name: str, shard: ShardRecord) -> tuple[FileReader, int]:
        if not self.readers:
            self.readers.append(LocalStorage().open_directory(str(self.path.parent)).open(self.path.name))
        data = self.path.read_bytes()[: self.start] if not hasattr(self, "_header") else b""
        if data:
            self._header = parse_header(data, self.readers[0].size, "f")
        return self.readers[0], self.start + self._header.entries[shard.key or name].begin

    def file_name(self, shard: ShardRecord) -> str:
        return self.path.name

    @property
    def start(self) -> int:
        with self.path.open("rb") as file:
            return header_length(file.read(8), self.path.stat().st_size, "f")


def write(
    path: Path, tensors: dict[str, Tensor], buffers: WriteBuffers, boxes: dict[str, list[Box]] | None = None
) -> Written:
    """Writes tensors, each as the given boxes (default: whole)."""
    path.unlink(missing_ok=True)
    entries, records = [], {}
    placed: list[tuple[TensorRecord, str, Box]] = []
    for name, tensor in tensors.items():
        named = describe("extra", name, tensor)
        (piece,) = named.pieces
        records[name] = TensorRecord(named.dtype, named.shape, [], named.logical)
        for number, box in enumerate((boxes or {}).get(name) or [whole(named.shape)]):
            key = name if not number else f"{name}#{number}"
            entries.append(FileEntry(key, named.dtype, piece.tensor[cut(box)]))
            placed.append((records[name], key, box))
    written = write_file(LocalStorage(), str(path), path.name, entries, {"format": "pt"}, buffers)
    names = {id(record): name for name, record in records.items()}
    for record, key, box in placed:
        digest, blocks = written.digests[key]
        own = "" if key == names[id(record)] else key
        record.shards.append(ShardRecord(0, box.offset, box.shape, digest, blocks, own))
    assert written.record.size == path.stat().st_size
    return Written(path, written, records)


def cut(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def read(source: Written, targets: dict[str, Tensor], threads: int = 1, verify: bool = True) -> int:
    fills = [Fill("model", n, source.records[n], describe("extra", n, t).pieces) for n, t in targets.items()]
    return read_tensors(source, fills, threads=threads, verify=verify)


def bits(tensor: Tensor) -> bytes:
    """A tensor's bytes in logical order."""
    if tensor.numel() == 0:
        return b""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    return plain.flatten().view(torch.uint8).numpy().tobytes()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits, NaNs of every kind included."""
    size = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (prod(shape) * size,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return (raw % 2).view(torch.bool).reshape(shape)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_and_the_library_reads_it(
    dtype: torch.dtype, tmp_path: Path, buffers: WriteBuffers
) -> None:
    base = noise((6, 4), dtype)
    tensors = {
        "plain": base,
        "scalar": noise((), dtype, 1),
        "one": noise((1,), dtype, 2),
        "empty": base[:0],
        "turned": base.t(),
        "every other": base[::2, 1:3],
        "repeated": base[:1].expand(3, 4),
    }
    source = write(tmp_path / "f.safetensors", tensors, buffers)
    targets = {name: noise(tuple(t.shape), dtype, 9) for name, t in tensors.items()}
    read(source, targets)
    assert all(same(targets[name], t) for name, t in tensors.items())
    with safe_open(source.path, "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name in tensors:
            held = describe("extra", name, tensors[name]).pieces[0].tensor
            assert same(file.get_tensor(name), held.contiguous())


@pytest.mark.parametrize(
    "name",
    ["a/b/../c", "ü\u0000\n\t", "'\"\\", "x" * 300, " ", "..", "__metadata", "\U0001f600", "#1", "{}"],
)
def test_odd_names(name: str, tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f.safetensors", {name: torch.arange(3.0), "other": torch.zeros(2)}, buffers)
    targets = {name: torch.zeros(3)}
    read(source, targets)
    assert torch.equal(targets[name], torch.arange(3.0))
    with safe_open(source.path, "pt") as file:
        assert torch.equal(file.get_tensor(name), torch.arange(3.0))


def test_the_reserved_name_is_stored_under_another_key(tmp_path: Path, buffers: WriteBuffers) -> None:
    record = TensorRecord("F32", (3,), [])
    entry = FileEntry("__metadata__#1", "F32", torch.arange(3.0))
    path = tmp_path / "f"
    written = write_file(LocalStorage(), str(path), "f", [entry], {}, buffers)
    digest, blocks = written.digests["__metadata__#1"]
    record.shards.append(ShardRecord(0, (0,), (3,), digest, blocks, "__metadata__#1"))
    target = {"__metadata__": torch.zeros(3)}
    read(Written(path, written, {"__metadata__": record}), target)
    assert torch.equal(target["__metadata__"], torch.arange(3.0))


def test_a_view_costs_its_own_size(tmp_path: Path, buffers: WriteBuffers) -> None:
    base = torch.randn(1_000_000, 2)
    views = {"ten": base[:10], "a": base[100:300], "b": base[200:400], "column": base[:1000, 1]}
    source = write(tmp_path / "f", views, buffers)
    assert source.path.stat().st_size <= 4096 + sum(v.numel() * 4 for v in views.values())
    targets = {name: torch.zeros(v.shape) for name, v in views.items()}
    read(source, targets)
    assert all(same(targets[name], v) for name, v in views.items())


def test_a_file_of_nothing(tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f", {}, buffers)
    assert source.path.stat().st_size == 4096
    with safe_open(source.path, "pt") as file:
        assert list(file.keys()) == []


@pytest.mark.parametrize("size", [BLOCK - 4, BLOCK, BLOCK + 4, 3 * BLOCK + 12])
def test_the_edges_of_blocks_and_buffers(size: int, tmp_path: Path, buffers: WriteBuffers) -> None:
    tensors = {"big": noise((size // 4,), torch.float32), "small": noise((5,), torch.float32)}
    source = write(tmp_path / "f", tensors, buffers)
    targets = {name: torch.zeros_like(t) for name, t in tensors.items()}
    assert read(source, targets, threads=3) == size + 20
    assert all(same(targets[name], t) for name, t in tensors.items())
    assert source.written.record.header == digest_bytes(source.path.read_bytes()[: source.start])


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A view of some memory: permuted, sliced with steps, expanded."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]))
    shape = draw(shapes)
    tensor = noise(shape, dtype, draw(st.integers(0, 99)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for dim in range(tensor.dim()):
        start = draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 2))),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


@st.composite
def split(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 4)) if prod(shape) else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(box.shape) if n > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.shape[dim] - 1))
        for low, count in ((0, at), (at, box.shape[dim] - at)):
            offset, extent = list(box.offset), list(box.shape)
            offset[dim] += low
            extent[dim] = count
            boxes.append(Box(tuple(offset), tuple(extent)))
    return boxes


@settings(deadline=None, max_examples=120)
@given(st.dictionaries(st.text(max_size=8).filter(lambda n: n != "__metadata__"), strided(), max_size=4), st.data())
def test_any_state_comes_back_in_any_other_cut(
    tmp_path_factory: pytest.TempPathFactory, buffers: WriteBuffers, tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    tensors = {n.encode("utf-8", "replace").decode(): t for n, t in tensors.items() if "#" not in n}
    shape_of = {n: describe("extra", n, t).shape for n, t in tensors.items()}
    boxes = {n: data.draw(split(shape)) for n, shape in shape_of.items()}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    source = write(path, tensors, buffers, boxes)
    fills, targets = [], {}
    for name, record in source.records.items():
        targets[name] = torch.zeros(record.shape, dtype=describe("extra", name, tensors[name]).pieces[0].tensor.dtype)
        # Other pieces, each in memory of its own with its own strides.
        parts = [(box, memory_like(targets[name][cut(box)], data)) for box in data.draw(split(tuple(record.shape)))]
        fills.append((Fill("model", name, record, tuple(Piece(b, m) for b, m in parts)), parts))
    read_tensors(source, [f for f, _ in fills], threads=data.draw(st.sampled_from([1, 3])))
    for fill, parts in fills:
        for box, memory in parts:
            targets[fill.name][cut(box)] = memory
        held = describe("extra", fill.name, tensors[fill.name]).pieces[0].tensor
        assert same(targets[fill.name], held)


def memory_like(tensor: Tensor, data: st.DataObject) -> Tensor:
    how = data.draw(st.sampled_from(["plain", "turned", "gaps"]))
    if how == "turned" and tensor.dim() > 1:
        return torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(*reversed(range(tensor.dim())))
    if how == "gaps" and tensor.dim():
        return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 1]
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_casts_are_those_of_torch(
    saved: torch.dtype, wanted: torch.dtype, tmp_path: Path, buffers: WriteBuffers
) -> None:
    tensor = torch.randn(33, 7, dtype=torch.float64).to(saved)
    source = write(tmp_path / "f", {"x": tensor}, buffers)
    target = torch.zeros(33, 7, dtype=wanted)
    read(source, {"x": target})
    assert same(target, tensor.to(wanted))


def test_strides_of_the_model_stay_as_they_are(tmp_path: Path, buffers: WriteBuffers) -> None:
    conv = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    source = write(tmp_path / "f", {"conv": conv, "rows": torch.arange(12.0).reshape(3, 4)}, buffers)
    target = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    stride = target.stride()
    repeated = torch.zeros(1, 4).expand(3, 4)
    read(source, {"conv": target})
    assert target.stride() == stride
    assert torch.equal(target, conv)
    # Rows that share memory take one of the rows; nothing is raised for them.
    read(source, {"rows": repeated})
    assert torch.equal(repeated[0], repeated[2])


def test_large_tensors_in_other_cuts_read_no_byte_twice(tmp_path: Path, buffers: WriteBuffers) -> None:
    """Rows far from block edges, one row larger than a slab, and a middle dimension to cut at."""
    shapes = {"rows": (3001, 1009), "one row": (1, 3_000_001), "deep": (2, 3, 700_001), "flat": (5_000_003,)}
    tensors = {name: noise(shape, torch.float32) for name, shape in shapes.items()}
    source = write(tmp_path / "f", tensors, buffers)
    total = sum(t.numel() * 4 for t in tensors.values())
    for threads in (1, 3):
        targets = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        assert read(source, targets, threads=threads) == total
        for name, tensor in tensors.items():
            assert bits(targets[name]) == bits(tensor.double())


def test_a_part_reads_only_its_blocks(tmp_path: Path, buffers: WriteBuffers) -> None:
    tensor = noise((10, BLOCK // 4), torch.float32)
    source = write(tmp_path / "f", {"x": tensor}, buffers)
    target = torch.zeros(2, BLOCK // 4)
    fill = Fill("model", "x", source.records["x"], (Piece(Box((4, 0), (2, BLOCK // 4)), target),))
    assert read_tensors(source, [fill], threads=1) == 2 * BLOCK
    assert same(target, tensor[4:6])


def flip(path: Path, at: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (value,) = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ bit]))


def test_a_flip_of_any_data_byte_is_found_and_named(tmp_path: Path, buffers: WriteBuffers) -> None:
    tensors = {"a": noise((5, 3), torch.float32), "b": noise((7,), torch.uint8), "c": noise((), torch.float64)}
    source = write(tmp_path / "f", tensors, buffers)
    halves = {
        "a": Piece(Box((0, 0), (1, 1)), torch.zeros(1, 1)),
        "b": Piece(Box((6,), (1,)), torch.zeros(1, dtype=torch.uint8)),
    }
    entries = parse_header(source.path.read_bytes()[: source.start], source.path.stat().st_size, "f").entries
    for name, entry in entries.items():
        for at in range(entry.begin, entry.end):
            flip(source.path, source.start + at, 1 << at % 8)
            whole_fill = Fill(
                "model", name, source.records[name], describe("extra", name, tensors[name].clone()).pieces
            )
            part = Fill("model", name, source.records[name], (halves[name],) if name in halves else whole_fill.pieces)
            for fill in (whole_fill, part):
                with pytest.raises(DamagedCheckpointError, match="not what was written") as caught:
                    read_tensors(source, [fill], threads=1)
                assert (caught.value.file, caught.value.tensor) == ("f", name)
            flip(source.path, source.start + at, 1 << at % 8)
    read(source, {name: torch.zeros_like(t) for name, t in tensors.items()})


@pytest.mark.parametrize("threads", [1, 3])
def test_a_flip_in_a_later_block_is_found_by_those_who_read_it(
    threads: int, tmp_path: Path, buffers: WriteBuffers
) -> None:
    tensor = noise((4, BLOCK // 4), torch.float32)
    source = write(tmp_path / "f", {"x": tensor, "y": noise((4,), torch.float32)}, buffers)
    flip(source.path, source.start + 3 * BLOCK - 1)

    def part(row: int) -> Fill:
        memory = torch.zeros(1, BLOCK // 4)
        return Fill("model", "x", source.records["x"], (Piece(Box((row, 0), (1, BLOCK // 4)), memory),))

    assert read_tensors(source, [part(1)], threads=threads) == BLOCK
    with pytest.raises(DamagedCheckpointError, match="block 2"):
        read_tensors(source, [part(2)], threads=threads)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(DamagedCheckpointError, match="block 2"):
            read(source, {"x": torch.zeros(4, BLOCK // 4, dtype=dtype), "y": torch.zeros(4)}, threads=threads)
    read(source, {"x": torch.zeros(4, BLOCK // 4)}, threads=threads, verify=False)


def test_a_cut_file_is_damage(tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f", {"x": torch.ones(1000)}, buffers)
    source.locate("model", "x", source.records["x"].shards[0])
    with source.path.open("r+b") as file:
        file.truncate(source.path.stat().st_size - 1)
    with pytest.raises(DamagedCheckpointError, match="ends at byte"):
        read(source, {"x": torch.zeros(1000)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tensors_of_others_carry_no_digests(dtype: torch.dtype, tmp_path: Path, buffers: WriteBuffers) -> None:
    tensor = noise((2 * BLOCK // 4 + 7,), torch.float32)
    source = write(tmp_path / "f", {"x": tensor}, buffers)
    (shard,) = source.records["x"].shards
    source.records["x"].shards[:] = [ShardRecord(0, shard.offset, shard.shape, "")]
    target = torch.zeros(tensor.shape, dtype=dtype)
    read(source, {"x": target})
    assert bits(target) == bits(tensor.to(dtype))


def test_replicas_of_a_box_are_read_once(tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f", {"x": torch.arange(9.0)}, buffers)
    source.records["x"].shards.append(source.records["x"].shards[0])
    target = torch.zeros(9)
    assert read(source, {"x": target}) == 36
    assert torch.equal(target, torch.arange(9.0))


def test_one_tensor_fills_many_pieces(tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f", {"step": torch.tensor(7.0)}, buffers)
    many = [torch.zeros(()) for _ in range(5)]
    fill = Fill("optimizer", "step", source.records["step"], tuple(Piece(whole(()), t) for t in many))
    assert read_tensors(source, [fill]) == 4
    assert [float(t) for t in many] == [7.0] * 5


@pytest.mark.parametrize("what", ["create", "pwrite", "finish"])
def test_a_failing_disk_raises_and_leaves_the_buffers_usable(what: str, tmp_path: Path, buffers: WriteBuffers) -> None:
    entries = [FileEntry("x", "U8", noise((5 * BLOCK,), torch.uint8))]
    storage = FaultStorage(LocalStorage(), at=1, action="raise", only=lambda name, path: name == what, sticky=True)
    with pytest.raises(OSError, match="injected"):
        write_file(storage, str(tmp_path / "f"), "f", entries, {}, buffers)
    source = write(tmp_path / "g", {"x": entries[0].tensor}, buffers)
    target = torch.zeros(5 * BLOCK, dtype=torch.uint8)
    read(source, {"x": target})
    assert torch.equal(target, entries[0].tensor)


def test_an_io_error_is_no_damage(tmp_path: Path, buffers: WriteBuffers) -> None:
    source = write(tmp_path / "f", {"x": torch.ones(10), "y": torch.ones(10)}, buffers)
    storage = FaultStorage(
        LocalStorage(), at=1, action="raise", code=5, reads=True, only=lambda name, path: name == "pread_into"
    )
    source.readers.append(storage.open_directory(str(tmp_path)).open("f"))
    with pytest.raises(OSError, match="injected") as caught:
        read(source, {"x": torch.zeros(10), "y": torch.zeros(10)}, threads=3)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_what_the_live_tensor_does_meanwhile_cannot_break_a_digest(tmp_path: Path, buffers: WriteBuffers) -> None:
    """A digest speaks of the bytes in the file, whatever happened to the memory since."""
    tensor = torch.zeros(1000)
    source = write(tmp_path / "f", {"x": tensor}, buffers)
    tensor.fill_(1)
    target = torch.ones(1000)
    read(source, {"x": target})
    assert not target.any()


def test_a_chunk_that_cannot_be_filled_keeps_no_worker_waiting_for_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_taken = threading.Event()
    filled = writer._Writing._filled

    def first_fails(self: writer._Writing, chunk: writer._Chunk, buffer: mmap.mmap) -> memoryview:
        if chunk.offset:
            second_taken.set()
            return filled(self, chunk, buffer)
        second_taken.wait(30)
        raise MemoryError("no room for a chunk")

    monkeypatch.setattr(writer._Writing, "_filled", first_fails)
    entry = FileEntry("w", "F32", torch.zeros(CHUNK // 2))
    two = WriteBuffers(workers=2)
    with pytest.raises(MemoryError, match="no room"):
        write_file(LocalStorage(), str(tmp_path / "f"), "f", [entry], {}, two)
    two.close()
