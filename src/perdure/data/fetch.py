"""What a worker does: read the samples of one micro-batch in their own random streams, and collate."""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import get_worker_info

from perdure.data.randomness import DrawDetector, StreamState, collate_key, preserved_streams, sample_key, seed_streams
from perdure.errors import DataError

__all__ = ["BOARD_FIELDS", "Failure", "Fetcher", "Order", "Task"]

# How many micro-batches are watched for draws before seeding is left off.
_WATCHED = 4

# Per worker on the shared board: process id, position and index of the sample in hand.
BOARD_FIELDS = 3


class Order(Protocol):
    """Which data set index stands at which stream position."""

    def gather(self, runs: Sequence[tuple[int, int]]) -> list[int]:
        """Data set indices at the stream positions of ascending ranges [first, last), in a row."""
        ...


class Task(NamedTuple):
    """A micro-batch to read: its kept stream positions as (first, last) pairs, and the data set indices there."""

    runs: tuple[tuple[int, int], ...]
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
        seed: the run's seed.
        collate: list of samples to batch.
        name: what the data set is called in errors.
        draws_random: whether the streams are seeded; False only for what never draws from them.
        board: shared integers on which each worker notes the sample in hand, or None.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any],
        *,
        name: str,
        draws_random: bool = True,
        board: MutableSequence[int] | None = None,
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        self._name = name
        self._board = board
        self._seeding = draws_random
        # Micro-batches still to be watched for draws; None: seeding is on or off for good.
        self._to_watch: int | None = _WATCHED if draws_random else None
        self._detector: DrawDetector | None = None

    def __getitem__(self, task: Task) -> tuple[Any, bytes] | Failure:
        worker = get_worker_info()
        if worker is not None:
            return self._transferable(task, self._fetch(task, worker.id))
        if not self._seeding and self._to_watch is None:
            return self._fetch(task, None)
        with preserved_streams():
            return self._fetch(task, None)

    def _fetch(self, task: Task, worker: int | None) -> tuple[Any, bytes] | Failure:
        """Seeding costs about ten microseconds per sample, so it is left off while nothing draws.

        The first micro-batches are watched. When none of them has drawn, later ones are read unseeded,
        and read again seeded should one of them draw after all: the outcome is the same either way.
        """
        if self._to_watch is None:
            return self._read(task, worker, seeded=self._seeding)
        if self._to_watch:
            fetched = self._read(task, worker, seeded=True)
            if self._to_watch:
                self._to_watch -= 1
            return fetched
        detector = self._detector = self._detector or DrawDetector()
        detector.arm()
        fetched = self._read(task, worker, seeded=False)
        if not detector.drawn():
            return fetched
        self._to_watch = None
        return self._read(task, worker, seeded=True)

    def _read(self, task: Task, worker: int | None, *, seeded: bool) -> tuple[Any, bytes] | Failure:
        samples = []
        dataset, board = self._dataset, self._board if worker is not None else None
        slot = (worker or 0) * BOARD_FIELDS
        positions = chain.from_iterable(range(*run) for run in task.runs)
        for position, index in zip(positions, task.ids, strict=True):
            if board is not None:
                board[slot + 1], board[slot + 2] = position, index
            try:
                if seeded:
                    self._begin_draws(sample_key(self._seed, position))
                samples.append(dataset[index])
                if seeded:
                    self._end_draws()
            except Exception as error:
                return self._failure(error, f"{self._where(index)}, stream position {position}")
        first, last = task.runs[0][0], task.runs[-1][1]
        try:
            if seeded:
                self._begin_draws(collate_key(self._seed, first))
            data = self._collate(samples)
            if seeded:
                self._end_draws()
        except Exception as error:
            return self._failure(error, f"collating the samples at stream positions [{first}, {last})")
        return data, array("q", task.ids).tobytes()

    def _begin_draws(self, key: int) -> None:
        seed_streams(key)
        if self._to_watch:
            self._fresh = StreamState()

    def _end_draws(self) -> None:
        if self._to_watch and self._fresh != StreamState():
            self._to_watch = None

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

    def _transferable(self, task: Task, fetched: tuple[Any, bytes] | Failure) -> tuple[Any, bytes] | Failure:
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
            return self._failure(
                error, f"handing over stream positions [{task.runs[0][0]}, {task.runs[-1][1]}) from the worker"
            )
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
