"""One rank of a group reads for the others, which get its batches over the network.

The ranks of a tensor, pipeline or context group need the same samples. With this, only the first of them
has worker processes and touches the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from perdure.data.growth import Stretches
from perdure.data.record import StreamRecord
from perdure.data.share import Runs, positions_of
from perdure.data.stepping import MicroBatch, SteppedLoader
from perdure.errors import DataError, PerdureError, RanksError, UsageError

__all__ = ["SharedLoader"]

_SENDABLE = "give tensors, arrays, numbers and texts in dictionaries, lists and tuples; see collate_fn"
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

    @property
    def stretches(self) -> Stretches:
        return self._loader.stretches

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
        with self._errors_told():
            self._loader._begin(steps)

    def _micro_batches(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        if not self._reads:
            return self._receive(runs)
        with self._errors_told():
            batches = self._loader._micro_batches(runs)
            tree, tensors = _taken_apart([[micro.data, micro.ids] for micro in batches])
            header, contents = _encoded(["batches", tree]), [_bytes_of(tensor) for tensor in tensors]
        self._broadcast_header(header)
        for content in contents:
            self._broadcast(content)
        return batches

    @contextmanager
    def _errors_told(self) -> Iterator[None]:
        """Around what only the reading rank does: any error reaches the others, which wait for a batch."""
        try:
            yield
        except BaseException as error:
            kind = "usage" if isinstance(error, UsageError) else "data"
            message, hint = f"{type(error).__name__}: {error}", None
            if isinstance(error, PerdureError):
                message, hint = error.message, error.hint
            # Texts may hold what UTF-8 cannot; and where the others are gone too, the error itself matters more.
            clean = [text and text.encode("utf-8", "backslashreplace").decode() for text in (message, hint)]
            with suppress(RanksError):
                self._broadcast_header(_encoded([kind, clean]))
            raise

    def _receive(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        kind, content = msgspec.msgpack.decode(self._broadcast_header(b""))
        if kind != "batches":
            message, hint = content
            raise (DataError if kind == "data" else UsageError)(f"rank {self._source}: {message}", hint=hint)

        def tensor(dtype: str, shape: list[int]) -> Tensor:
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
            self._broadcast(_bytes_of(empty))
            return empty

        return [
            MicroBatch(positions[0][0], data, ids, positions_of(positions))
            for positions, (data, ids) in zip(runs, _put_together(content, tensor), strict=True)
        ]

    def _broadcast_header(self, header: bytes) -> bytes:
        """The header that the reading rank gives."""
        content = bytearray(header)
        size = torch.tensor([len(content)], device="cpu")
        self._broadcast(size)
        received = (
            torch.frombuffer(content, dtype=torch.uint8)
            if content
            else torch.empty(int(size), dtype=torch.uint8, device="cpu")
        )
        self._broadcast(received)
        return received.numpy().tobytes()

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


def _encoded(header: Any) -> bytes:
    """As msgpack.

    Raises:
        UsageError: a number or text in it is one that msgpack cannot hold.
    """
    try:
        return msgspec.msgpack.encode(header)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"use_distribute_dataset: a batch holds what cannot be sent to other ranks: {error}", hint=_SENDABLE
        ) from error


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _taken_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """A tree that msgspec can encode, and the tensors in it, on the CPU and contiguous, in order."""
    tensors: list[Tensor] = []

    def walk(item: Any) -> Any:
        if isinstance(item, Tensor) and _is_dense(item):
            tensors.append(item.detach().cpu().resolve_conj().resolve_neg().contiguous())
            return ["tensor", str(item.dtype).removeprefix("torch."), list(item.shape)]
        if isinstance(item, np.ndarray) and item.dtype.kind in "biufc" and item.dtype.isnative:
            return ["array", walk(torch.from_numpy(np.asarray(item, order="C")))]
        if type(item) is dict and all(isinstance(key, str | int) for key in item):
            return ["dict", [[key, walk(each)] for key, each in item.items()]]
        if type(item) in (list, tuple):
            return [type(item).__name__, [walk(each) for each in item]]
        if isinstance(item, _PLAIN):
            return ["plain", item]
        raise UsageError(
            f"use_distribute_dataset: a batch holds a {_told(item)}, which cannot be sent to other ranks",
            hint=_SENDABLE,
        )

    return walk(value), tensors


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _told(item: Any) -> str:
    kind = type(item).__qualname__
    if isinstance(item, Tensor):
        return f"{kind} of layout {item.layout}"
    return f"{kind} of {item.dtype}" if isinstance(item, np.ndarray) else kind


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
