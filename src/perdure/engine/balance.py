"""A load in which every byte is read from storage once over all ranks (`load_balanced`).

What one rank alone needs it reads as always. Of what several need, each block is read and checked by one of
them, evenly by bytes, and passed on. All take the units in the same order, so that nobody ever waits for
something that waits for it. A rank with an error goes on answering, with word of its failure instead of data,
until all are through; then the error is raised everywhere.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from perdure.engine.demand import Listing, Part, Unit, divide
from perdure.engine.destinations import as_dtype, copy_overlap, in_place, meets
from perdure.engine.forward import Forward
from perdure.engine.ranks import Ranks
from perdure.engine.reader import Fill, ShardSource, read_tensors
from perdure.engine.segment import SLOTS
from perdure.engine.writer import memory_of
from perdure.errors import DamagedCheckpointError
from perdure.format.box import boxes_of_run
from perdure.format.digest import BLOCK, digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata, Section
from perdure.state.shards import Piece
from perdure.storage.base import FileReader

__all__ = ["read_balanced"]

_DOING = "loading"


def read_balanced(
    source: ShardSource,
    fills: Sequence[Fill],
    metadata: CheckpointMetadata,
    ranks: Ranks,
    *,
    threads: int = 2,
    verify: bool = True,
    share_memory: bool = True,
) -> int:
    """Fills every piece on every rank; returns the bytes that this rank read. Called by all ranks together.

    Args:
        metadata: the record that the fills are of, the same on every rank.
        share_memory: pass blocks on through shared memory where ranks are on one machine.

    Raises:
        DamagedCheckpointError: a block is not what was written; on every rank.
        OSError: the storage failed; on the other ranks `RanksError`.
    """

    def list_needs() -> tuple[Listing, bytes]:
        listing = Listing(metadata)
        return listing, np.packbits(listing.needed(fills)).tobytes()

    doing = "planning the load"
    listing, needs = ranks.together(list_needs, doing)
    told = ranks.gather(needs, doing)
    division = ranks.together(lambda: divide(listing, told), doing)
    work = _Work(source, fills, listing, ranks.rank, verify)
    try:
        alone = listing.alone(fills, division.shared)
        work.bytes_read = read_tensors(source, alone, threads=threads, verify=verify)
    except Exception as error:
        work.error = error
    if division.units:
        mine = [unit for unit in division.units if ranks.rank in unit.needed_by]
        with Forward(ranks, share_memory) as forward, ThreadPoolExecutor(threads, "perdure-read") as pool:
            work.run(mine, forward, pool)
    ranks.agree(work.error, _DOING)
    return work.bytes_read


class _Work:
    """One rank's part: what it reads for all, and what it takes from others."""

    def __init__(self, source: ShardSource, fills: Iterable[Fill], listing: Listing, rank: int, verify: bool) -> None:
        self.bytes_read = 0
        self.error: BaseException | None = None
        self._stopped = False
        self._source, self._listing, self._rank, self._verify = source, listing, rank, verify
        self._pieces: dict[tuple[Section, str], list[Piece]] = {}
        for fill in fills:
            self._pieces.setdefault((fill.section, fill.name), []).extend(fill.pieces)

    def run(self, units: Sequence[Unit], forward: Forward, pool: ThreadPoolExecutor) -> None:
        """Takes the units in order, reading those of this rank ahead."""
        own = iter([unit for unit in units if unit.reader == self._rank])
        reads: deque[tuple[list[Part], Future[int]]] = deque()

        def read_ahead() -> None:
            unit = next(own, None)
            if unit is not None:
                parts = self._listing.parts(unit.blocks)
                reads.append((parts, pool.submit(self._read, parts, forward.slot(unit.turn))))

        for _ in range(SLOTS - 1):
            read_ahead()
        for unit in units:
            if unit.reader == self._rank:
                parts, read = reads.popleft()
                try:
                    self.bytes_read += read.result()
                except Exception as error:
                    self.error = self.error or error
                forward.pass_on(unit, _size(parts), self._failed)
                read_ahead()
                self._take(parts, forward.slot(unit.turn))
            else:
                parts = self._listing.parts(unit.blocks)
                if not forward.take(unit, _size(parts), partial(self._take, parts)):
                    self._stopped = True
        forward.finish()

    @property
    def _failed(self) -> bool:
        """Whether this load has failed, here or on a rank that said so."""
        return self.error is not None or self._stopped

    def _read(self, parts: list[Part], slot: Tensor) -> int:
        """Reads a unit and checks it; how many bytes were read."""
        if self._failed:
            return 0
        for begin, end, reader, offset in self._ranges(parts):
            try:
                reader.pread_into(memory_of(slot[begin:end]), offset)
            except EOFError as error:
                raise self._damage(parts[0], str(error)) from None
        at = 0
        for part in parts:
            number, blocks = part.start // BLOCK, part.shard.blocks or (part.shard.digest,)
            # A checkpoint made by others has no digests.
            expected = blocks[number] if number < len(blocks) else ""
            if self._verify and expected and digest_bytes(memory_of(slot[at : at + part.size])) != expected:
                raise self._damage(part, f"block {number} is not what was written ({expected} expected)")
            at += part.size
        return at

    def _take(self, parts: list[Part], data: Tensor) -> None:
        """Takes what this rank needs of a unit; an error is kept for the end."""
        try:
            if not self._failed:
                self._place(parts, data)
        except Exception as error:
            self.error = self.error or error

    def _ranges(self, parts: list[Part]) -> list[tuple[int, int, FileReader, int]]:
        """The runs of a unit that lie together in its file, as (begin, end, file, offset)."""
        found: list[tuple[int, int, FileReader, int]] = []
        at = 0
        for part in parts:
            reader, offset = self._source.locate(part.section, part.name, part.shard)
            offset += part.start
            if found and found[-1][2] is reader and found[-1][3] + found[-1][1] - found[-1][0] == offset:
                found[-1] = (found[-1][0], at + part.size, reader, found[-1][3])
            else:
                found.append((at, at + part.size, reader, offset))
            at += part.size
        return found

    def _place(self, parts: list[Part], data: Tensor) -> None:
        """Copies what this rank needs of a unit to where it belongs."""
        at = 0
        for part in parts:
            box, dtype = part.shard.box, BY_SAFETENSORS[part.record.dtype]
            stored: torch.dtype = getattr(torch, dtype.torch)
            for piece in self._pieces.get((part.section, part.name), ()):
                if piece.box == box and in_place(piece.tensor, stored):
                    ctypes.memmove(piece.tensor.data_ptr() + part.start, data.data_ptr() + at, part.size)
                elif meets(box, piece.box):
                    values, first = as_dtype(data[at : at + part.size], stored), part.start // dtype.itemsize
                    for inner, begin in boxes_of_run(box, first, part.size // dtype.itemsize):
                        copy_overlap(values[begin - first :][: inner.numel].reshape(inner.shape), inner, piece)
            at += part.size

    def _damage(self, part: Part, what: str) -> DamagedCheckpointError:
        file, name = self._source.file_name(part.shard), part.name
        return DamagedCheckpointError(f"{file}: {name[:300]}: {what}", file=file, tensor=name)


def _size(parts: Sequence[Part]) -> int:
    return sum(part.size for part in parts)
