"""Ranges of shard files read straight into tensor memory, checked block by block as they arrive.

Ranges are read in file order by several threads: a large piece that lies in memory as it lies in the file
in place, block by block; small shards near each other at once. Anything else (another cut, another dtype,
strides, a device) goes through a slab of whole digest blocks and is copied from there.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from math import prod
from operator import attrgetter
from queue import LifoQueue
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from perdure.catalog.boxes import distinct_boxes
from perdure.engine.destinations import as_dtype, copy_overlap, in_place, meets, near, overlap
from perdure.engine.writer import memory_of
from perdure.errors import DamagedCheckpointError
from perdure.format.box import Box, intersect
from perdure.format.digest import BLOCK, digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import Section, ShardRecord, TensorRecord
from perdure.state.shards import Piece
from perdure.storage.base import FileReader

__all__ = ["Fill", "ShardSource", "bytes_to_read", "read_tensors"]

SLAB = BLOCK
SLABS = 4
SMALL = 1 << 20
GAP = 64 << 10


class ShardSource(Protocol):
    """Where the bytes of a shard lie: an open file and the offset of the shard's first byte."""

    def locate(self, section: Section, name: str, shard: ShardRecord) -> tuple[FileReader, int]: ...

    def file_name(self, shard: ShardRecord) -> str: ...


class Fill(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a checkpoint and the pieces of live memory that it is to fill."""

    section: Section
    name: str
    record: TensorRecord
    pieces: tuple[Piece, ...]


class _Task(msgspec.Struct, frozen=True, gc=False):
    """A shard that is needed: where its bytes lie, the pieces that it meets, and one that lies in memory as it does."""

    fill: Fill
    shard: ShardRecord
    reader: FileReader
    offset: int
    size: int
    pieces: tuple[Piece, ...]
    straight: Piece | None

    @property
    def stored(self) -> torch.dtype:
        return _stored(self.fill.record.dtype)[0]


def read_tensors(
    source: ShardSource,
    fills: Iterable[Fill],
    *,
    threads: int = 4,
    verify: bool = True,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Fills every piece; returns the bytes read.

    Raises:
        DamagedCheckpointError: a block is not what was written; the file and the tensor are named.
        OSError: the storage failed, which is not damage.
    """
    tasks = sorted(_tasks(source, fills), key=attrgetter("shard.file", "offset"))
    worker = _Worker(source, verify, progress)
    jobs = _jobs(worker, tasks)
    # Little is read sooner than threads are at hand.
    threads = min(threads, sum(task.size for task in tasks) // SLAB)
    if threads > 1 and _keeps_busy(next(jobs)):
        threads = min(threads, os.cpu_count() or 1)
    if threads <= 1:
        for job in jobs:
            job()
        return worker.bytes_read
    crew = _Crew(jobs)
    with ThreadPoolExecutor(threads, thread_name_prefix="perdure-read") as pool:
        futures = [pool.submit(crew.work) for _ in range(threads)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            crew.stop()
            raise
    return worker.bytes_read


def _tasks(source: ShardSource, fills: Iterable[Fill]) -> Iterator[_Task]:
    for fill in fills:
        stored, itemsize = _stored(fill.record.dtype)
        for shard, pieces in _met(fill):
            size = prod(shard.shape) * itemsize
            if size:
                reader, offset = source.locate(fill.section, fill.name, shard)
                yield _Task(fill, shard, reader, offset, size, pieces, _straight(shard, pieces, stored))


def _met(fill: Fill) -> Iterable[tuple[ShardRecord, tuple[Piece, ...]]]:
    """The shards of which any piece needs something, each box once, and the pieces that need it."""
    shards, pieces = fill.record.shards, fill.pieces
    if len(shards) == len(pieces) == 1 and pieces[0].box == (shards[0].offset, shards[0].shape):
        return [(shards[0], pieces)]
    found = [(s, tuple([p for p in pieces if meets(s.box, p.box)])) for s in distinct_boxes(near(shards, pieces))]
    return [(shard, met) for shard, met in found if met]


def _straight(shard: ShardRecord, pieces: tuple[Piece, ...], stored: torch.dtype) -> Piece | None:
    for piece in pieces:
        if piece.box == (shard.offset, shard.shape) and in_place(piece.tensor, stored):
            return piece
    return None


@cache
def _stored(dtype: str) -> tuple[torch.dtype, int]:
    """How torch calls a stored dtype, and the bytes of an element."""
    known = BY_SAFETENSORS[dtype]
    return getattr(torch, known.torch), known.itemsize


def _keeps_busy(job: Callable[[], None]) -> bool:
    """Does a job; whether it was the processor's, as where a page cache is read, and not a wait for a device."""
    began, busy = time.perf_counter(), time.thread_time()
    job()
    return 2 * (time.thread_time() - busy) > time.perf_counter() - began


class _Crew:
    """Threads that take jobs in order; the first error ends all."""

    def __init__(self, jobs: Iterator[Callable[[], None]]) -> None:
        self._jobs, self._lock, self._stopped = jobs, threading.Lock(), False

    def work(self) -> None:
        try:
            while True:
                with self._lock:
                    job = None if self._stopped else next(self._jobs, None)
                if job is None:
                    return
                job()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._stopped = True


def _jobs(worker: _Worker, tasks: list[_Task]) -> Iterator[Callable[[], None]]:
    """Reads in file order: neighbours in one, a large shard that is read in place block by block."""
    group: list[_Task] = []
    for task in tasks:
        if group and not _continues(group, task):
            yield partial(worker.run_group, group)
            group = []
        if task.size <= SMALL:
            group.append(task)
        elif len(task.pieces) == 1 and task.straight is not None:
            memory = memory_of(task.straight.tensor)
            for start in range(0, task.size, BLOCK):
                yield partial(worker.read_checked, task, start, memory[start : start + BLOCK])
        else:
            yield partial(worker.run, task)
    if group:
        yield partial(worker.run_group, group)


def _continues(group: list[_Task], task: _Task) -> bool:
    """Whether a shard is read along with the ones before it."""
    first, last = group[0], group[-1]
    near = task.reader is last.reader and task.offset - (last.offset + last.size) <= GAP
    return near and task.size <= SMALL and task.offset + task.size - first.offset <= SLAB


def bytes_to_read(fills: Iterable[Fill]) -> int:
    """What `read_tensors` would read: for each shard that a piece meets, the digest blocks that it needs."""
    total = 0
    for fill in fills:
        _, itemsize = _stored(fill.record.dtype)
        for shard, pieces in _met(fill):
            box = shard.box
            overlaps = [o for p in pieces if (o := overlap(box, p.box)) is not None]
            end = 0
            for part, first in _slabs(box, overlaps, SLAB // itemsize):
                begin, after = _blocks(first * itemsize, part.numel * itemsize, box.numel * itemsize)
                total += max(0, after - max(begin, end))
                end = max(end, after)
    return total


def _blocks(start: int, size: int, total: int) -> tuple[int, int]:
    """Where the whole digest blocks begin and end that bytes [start, start + size) of a shard lie in."""
    return start // BLOCK * BLOCK, min(-(-(start + size) // BLOCK) * BLOCK, total)


class _Worker:
    def __init__(self, source: ShardSource, verify: bool, progress: Callable[[int], None] | None) -> None:
        self.bytes_read = 0
        self._source, self._verify, self._progress = source, verify, progress
        self._lock = threading.Lock()
        # Of little memory for many threads, the last used comes first.
        self._slabs: LifoQueue[_Slab] = LifoQueue()
        for _ in range(SLABS):
            self._slabs.put(_Slab())

    def run(self, task: _Task) -> None:
        """Reads what is needed of one shard."""
        straight = task.straight
        if straight is not None:
            self.read_checked(task, 0, memory_of(straight.tensor))
            for piece in task.pieces:
                if piece is not straight:
                    copy_overlap(straight.tensor, task.shard.box, piece)
        else:
            self._through_slabs(task)

    def run_group(self, tasks: list[_Task]) -> None:
        """Reads small shards that lie near each other at once, and hands them out."""
        if len(tasks) == 1:
            self.run(tasks[0])
            return
        try:
            with self._slab() as slab:
                self._read_group(tasks, slab)
        except EOFError:
            # Which of them is cut short is told by reading one by one.
            for task in tasks:
                self.run(task)

    def _read_group(self, tasks: list[_Task], room: _Slab) -> None:
        first, last = tasks[0], tasks[-1]
        slab = room.at_least(last.offset + last.size - first.offset)
        memory, address = memory_of(slab), slab.data_ptr()
        first.reader.pread_into(memory, first.offset)
        for task in tasks:
            begin = task.offset - first.offset
            end = begin + task.size
            self._compare(task, 0, memory[begin:end])
            if task.straight is not None and len(task.pieces) == 1:
                ctypes.memmove(task.straight.tensor.data_ptr(), address + begin, task.size)
                continue
            values = as_dtype(slab[begin:end], task.stored).reshape(task.shard.shape)
            for piece in task.pieces:
                copy_overlap(values, task.shard.box, piece)
        self._count(sum(task.size for task in tasks))

    def read_checked(self, task: _Task, start: int, memory: memoryview) -> None:
        """Reads shard bytes from `start` (a block boundary) into `memory`, which ends at a block's end."""
        for at in range(0, len(memory), BLOCK):
            piece = memory[at : at + BLOCK]
            try:
                task.reader.pread_into(piece, task.offset + start + at)
            except EOFError as error:
                raise self._damage(task, str(error)) from None
            self._compare(task, (start + at) // BLOCK, piece)
            self._count(len(piece))

    def _compare(self, task: _Task, number: int, piece: memoryview) -> None:
        """Block `number` of a shard has arrived."""
        if not self._verify:
            return
        # A checkpoint made by others has no digests.
        expected = task.shard.blocks[number] if task.shard.blocks else task.shard.digest
        if expected and digest_bytes(piece) != expected:
            raise self._damage(task, f"block {number} is not what was written ({expected} expected)")

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
        if self._progress is not None:
            self._progress(size)

    def _through_slabs(self, task: _Task) -> None:
        """Reads what any piece needs of a shard, a slab at a time, and copies from there."""
        box, (stored, itemsize) = task.shard.box, _stored(task.fill.record.dtype)
        overlaps = [o for p in task.pieces if (o := intersect(box, p.box)) is not None]
        with self._slab() as slab:
            window = _Window(self, task, slab)
            for part, first in _slabs(box, overlaps, SLAB // itemsize):
                data = window.at(first * itemsize, part.numel * itemsize)
                values = as_dtype(data, stored).reshape(part.shape)
                for piece in task.pieces:
                    copy_overlap(values, part, piece)

    @contextmanager
    def _slab(self) -> Iterator[_Slab]:
        """A slab that no other thread uses meanwhile, of a few that are used again."""
        slab = self._slabs.get()
        try:
            yield slab
        finally:
            self._slabs.put(slab)

    def _damage(self, task: _Task, what: str) -> DamagedCheckpointError:
        file, name = self._source.file_name(task.shard), task.fill.name
        return DamagedCheckpointError(f"{file}: {name[:300]}: {what}", file=file, tensor=name)


class _Slab:
    """Memory that is used again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def at_least(self, size: int) -> Tensor:
        """Its first `size` bytes; what they held is kept when it grows."""
        held = self._buffer.numel()
        if held < size:
            grown = torch.empty(max(size, min(size * 2, SLAB + BLOCK)), dtype=torch.uint8, device="cpu")
            grown[:held] = self._buffer
            self._buffer = grown
        return self._buffer[:size]


class _Window:
    """The whole digest blocks of a shard that are at hand, moved forward over it; no block is read twice."""

    def __init__(self, worker: _Worker, task: _Task, slab: _Slab) -> None:
        self._worker, self._task, self._slab = worker, task, slab
        self._begin = self._end = 0

    def at(self, start: int, size: int) -> Tensor:
        """Shard bytes [start, start + size) as a view that holds until the next call; `start` never goes back."""
        begin, end = _blocks(start, size, self._task.size)
        buffer = self._slab.at_least(end - begin)
        kept = max(self._end - begin, 0)
        if kept and begin != self._begin:
            ctypes.memmove(buffer.data_ptr(), buffer.data_ptr() + begin - self._begin, kept)
        if begin + kept < end:
            self._worker.read_checked(self._task, begin + kept, memory_of(buffer[kept : end - begin]))
        self._begin, self._end = begin, max(end, self._end)
        return buffer[start - begin :][:size]


def _slabs(box: Box, overlaps: list[Box], most: int) -> Iterator[tuple[Box, int]]:
    """Parts of `box` of at most `most` elements that together hold the `overlaps`, as (box, first element), ascending.

    A part is a run of rows along one dimension, whole in those after it and one element wide in those before.
    """
    if not overlaps:
        return
    shape = box.shape
    if not shape:
        yield box, 0
        return
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most)
    row = prod(shape[dim + 1 :])
    lows = [min(o.offset[d] for o in overlaps) - box.offset[d] for d in range(dim + 1)]
    highs = [max(o.offset[d] + o.shape[d] for o in overlaps) - box.offset[d] for d in range(dim + 1)]
    step = max(1, most // row)
    for outer in product(*(range(lo, hi) for lo, hi in zip(lows[:dim], highs[:dim], strict=True))):
        above = 0
        for index, size in zip(outer, shape[:dim], strict=True):
            above = above * size + index
        for first in range(lows[dim], highs[dim], step):
            rows = min(step, highs[dim] - first)
            offset = (*(o + i for o, i in zip(box.offset, (*outer, first), strict=False)), *box.offset[dim + 1 :])
            yield Box(offset, (*[1] * dim, rows, *shape[dim + 1 :])), (above * shape[dim] + first) * row
