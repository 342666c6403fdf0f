"""A converted checkpoint as a committed iteration of ours, written as every save is: staged, checked, one rename."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from math import prod

from torch import Tensor

from perdure import __version__
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import discard, publish, stage
from perdure.catalog.root import Root
from perdure.convert.state import Item, State
from perdure.engine.writer import WriteBuffers, write_tensors
from perdure.errors import UsageError
from perdure.format.commit import CommitRecord
from perdure.format.metadata import SECTIONS, CheckpointMetadata, Section, ShardRecord, TensorRecord
from perdure.format.names import shard_filename

__all__ = ["write_iteration"]

_KIND: dict[Section, str] = {"model": "model", "optimizer": "opt", "extra": "extra"}


def write_iteration(
    state: State,
    root_path: str | os.PathLike[str],
    *,
    prefix: str = "checkpoint",
    advance: Callable[[int], None] = lambda count: None,
) -> CommitRecord:
    """Writes `state` below a root that holds no run yet, as the first save of a new lineage, by one rank.

    Raises:
        UsageError: the root already holds iterations.
        RootLockedError: another process writes below it.
        OSError: the storage failed; nothing is visible then.
    """
    root = Root(os.path.abspath(os.fspath(root_path)))
    os.makedirs(root.path, exist_ok=True)
    attempt, lineage = uuid.uuid4().hex[:12], uuid.uuid4().hex[:16]
    lock = RootLock.acquire(root.path, attempt=attempt)
    try:
        if root.listing().iterations:
            raise UsageError(f"{root.path} already holds a run; nothing is added to it", hint="name another root")
        staging = stage(root, state.common.global_step, attempt, 1)
        try:
            metadata = _write_files(state, root, staging.path, f"{lineage}-1", prefix, advance)
            return publish(
                staging,
                metadata,
                state.common,
                lineage=lineage,
                parent=0,
                attempt=attempt,
                ranks=1,
                writer=f"perdure {__version__} import",
                lock=lock,
                now=time.time,
            )
        except BaseException:
            discard(staging)
            raise
    finally:
        lock.release()


def _write_files(
    state: State, root: Root, path: str, mark: str, prefix: str, advance: Callable[[int], None]
) -> CheckpointMetadata:
    metadata = CheckpointMetadata(training=state.training)
    buffers = WriteBuffers()
    try:
        for section in SECTIONS:
            items = {item.name: item for item in state.section(section)}
            held = [item for item in items.values() if prod(item.shape)]
            for item in items.values():
                record = TensorRecord(item.dtype, item.shape, [], item.logical, item.aliases)
                metadata.section(section)[item.name] = record
            if not held:
                continue
            name = shard_filename(prefix, _KIND[section], 0, 1)
            written = write_tensors(
                root.storage,
                os.path.join(path, name),
                name,
                [(item.name, item.dtype, item.shape) for item in held],
                lambda key, known=items: _load(known[key], advance),  # type: ignore[misc]
                {"format": "pt", "save": mark, "rank": "0"},
                buffers,
            )
            for item in held:
                digest, blocks = written.digests[item.name]
                shard = ShardRecord(len(metadata.files), (0,) * len(item.shape), item.shape, digest, blocks)
                metadata.section(section)[item.name].shards.append(shard)
            metadata.files.append(written.record)
    finally:
        buffers.close()
    metadata.check()
    return metadata


def _load(item: Item, advance: Callable[[int], None]) -> Tensor:
    tensor = item.load()
    advance(item.nbytes)
    return tensor
