"""Reading an iterable data set in one process: samples in order, its state after each step, epochs on end.

Only the data set itself can say where it stands, so its state is taken in the process that reads it, after
exactly the samples of a step, and delivered with them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import get_worker_info

from perdure.data.fetch import Failure, failure, transferable
from perdure.data.randomness import SampleKeys, Streams
from perdure.data.transfer import Parcel
from perdure.errors import DataError
from perdure.state.random import seed_cpu

__all__ = ["StreamFetcher", "StreamTask", "content_id"]

Runs = Sequence[tuple[int, int]]


class StreamTask(NamedTuple):
    """A micro-batch to read from where the last task ended.

    Attributes:
        begin: where to begin first: `{}` at the very start, a state, or None to go on.
        before, after: stream positions whose samples are read and dropped, before and after.
        runs: stream positions of the micro-batch; what lies between them is read and dropped.
        keep_state: deliver the state after it.
    """

    begin: Mapping[str, Any] | None
    before: Runs
    runs: Runs
    after: Runs
    keep_state: bool


class StreamFetcher:
    """Serves tasks from an iterator, in order.

    Args:
        dataset: anything that can be iterated; `set_epoch(n)` is called where it has that.
        seed: the run's seed.
        collate: list of samples to batch.
        name: what the data set is called in errors.
        speaks: whether it has `state_dict` and `load_state_dict`.
        board: as for `Fetcher`.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[list[Any]], Any],
        *,
        name: str,
        speaks: bool,
        board: MutableSequence[int] | None = None,
    ) -> None:
        self._dataset, self._collate, self._name, self._speaks, self._board = dataset, collate, name, speaks, board
        self._keys = SampleKeys(seed)
        self._streams: Streams | None = None
        self._epoch = 0
        self._current: Any = None
        self._iterator: Iterator[Any] | None = None

    def __getitem__(self, task: StreamTask) -> tuple[Any, list[int], Any] | Parcel | Failure:
        worker = get_worker_info()
        if self._streams is None:
            self._streams = Streams()
            self._streams.own_numpy() if worker is not None else None
        if worker is not None:
            return transferable(self._read(task), self._name, task.runs)
        with self._streams:
            return self._read(task)

    def _read(self, task: StreamTask) -> tuple[Any, list[int], Any] | Failure:
        if task.begin is not None:
            try:
                self._begin(task.begin, next(_positions([*task.before, *task.runs])))
            except Exception as error:
                what = "going on from its state" if task.begin.get("state") is not None else "beginning"
                return failure(error, self._name, f"{what} at stream position {task.begin.get('position', 0)}")
        position = 0
        try:
            for position in _positions(task.before):
                self._next(position)
            samples, ids = [], []
            place = task.runs[0][0]
            for first, last in task.runs:
                for position in range(place, first):
                    self._next(position)
                for position in range(first, last):
                    sample = self._next(position)
                    samples.append(sample)
                    ids.append(content_id(sample))
                place = last
        except Exception as error:
            return failure(error, self._name, f"reading the sample at stream position {position}")
        first, last = task.runs[0][0], task.runs[-1][1]
        try:
            seed_cpu(self._keys.collate(first))
            data = self._collate(samples)
        except Exception as error:
            return failure(error, self._name, f"collating the samples at stream positions [{first}, {last})")
        try:
            for position in _positions(task.after):
                self._next(position)
            state = self._state() if task.keep_state else None
        except Exception as error:
            return failure(error, self._name, f"taking its state after stream position {position}")
        return data, ids, state

    def _begin(self, state: Mapping[str, Any], position: int) -> None:
        self._epoch = int(state.get("epoch", 0))
        self._start_epoch(position, state.get("state"))

    def _start_epoch(self, position: int, state: Any = None) -> None:
        # Beginning may draw an order, or read a first sample already.
        seed_cpu(self._keys.sample(position))
        # A copy each time: what has been iterated, or given a state, would not start from its beginning again.
        try:
            self._current = copy.copy(self._dataset)
        except TypeError:
            if self._speaks:
                raise
            self._current = self._dataset  # a generator, which can be gone through once
        if callable(getattr(self._current, "set_epoch", None)):
            self._current.set_epoch(self._epoch)
        if state is not None:
            self._current.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._current)

    def _next(self, position: int) -> Any:
        assert self._iterator is not None
        if self._board is not None and get_worker_info() is not None:
            self._board[1], self._board[2] = position, position
        seed_cpu(self._keys.sample(position))
        try:
            return next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._start_epoch(position)
        seed_cpu(self._keys.sample(position))
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError(
                "it gives no sample when it is begun anew",
                hint="an epoch has at least one sample; a generator can be gone through once, an object whose "
                "__iter__ begins anew as often as needed",
            ) from None

    def _state(self) -> dict[str, Any]:
        own = copy.deepcopy(self._current.state_dict()) if self._speaks else None
        return {"epoch": self._epoch, "state": own}


def content_id(sample: Any) -> int:
    """What stands for a sample without an index: 63 bits of a digest of its tensors, arrays, numbers and texts."""
    hasher = xxhash.xxh3_64()
    _feed(hasher, sample)
    return int(hasher.intdigest() >> 1)


def _feed(hasher: Any, value: Any) -> None:
    def note(text: str) -> None:
        hasher.update(text.encode("utf-8", "surrogatepass"))

    if isinstance(value, torch.Tensor):
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        plain = dense.cpu().resolve_conj().resolve_neg().contiguous()
        note(f"{plain.dtype}{tuple(plain.shape)}")
        hasher.update(plain.view(-1).view(torch.uint8).numpy() if plain.numel() else b"")
    elif isinstance(value, np.ndarray | np.generic):
        note(f"{value.dtype}{value.shape}")
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            note(f"{key!r}:")
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        note(f"[{len(value)}")
        for item in value:
            _feed(hasher, item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        note(type(value).__qualname__)
        for field in dataclasses.fields(value):
            note(f"{field.name}:")
            _feed(hasher, getattr(value, field.name))
    elif isinstance(value, bytes):
        hasher.update(value)
    elif value is None or isinstance(value, bool | int | float | str):
        note(repr(value))
    else:
        # An object's text may hold its address, which no two processes share.
        note(type(value).__qualname__)


def _positions(runs: Runs) -> Iterator[int]:
    return chain.from_iterable(range(*run) for run in runs)
