"""What a worker does: read the samples of one micro-batch in their own random streams, and collate."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from perdure.data.randomness import collate_key, preserved_streams, sample_key, seed_streams
from perdure.errors import DataError

__all__ = ["BOARD_FIELDS", "Delivery", "Failure", "Fetcher", "Order", "Task"]

# The kept stream positions of a micro-batch, as (first, last) pairs.
Task = tuple[tuple[int, int], ...]

# Per worker on the shared board: process id, position and index of the sample in hand.
BOARD_FIELDS = 3


class Order(Protocol):
    """Which data set index stands at which stream position."""

    def slice(self, first: int, last: int) -> list[int]:
        """Data set indices at the stream positions [first, last)."""
        ...


@dataclass(frozen=True)
class Delivery:
    """What was read for a task: the indices asked of the data set, in order."""

    task: Task
    ids: list[int]


@dataclass(frozen=True)
class Failure:
    """Why a task could not be served; travels between processes, so it holds text only."""

    what: str
    error: str
    trace: str
    hint: str | None

    def raise_error(self) -> None:
        """Raises the DataError that this stands for."""
        raise DataError(f"{self.what}: {self.error}", hint=self.hint) from WorkerTraceback(self.trace)


class WorkerTraceback(Exception):
    """The original traceback, as text, shown as the cause of the error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Fetcher:
    """A map from tasks to collated micro-batches, run in a worker process or in the caller's own.

    Args:
        dataset: anything with `__getitem__(int)`.
        order: stream position to index.
        seed: the run's seed.
        collate: list of samples to batch.
        name: what the data set is called in errors.
        draws_random: whether the streams are seeded; False only for what never draws from them.
        board: shared integers on which each worker notes the sample in hand, or None.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        seed: int,
        collate: Callable[[list[Any]], Any],
        *,
        name: str,
        draws_random: bool = True,
        board: MutableSequence[int] | None = None,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self._seed = seed
        self._collate = collate
        self._name = name
        self._draws_random = draws_random
        self._board = board

    def __getitem__(self, task: Task) -> tuple[Any, Delivery] | Failure:
        worker = get_worker_info()
        if worker is not None:
            fetched = self._fetch(task, worker.id)
            return self._transferable(task, fetched)
        if not self._draws_random:
            return self._fetch(task, None)
        with preserved_streams():
            return self._fetch(task, None)

    def _fetch(self, task: Task, worker: int | None) -> tuple[Any, Delivery] | Failure:
        ids = [index for first, last in task for index in self._order.slice(first, last)]
        positions = (position for first, last in task for position in range(first, last))
        samples = []
        slot = None if worker is None or self._board is None else worker * BOARD_FIELDS
        for position, index in zip(positions, ids, strict=True):
            if slot is not None and self._board is not None:
                self._board[slot + 1], self._board[slot + 2] = position, index
            try:
                if self._draws_random:
                    seed_streams(sample_key(self._seed, position))
                samples.append(self._dataset[index])
            except Exception as error:
                return self._failure(error, f"{self._where(index)}, stream position {position}")
        first, last = task[0][0], task[-1][1]
        try:
            if self._draws_random:
                seed_streams(collate_key(self._seed, first))
            data = self._collate(samples)
        except Exception as error:
            return self._failure(error, f"collating the samples at stream positions [{first}, {last})")
        return data, Delivery(task, ids)

    def _where(self, index: int) -> str:
        """The sample in the user's words: its index, and its file when the source knows it."""
        whereabouts = getattr(self._dataset, "whereabouts", None)
        if whereabouts is not None:
            try:
                return f"sample {index} ({whereabouts(index)})"
            except Exception as error:
                # The sample's own error matters more than the failure to locate it.
                return f"sample {index} (not located: {error})"
        return f"sample {index}"

    def _failure(self, error: Exception, what: str) -> Failure:
        text = error.message if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, DataError) else None
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return Failure(f"{self._name}, {what}", text, trace, hint)

    def _transferable(self, task: Task, fetched: tuple[Any, Delivery] | Failure) -> tuple[Any, Delivery] | Failure:
        """The batch, or a failure when it cannot leave the process: a queue would drop it and hang."""
        if isinstance(fetched, Failure):
            return fetched
        try:
            for leaf in _leaves(fetched[0]):
                if not isinstance(
                    leaf, (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float, bool, type(None))
                ):
                    ForkingPickler.dumps(leaf)
        except Exception as error:
            return self._failure(error, f"handing over stream positions [{task[0][0]}, {task[-1][1]}) from the worker")
        return fetched


def _leaves(data: Any) -> Iterable[Any]:
    if isinstance(data, Mapping) and type(data) is dict:
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, Sequence) and type(data) in (list, tuple):
        for value in data:
            yield from _leaves(value)
    else:
        yield data
