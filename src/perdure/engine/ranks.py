"""The ranks of a job: what they tell each other, and how an error of one ends all.

Every exchange goes over a gloo group of our own with a deadline, so that a lost rank is an error that
names it and never a hang. A job of one process makes no exchange at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from perdure import errors
from perdure.errors import PerdureError, RanksError

__all__ = ["Ranks"]

T = TypeVar("T")
DEADLINE_S = float(os.environ.get("PERDURE_RANK_DEADLINE", "300"))


class Ranks:
    """This process among its peers.

    Args:
        deadline_s: how long an exchange may take before it is an error.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._group: Any = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            if self.size > 1:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Every rank's `value` (anything msgspec encodes), in the order of the ranks, on every rank.

        Raises:
            RanksError: a rank did not answer in time; `doing` says what was under way.
        """
        if self.size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
            longest = max(int(s) for s in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = mine
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        except RuntimeError as error:
            raise self._lost(doing, error) from None
        return [
            msgspec.msgpack.decode(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)
        ]

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Raises on every rank if any rank has an error: its own where it happened, `RanksError` elsewhere.

        Where the same class fits (damage, mismatch), the others raise that class, so that all take the
        same branch.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        mine = None if error is None else [type(error).__name__, _one_line(error), getattr(error, "hint", None)]
        reports = self.gather(mine, doing)
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if not failed:
            return
        if error is not None and failed[0][0] == self.rank:
            raise error
        rank, (kind, text, hint) = failed[0]
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, PerdureError):
            raise known(f"rank {rank}: {text}", hint=hint) from error
        raise RanksError(f"rank {rank} failed while {doing}: {kind}: {text}", hint=hint) from error

    def together(self, work: Callable[[], T], doing: str) -> T:
        """Runs `work` on every rank, then agrees on errors; its result on this rank."""
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        self.agree(error, doing)
        return result  # type: ignore[return-value]

    def decide(self, work: Callable[[], T], doing: str, kind: type[T] | None = None) -> T:
        """Runs `work` on rank 0 and gives its result (anything msgspec encodes) to every rank."""
        result = self.together(lambda: work() if self.is_first else None, doing)
        if self.size == 1:
            return result  # type: ignore[return-value]
        shared = self.gather(result if self.is_first else None, doing)[0]
        return msgspec.convert(shared, kind) if kind is not None else shared

    def sum(self, value: Tensor, doing: str) -> Tensor:
        """Sum of a CPU tensor over all ranks, in place."""
        if self.size > 1:
            try:
                dist.all_reduce(value, group=self._group)
            except RuntimeError as error:
                raise self._lost(doing, error) from None
        return value

    def barrier(self, doing: str) -> None:
        """Waits for every rank, at most the deadline."""
        self.sum(torch.zeros(1), doing)

    def _lost(self, doing: str, error: Exception) -> RanksError:
        return RanksError(
            f"rank {self.rank} waited for the other ranks while {doing}, and one of them is gone or did not answer "
            f"within {self.deadline_s:g} s ({_one_line(error)[:200]})",
            hint="look at the first error of the other ranks; start the same command again to resume",
        )


def _one_line(error: BaseException) -> str:
    text = error.message if isinstance(error, PerdureError) else str(error)
    return " ".join(text.split())[:2000]
