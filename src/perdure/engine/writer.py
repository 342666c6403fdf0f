"""One shard file, streamed from tensor memory to disk with its digests, in bounded memory.

The file is cut into aligned chunks. Each worker takes the next one, copies it together in a buffer of its
own, digests it there (so that a digest always speaks of the bytes that were written) and writes it: some
copy while others write, small tensors share a write, and a large one is never held whole. A shard that
spans chunks hands its digest on from one to the next. What has been staged already is written from there.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from perdure.engine.priority import lower_priority
from perdure.format.digest import ShardDigester, digest_bytes
from perdure.format.metadata import FileRecord
from perdure.format.safetensors import ALIGNMENT, header_from, lay_out, table_bytes
from perdure.storage.base import FileWriter, Storage
from perdure.storage.memory import address_of, aligned

__all__ = [
    "CHUNK",
    "FileEntry",
    "FileLayout",
    "FileWrite",
    "WriteBuffers",
    "WrittenFile",
    "memory_of",
    "write_file",
    "write_tensors",
]

CHUNK = 2 << 20


@dataclass(frozen=True)
class FileEntry:
    """What goes into a file under `key`: a tensor in its stored dtype (any stride, any device)."""

    key: str
    dtype: str
    tensor: Tensor


@dataclass(frozen=True)
class WrittenFile:
    """What a file came out as: its record, and each entry's (digest, block digests)."""

    record: FileRecord
    digests: dict[str, tuple[str, tuple[str, ...]]]


class WriteBuffers:
    """Aligned buffers and the threads that fill and write them: made once, used for every save.

    Args:
        workers: threads, each with a buffer.
        background: the threads give way to whatever else wants processors or the disk.
    """

    def __init__(self, workers: int = 4, background: bool = False) -> None:
        self.workers = workers
        self.free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(workers):
            self.free.put(aligned(CHUNK))
        start = lower_priority if background else None
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="perdure-write", initializer=start)

    def close(self) -> None:
        """Ends the threads."""
        self.pool.shutdown(wait=True)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; the tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def write_file(
    storage: Storage, path: str, name: str, entries: Sequence[FileEntry], text: dict[str, str], buffers: WriteBuffers
) -> WrittenFile:
    """Writes one safetensors file, durably.

    Raises:
        OSError: the storage refused; nothing is promised of the file then.
    """
    by_key = {entry.key: entry for entry in entries}
    shapes = [(e.key, e.dtype, tuple(e.tensor.shape)) for e in entries]
    return write_tensors(storage, path, name, shapes, lambda key: by_key[key].tensor, text, buffers)


def write_tensors(
    storage: Storage,
    path: str,
    name: str,
    shapes: Sequence[tuple[str, str, tuple[int, ...]]],
    tensor: Callable[[str], Tensor],
    text: dict[str, str],
    buffers: WriteBuffers,
) -> WrittenFile:
    """Writes one safetensors file of tensors that are asked for one by one, each when its turn comes.

    Args:
        shapes: (key, stored dtype, shape) of each tensor.
        tensor: gives the tensor of a key, of that dtype and shape.

    Raises:
        OSError: the storage refused; nothing is promised of the file then.
    """
    return FileWrite(name, FileLayout(shapes), tensor, text).run(storage, path, buffers)


class FileLayout:
    """Where tensors lie in a file: the same for all files of tensors with these names, dtypes and shapes.

    Args:
        shapes: (key, stored dtype, shape) of each tensor.
    """

    def __init__(self, shapes: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
        self.entries = lay_out(shapes)
        self.size = max((e.end for e in self.entries.values()), default=0)
        self._table = table_bytes(self.entries)

    def header(self, text: dict[str, str]) -> bytearray:
        """The header of a file with this free text."""
        return bytearray(header_from(self._table, text))


class FileWrite:
    """One file on its way: written from live tensors and, from `cut` on, from a staged image.

    Args:
        tensor: gives the tensor of a key, of the layout's dtype and shape, when its turn comes.
        text: the header's free text.
    """

    def __init__(self, name: str, layout: FileLayout, tensor: Callable[[str], Tensor], text: dict[str, str]) -> None:
        self.name = name
        self._layout = layout.entries
        self._header = layout.header(text)
        self._tensor: Callable[[str], Tensor] | None = tensor
        self.size = len(self._header) + layout.size
        self.padded = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.cut, self._image = self.padded, memoryview(b"")
        self._writing: _Writing | None = None

    def stage(self, image: memoryview, cut: int, copy: Callable[[Tensor, int, int, int], None]) -> None:
        """Copies the file's bytes from `cut` (a multiple of CHUNK) on into `image`, to be written from there.

        Args:
            image: `padded - cut` bytes that begin on a page and are left alone until the file is written.
            copy: `copy(tensor, begin, target, size)` puts `size` bytes of the tensor from `begin` on to the address
                `target`.
        """
        start, base = len(self._header), address_of(image) - cut if image else 0
        image[: max(start - cut, 0)] = self._header[cut:]
        for key, entry in self._layout.items():
            first = max(cut - start, entry.begin)
            if first < entry.end:
                copy(self._live(key), first - entry.begin, base + start + first, entry.end - first)
        image[self.size - cut :] = bytes(self.padded - self.size)
        self.cut, self._image = cut, image
        if cut == 0:
            self._tensor = None

    def write_live(self, storage: Storage, path: str, buffers: WriteBuffers) -> None:
        """Writes what is not staged; live tensors are needed no more then.

        Raises:
            OSError: the storage refused; nothing is promised of the file then.
        """
        self._writing = _Writing(storage.create(path, self.size), self._chunks())
        self._writing.advance(buffers, self.cut)
        self._tensor = None

    def run(self, storage: Storage, path: str, buffers: WriteBuffers) -> WrittenFile:
        """Writes the whole file, or what `write_live` left of it, durably.

        Raises:
            OSError: the storage refused; nothing is promised of the file then.
        """
        if self._writing is None:
            self.write_live(storage, path, buffers)
        assert self._writing is not None
        self._writing.advance(buffers, self.padded)
        digests = self._writing.finish(self.size)
        for key, entry in self._layout.items():
            if entry.begin == entry.end:
                digests[key] = _finished(ShardDigester())
        return WrittenFile(FileRecord(self.name, self.size, digest_bytes(self._header)), digests)

    def abort(self) -> None:
        """Gives up what was begun; never raises."""
        if self._writing is not None:
            self._writing.abort()

    def _header_tensor(self) -> Tensor:
        return torch.frombuffer(self._header, dtype=torch.uint8)

    def _live(self, key: str) -> Tensor:
        assert self._tensor is not None
        tensor = self._tensor(key)
        return tensor.detach() if tensor.requires_grad else tensor

    def _chunks(self) -> Iterator[_Chunk]:
        """The file in order; live tensors are asked for one by one."""
        chunk = _Chunk(0)
        sizes = [(None, len(self._header)), *((k, e.end - e.begin) for k, e in self._layout.items())]
        for key, size in sizes:
            done, plain = 0, None
            while done < size:
                if chunk.offset >= self.cut:
                    begin = chunk.offset - self.cut
                    chunk.image = self._image[begin : begin + CHUNK]
                elif plain is None:
                    # What is not plain host memory is made so: one tensor at a time, never the state.
                    plain = self._header_tensor() if key is None else self._live(key).contiguous().cpu()
                count = min(CHUNK - chunk.filled, size - done)
                done += count
                chunk.runs.append(_Run(key, chunk.filled, count, done == size, plain, done - count))
                chunk.filled += count
                if chunk.filled == CHUNK:
                    following = _Chunk(chunk.offset + CHUNK)
                    if key is not None and done < size:
                        chunk.heir = following.inherited = Future()
                    yield chunk
                    chunk = following
        if chunk.filled:
            yield chunk


class _Run(NamedTuple):
    """Bytes of one tensor (or, without a key, of the header) in a chunk: [at, at + size)."""

    key: str | None
    at: int
    size: int
    ends: bool
    plain: Tensor | None
    begin: int


@dataclass
class _Chunk:
    """File bytes [offset, offset + filled): from tensors, or from an image of them where that is there."""

    offset: int
    filled: int = 0
    runs: list[_Run] = field(default_factory=list)
    image: memoryview | None = None
    inherited: Future[ShardDigester] | None = None
    heir: Future[ShardDigester] | None = None


class _Writing:
    """The chunks of one file, taken in order by several workers."""

    def __init__(self, writer: FileWriter, chunks: Iterator[_Chunk]) -> None:
        self._writer, self._chunks = writer, chunks
        self._lock = threading.Lock()
        self._next: _Chunk | None = None
        self._digests: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._failure: BaseException | None = None

    def advance(self, buffers: WriteBuffers, until: int) -> None:
        """Writes the chunks that begin before byte `until`."""
        count = min(buffers.workers, -(-until // CHUNK))
        workers: list[Future[None]] = []
        try:
            try:
                workers.extend(buffers.pool.submit(self._work, buffers, until) for _ in range(count))
            except RuntimeError:
                # The interpreter ends, and no pool takes work any more: a save under way is still let finish.
                self._work(buffers, until)
            wait(workers)
        except BaseException as error:
            self._fail(error)
            wait(workers)
        if self._failure is not None:
            self._writer.abort()
            raise self._failure

    def abort(self) -> None:
        """Closes the file without promising anything."""
        self._writer.abort()

    def finish(self, size: int) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Makes the file durable; the digests of its tensors."""
        try:
            self._writer.finish(size)
        except BaseException:
            self._writer.abort()
            raise
        return self._digests

    def _work(self, buffers: WriteBuffers, until: int) -> None:
        buffer = buffers.free.get()
        chunk = None
        try:
            while (chunk := self._take(until)) is not None:
                data = self._filled(chunk, buffer)
                self._digest(chunk, data)
                padded = -(-chunk.filled // ALIGNMENT) * ALIGNMENT
                self._writer.pwrite(data[:padded], chunk.offset)
        except BaseException as error:
            self._fail(error)
            if chunk is not None and chunk.heir is not None and not chunk.heir.done():
                # The worker that has the next chunk waits for it.
                chunk.heir.set_exception(error)
        finally:
            buffers.free.put(buffer)

    def _take(self, until: int) -> _Chunk | None:
        with self._lock:
            if self._failure is not None:
                return None
            chunk = self._next if self._next is not None else next(self._chunks, None)
            later = chunk is not None and chunk.offset >= until
            self._next = chunk if later else None
            return None if later else chunk

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error

    def _filled(self, chunk: _Chunk, buffer: mmap.mmap) -> memoryview:
        if chunk.image is not None:
            return chunk.image
        target = address_of(buffer)
        for run in chunk.runs:
            if run.plain is not None:
                # memmove by ctypes: one thread, and other Python threads go on meanwhile.
                ctypes.memmove(target + run.at, run.plain.data_ptr() + run.begin, run.size)
        ctypes.memset(target + chunk.filled, 0, -chunk.filled % ALIGNMENT)
        return memoryview(buffer)

    def _digest(self, chunk: _Chunk, data: memoryview) -> None:
        digester = None
        try:
            for run in chunk.runs:
                if run.key is None:
                    continue
                if run.ends and run.begin == 0:
                    self._digests[run.key] = digest_bytes(data[run.at : run.at + run.size]), ()
                    continue
                if digester is None:
                    digester = chunk.inherited.result() if run.at == 0 and chunk.inherited else ShardDigester()
                digester.update(data[run.at : run.at + run.size])
                if run.ends:
                    self._digests[run.key] = _finished(digester)
                    digester = None
        finally:
            if chunk.heir is not None:
                chunk.heir.set_result(digester or ShardDigester())


def _finished(digester: ShardDigester) -> tuple[str, tuple[str, ...]]:
    digest, blocks = digester.finish()
    return digest, tuple(blocks)
