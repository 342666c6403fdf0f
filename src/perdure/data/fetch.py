"""What a worker does: read the samples of one micro-batch in their own random streams, and collate."""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from perdure.data.randomness import SampleKeys, Streams
from perdure.data.transfer import Parcel
from perdure.errors import DataError

__all__ = ["BOARD_FIELDS", "Failure", "Fetcher", "Task", "failure", "transferable", "where"]

# Per worker on the shared board: process id, position and index of the sample in hand.
BOARD_FIELDS = 3

Seeders = list[Callable[[int], object]]

Fetched = tuple[Any, "list[int] | bytes"]
"""A collated micro-batch, and the data set indices that were read for it: as bytes of int64 between processes."""


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
        draws_random: False only for what never draws from the global random streams.
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
        self._collate = collate
        self._name = name
        self._board = board
        self._keys = SampleKeys(seed)
        self._draws_random = draws_random
        self._streams: Streams | None = None

    def __getitem__(self, task: Task) -> Fetched | Parcel | Failure:
        worker = get_worker_info()
        if worker is not None:
            return transferable(self._fetch(task, worker.id), self._name, task.runs)
        if not self._draws_random:
            return self._read(task, None, [])
        if self._streams is None:
            self._streams = Streams()
        with self._streams:
            return self._fetch(task, None)

    def _fetch(self, task: Task, worker: int | None) -> Fetched | Failure:
        """A micro-batch that has drawn from a stream which isn't seeded is read again with that one seeded too.

        So the outcome is the same as if all streams were seeded for each sample.
        """
        if not self._draws_random:
            return self._read(task, worker, [])
        if self._streams is None:
            self._streams = Streams()
            self._streams.own_numpy()
        while True:
            self._streams.watch()
            fetched = self._read(task, worker, self._streams.seeded)
            if not self._streams.found_draws():
                return fetched

    def _read(self, task: Task, worker: int | None, seeded: Seeders) -> Fetched | Failure:
        samples: list[Any] | Failure | None = None if seeded else self._read_at_once(task, worker)
        if samples is None:
            samples = self._read_one_by_one(task, worker, seeded)
        return samples if isinstance(samples, Failure) else self._collated(samples, task, worker, seeded)

    def _read_at_once(self, task: Task, worker: int | None) -> list[Any] | None:
        """All samples in one go where nothing is to be done for each; None where one cannot be read.

        `__getitems__` is what torch's DataLoader asks a data set for a batch by.
        """
        dataset = self._dataset
        many = getattr(dataset, "__getitems__", None)
        if many is None and worker is not None:
            return None  # each sample is noted on the board
        try:
            return list(many(task.ids)) if many is not None else [dataset[index] for index in task.ids]
        except Exception:
            return None  # reading one by one tells which

    def _read_one_by_one(self, task: Task, worker: int | None, seeded: Seeders) -> list[Any] | Failure:
        samples = []
        dataset, sample_key = self._dataset, self._keys.sample
        board, slot = (None, 0) if worker is None else (self._board, worker * BOARD_FIELDS)
        position = index = 0
        try:
            for position, index in zip(chain.from_iterable(range(*run) for run in task.runs), task.ids, strict=True):
                if board is not None:
                    board[slot + 1], board[slot + 2] = position, index
                if seeded:
                    key = sample_key(position)
                    for seed in seeded:
                        seed(key)
                samples.append(dataset[index])
        except Exception as error:
            return failure(error, self._name, f"{where(dataset, index)}, stream position {position}")
        return samples

    def _collated(self, samples: list[Any], task: Task, worker: int | None, seeded: Seeders) -> Fetched | Failure:
        try:
            if seeded:
                key = self._keys.collate(task.runs[0][0])
                for seed in seeded:
                    seed(key)
            data = self._collate(samples)
        except Exception as error:
            first, last = task.runs[0][0], task.runs[-1][1]
            return failure(error, self._name, f"collating the samples at stream positions [{first}, {last})")
        return data, task.ids if worker is None else array("q", task.ids).tobytes()


def where(dataset: Any, index: int) -> str:
    """A sample in the user's words: its index, and its file when the source knows it."""
    whereabouts = getattr(dataset, "whereabouts", None)
    if whereabouts is not None:
        try:
            return f"sample {index} ({whereabouts(index)})"
        except Exception as error:
            # The sample's own error matters more than the failure to locate it.
            return f"sample {index} (not located: {error})"
    return f"sample {index}"


def failure(error: Exception, name: str, what: str) -> Failure:
    """What an error at `what` of the data set called `name` comes to."""
    text = error.message if isinstance(error, DataError) else _told(error)
    hint = error.hint if isinstance(error, DataError) else None
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(f"{name}, {what}", text, trace, hint)


def _told(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, which has no text"


def transferable(fetched: Any, name: str, runs: Sequence[tuple[int, int]]) -> Parcel | Failure:
    """What was fetched, fit for being sent, or a failure where it cannot leave the process."""
    if isinstance(fetched, Failure):
        return fetched
    try:
        return Parcel(fetched)
    except Exception as error:
        return failure(error, name, f"handing over stream positions [{runs[0][0]}, {runs[-1][1]}) from the worker")
