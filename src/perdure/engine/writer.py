"""One shard file, streamed from tensor memory to disk with its digests, in bounded memory.

The thread that calls copies tensors, in file order, into a few aligned buffers and digests them there,
so that a digest always speaks of the bytes that were written; two threads write full buffers. Small
tensors share a buffer and a write; a large one is never held whole.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from perdure.format.digest import ShardDigester, digest_bytes
from perdure.format.metadata import FileRecord
from perdure.format.safetensors import ALIGNMENT, header_bytes, lay_out
from perdure.storage.base import FileWriter, Storage

__all__ = ["FileEntry", "WriteBuffers", "WrittenFile", "memory_of", "write_file", "write_tensors"]

CHUNK = 8 << 20


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
    """Aligned buffers and the threads that write them: made once, used for every save."""

    def __init__(self, count: int = 4, threads: int = 2) -> None:
        self.buffers = [mmap.mmap(-1, CHUNK) for _ in range(count)]
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="perdure-write")

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
    layout = lay_out(shapes)
    header = header_bytes(layout, text)
    size = len(header) + max((e.end for e in layout.values()), default=0)
    digests: dict[str, tuple[str, tuple[str, ...]]] = {}
    writer = storage.create(path, size)
    try:
        stream = _Stream(writer, buffers)
        try:
            stream.feed(memoryview(header))
            for key in layout:
                digester = ShardDigester()
                stream.feed_tensor(tensor(key), digester)
                digest, blocks = digester.finish()
                digests[key] = (digest, tuple(blocks))
            stream.flush()
        finally:
            stream.drain()
        stream.check()
        writer.finish(size)
    except BaseException:
        writer.abort()
        raise
    return WrittenFile(FileRecord(name, size, digest_bytes(header)), digests)


class _Stream:
    """Bytes in file order, gathered into chunks that are written behind."""

    def __init__(self, writer: FileWriter, buffers: WriteBuffers) -> None:
        self._writer, self._pool = writer, buffers.pool
        self._free = list(buffers.buffers)
        self._busy: list[tuple[Future[None], mmap.mmap]] = []
        self._failure: BaseException | None = None
        self._buffer = self._free.pop()
        self._filled = 0
        self._offset = 0

    def feed(self, data: memoryview, digester: ShardDigester | None = None) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if not data.readonly and len(data) else 0
        start = 0
        while start < len(data):
            count = min(CHUNK - self._filled, len(data) - start)
            if address:
                self._copy(address + start, count)
            else:
                self._buffer[self._filled : self._filled + count] = data[start : start + count]
            self._after(count, digester)
            start += count

    def feed_tensor(self, tensor: Tensor, digester: ShardDigester) -> None:
        if tensor.numel() == 0:
            return
        # What is not plain host memory is made so: one tensor at a time, never the state.
        plain = tensor.detach().contiguous().cpu()
        start, size = 0, plain.numel() * plain.element_size()
        while start < size:
            count = min(CHUNK - self._filled, size - start)
            self._copy(plain.data_ptr() + start, count)
            self._after(count, digester)
            start += count

    def _copy(self, source: int, count: int) -> None:
        # memmove by ctypes: one thread, and other Python threads go on meanwhile.
        target = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer)) + self._filled
        ctypes.memmove(target, source, count)

    def _after(self, count: int, digester: ShardDigester | None) -> None:
        if digester is not None:
            with memoryview(self._buffer) as view:
                digester.update(view[self._filled : self._filled + count])
        self._filled += count
        if self._filled == CHUNK:
            self._write_behind(CHUNK)

    def flush(self) -> None:
        if self._filled:
            padded = -(-self._filled // ALIGNMENT) * ALIGNMENT
            self._buffer[self._filled : padded] = bytes(padded - self._filled)
            self._write_behind(padded)

    def _write_behind(self, count: int) -> None:
        buffer, offset = self._buffer, self._offset
        self._busy.append((self._pool.submit(self._write, buffer, count, offset), buffer))
        self._offset += count
        self._filled = 0
        if not self._free:
            future, freed = self._busy.pop(0)
            self._settle(future)
            self._free.append(freed)
        self.check()
        self._buffer = self._free.pop()

    def _write(self, buffer: mmap.mmap, count: int, offset: int) -> None:
        with memoryview(buffer) as view:
            self._writer.pwrite(view[:count], offset)

    def _settle(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None and self._failure is None:
            self._failure = error

    def drain(self) -> None:
        """Waits for every write under way."""
        for future, _ in self._busy:
            self._settle(future)
        self._busy.clear()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
