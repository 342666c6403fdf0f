"""A converted checkpoint as a committed iteration of ours, written as every save is: staged, checked, one rename."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping

from torch import Tensor

from perdure import __version__
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import Staging, discard, publish, recover, stage
from perdure.catalog.root import Root
from perdure.convert.evenly import of_section, shares
from perdure.convert.state import Item, State
from perdure.engine.writer import WriteBuffers, write_tensors
from perdure.errors import UsageError
from perdure.format.box import Box
from perdure.format.commit import CommitRecord
from perdure.format.metadata import SECTIONS, CheckpointMetadata, Section, ShardRecord, TensorRecord
from perdure.format.names import shard_filename

__all__ = ["write_iteration"]

_KIND: dict[Section, str] = {"model": "model", "optimizer": "opt", "extra": "extra"}

Advance = Callable[[int], None]


def write_iteration(
    state: State,
    root_path: str | os.PathLike[str],
    *,
    ranks: int = 1,
    origin: CommitRecord | None = None,
    prefix: str = "checkpoint",
    advance: Advance = lambda count: None,
) -> CommitRecord:
    """Writes `state` below a root that holds no iteration yet, cut evenly among `ranks`.

    Args:
        origin: the save that this is another writing of: it stays the same save of the same run. None: the first save
            of a new lineage.

    Raises:
        UsageError: the root already holds iterations, or cannot be made.
        RootLockedError: another process writes below it.
        OSError: the storage failed; nothing is visible then.
    """
    root = Root(os.path.abspath(os.fspath(root_path)))
    try:
        os.makedirs(root.path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{root_path} cannot be made: {error.strerror}", hint="name another root") from error
    attempt, lineage = uuid.uuid4().hex[:12], uuid.uuid4().hex[:16] if origin is None else origin.lineage
    lock = RootLock.acquire(root.path, attempt=attempt)
    try:
        if root.listing().iterations:
            raise UsageError(f"{root.path} already holds a run; nothing is added to it", hint="name another root")
        recover(root, attempt)
        staging = stage(root, state.common.global_step, attempt, 1 if origin is None else origin.sequence)
        try:
            metadata = _write_files(state, staging, f"{lineage}-{staging.sequence}", prefix, ranks, advance)
            return publish(
                staging,
                metadata,
                state.common,
                lineage=lineage,
                parent=0 if origin is None else origin.parent,
                attempt=attempt if origin is None else origin.attempt,
                ranks=ranks,
                writer=f"perdure {__version__} {'import' if origin is None else 'reshard'}",
                ledger_bytes=0 if origin is None else origin.ledger_bytes,
                ledger_digest="" if origin is None else origin.ledger_digest,
                lock=lock,
                now=time.time,
            )
        except BaseException:
            discard(staging)
            raise
    finally:
        lock.release()


def _write_files(
    state: State, staging: Staging, mark: str, prefix: str, ranks: int, advance: Advance
) -> CheckpointMetadata:
    metadata = CheckpointMetadata(training={**state.training, "ranks": ranks})
    for item in state.items:
        record = TensorRecord(item.dtype, item.shape, [], item.logical, item.aliases)
        metadata.section(item.section)[item.name] = record
    buffers = WriteBuffers()
    try:
        for rank, share in enumerate(shares(state.items, ranks)):
            for section in SECTIONS:
                held = of_section(share, section)
                if held:
                    name = shard_filename(prefix, _KIND[section], rank, ranks)
                    text = {"format": "pt", "save": mark, "rank": str(rank)}
                    _write_file(staging, metadata, section, name, held, text, buffers, advance)
    finally:
        buffers.close()
    metadata.check()
    return metadata


def _write_file(
    staging: Staging,
    metadata: CheckpointMetadata,
    section: Section,
    name: str,
    held: Mapping[str, tuple[Item, Box]],
    text: dict[str, str],
    buffers: WriteBuffers,
    advance: Advance,
) -> None:
    def load(key: str) -> Tensor:
        item, box = held[key]
        tensor = item.part(box)
        advance(tensor.numel() * tensor.element_size())
        return tensor

    shapes = [(key, item.dtype, box.shape) for key, (item, box) in held.items()]
    path = os.path.join(staging.path, name)
    written = write_tensors(staging.root.storage, path, name, shapes, load, text, buffers)
    for key, (_, box) in held.items():
        digest, blocks = written.digests[key]
        shard = ShardRecord(len(metadata.files), box.offset, box.shape, digest, blocks)
        metadata.section(section)[key].shards.append(shard)
    metadata.files.append(written.record)
