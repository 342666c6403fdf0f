"""One rank of a group reads for the others, which get its batches over the network.

The ranks of a tensor, pipeline or context group need the same samples. With this, only the first of them
has worker processes and touches the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from perdure.data.record import StreamRecord
from perdure.data.share import Runs, positions_of
from perdure.data.stepping import MicroBatch, SteppedLoader
from perdure.errors import DataError, RanksError, UsageError

__all__ = ["SharedLoader"]

_PLAIN = (bool, int, float, str, bytes, type(None))


class SharedLoader(SteppedLoader):
    """The batches of a loader on every rank of a group, identical in every bit.

    Args:
        loader: on every rank of the group, over the same data and with the same settings; only the first one's
            is made to read.
        group: a process group that carries CPU tensors.
        ranks: global ranks in it; the first one reads.

    Raises:
        UsageError: the loader's position is a state of the data set, which the ranks that don't read would lack.
    """

    def __init__(self, loader: SteppedLoader, group: Any, ranks: Sequence[int]) -> None:
        if loader.by_state:
            raise UsageError(
                "use_distribute_dataset: data that can only be read in a row must be read by every rank",
                hint="leave it out, or use a map-style data set",
            )
        super().__init__(loader.share, loader.length)
        self._loader, self._group, self._source = loader, group, ranks[0]
        self._reads = dist.get_rank() == self._source

    @property
    def warnings(self) -> list[str]:
        """Those of the loader."""
        return self._loader.warnings

    def use_stretches(self, stretches: Sequence[Sequence[int]]) -> None:
        self._loader.use_stretches(stretches)
        self._pass += 1

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        self._loader.leave_out(ranges)
        super().leave_out(ranges)

    def identity(self) -> dict[str, Any]:
        """That of the loader."""
        return self._loader.identity()

    def record(self) -> StreamRecord:
        """That of the loader."""
        return self._loader.record()

    def _close_workers(self) -> None:
        self._loader.close()

    def _begin(self, steps: int | None) -> None:
        if not self._reads:
            return
        self._loader.seek(self._consumed)
        try:
            self._loader._begin(steps)
        except DataError as error:
            self._send(error)
            raise

    def _micro_batches(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        if not self._reads:
            return self._receive(runs)
        try:
            batches = self._loader._micro_batches(runs)
            tree, tensors = _taken_apart([[micro.data, micro.ids] for micro in batches])
        except (DataError, UsageError) as error:
            self._send(error)
            raise
        self._broadcast_header(["batches", tree])
        for tensor in tensors:
            self._broadcast(_bytes_of(tensor))
        return batches

    def _receive(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        kind, content = self._broadcast_header(None)
        if kind != "batches":
            message, hint = content
            raise (DataError if kind == "data" else UsageError)(f"rank {self._source}: {message}", hint=hint)

        def tensor(dtype: str, shape: list[int]) -> Tensor:
            empty = torch.empty(shape, dtype=getattr(torch, dtype))
            self._broadcast(_bytes_of(empty))
            return empty

        return [
            MicroBatch(positions[0][0], data, ids, positions_of(positions))
            for positions, (data, ids) in zip(runs, _put_together(content, tensor), strict=True)
        ]

    def _send(self, error: DataError | UsageError) -> None:
        kind = "data" if isinstance(error, DataError) else "usage"
        self._broadcast_header([kind, [error.message, error.hint]])

    def _broadcast_header(self, header: Any) -> Any:
        content = bytearray(msgspec.msgpack.encode(header))
        size = torch.tensor([len(content)])
        self._broadcast(size)
        sent = torch.frombuffer(content, dtype=torch.uint8)
        received = sent if self._reads else torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(received)
        return msgspec.msgpack.decode(received.numpy().tobytes())

    def _broadcast(self, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        try:
            dist.broadcast(tensor, self._source, group=self._group)
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            raise RanksError(
                f"rank {dist.get_rank()} waited for a rank of its group over a batch, and one is gone ({text})",
                hint="look at the first error of the other ranks; start the same command again to resume",
            ) from None


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _taken_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """A tree that msgspec can encode, and the tensors in it, on the CPU and contiguous, in order."""
    tensors: list[Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors.append(item.detach().cpu().contiguous())
            return ["tensor", str(item.dtype).removeprefix("torch."), list(item.shape)]
        if isinstance(item, np.ndarray):
            return ["array", walk(torch.from_numpy(item))]
        if type(item) is dict and all(isinstance(key, str | int) for key in item):
            return ["dict", [[key, walk(each)] for key, each in item.items()]]
        if type(item) in (list, tuple):
            return [type(item).__name__, [walk(each) for each in item]]
        if isinstance(item, _PLAIN):
            return ["plain", item]
        raise UsageError(
            f"use_distribute_dataset: a batch holds a {type(item).__qualname__}, which cannot be sent to other ranks",
            hint="give tensors, arrays, numbers and texts in dictionaries, lists and tuples; see collate_fn",
        )

    return walk(value), tensors


def _put_together(tree: Any, tensor: Callable[[str, list[int]], Tensor]) -> Any:
    kind, *content = tree
    if kind == "tensor":
        return tensor(*content)
    if kind == "array":
        return _put_together(content[0], tensor).numpy()
    if kind == "dict":
        return {key: _put_together(each, tensor) for key, each in content[0]}
    if kind == "plain":
        return content[0]
    items = [_put_together(each, tensor) for each in content[0]]
    return items if kind == "list" else tuple(items)
