"""`ResumableLoader`: the samples of every step as a function of the position in the stream.

A step takes the next `global_batch_size` stream positions, cut into micro-batches of
`local_batch_size`; rank r of R gets the micro-batches r, r + R, r + 2R, ... of every step. So a step's
set of samples depends on neither the number of ranks nor that of workers, and nothing needs to be
stored but the number of consumed samples.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import gcd
from typing import Any, Protocol

import torch
import torch.distributed
from torch.utils.data import IterableDataset, default_collate

from perdure.data.cursor import BatchPlan, Counters, StepRange, counters
from perdure.data.fetch import Fetcher, Order, Task
from perdure.data.order import MAX_LENGTH, EpochOrder
from perdure.data.workers import Workers, new_board
from perdure.errors import DataError, UsageError
from perdure.format.keys import check_seed

__all__ = ["MicroBatch", "ResumableLoader", "StepBatch"]

Runs = tuple[tuple[int, int], ...]

# Samples whose indices are computed in one go.
_AHEAD = 2048


class Progress(Protocol):
    """What `ResumableLoader.resume` reads of a run's progress."""

    @property
    def global_step(self) -> int: ...
    @property
    def consumed_samples(self) -> int | None: ...
    @property
    def global_batch_size(self) -> int: ...


@dataclass(frozen=True)
class MicroBatch:
    """`local_batch_size` samples, collated.

    Attributes:
        first: stream position of the first sample.
        data: what `collate_fn` returned.
        ids: data set indices that were really read, in order.
        positions: stream positions of the samples: a range, or a tuple where a skip range lies inside.
    """

    first: int
    data: Any
    ids: list[int]
    positions: Sequence[int]


@dataclass(frozen=True)
class StepBatch:
    """One step's share of one rank. Iterating gives the `data` of its micro-batches.

    Attributes:
        first, last: stream positions [first, last) that the step consumes over all ranks.
        global_batch_size: samples of the step over all ranks (last - first, less what is skipped).
        micro_batches: those of this rank, in order.
    """

    first: int
    last: int
    global_batch_size: int
    micro_batches: list[MicroBatch]

    def __iter__(self) -> Iterator[Any]:
        return (micro_batch.data for micro_batch in self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


class ResumableLoader:
    """Loads a map-style data set from any position of its sample stream.

    The data set is anything with `__len__` and `__getitem__(int)`: a list, a torch or a Hugging Face
    data set, one of `perdure.data.sources`. It may say more about itself by these optional names:
    `identity() -> dict`, `whereabouts(index) -> str` (file and offset, for errors), `draws_random = False`
    (it never draws from global random streams, which saves seeding them), and
    `stream_order(seed, shuffle) -> Order` (a sample order of its own).

    Before each sample, Python's, numpy's and torch's default CPU streams are seeded from
    (seed, stream position); before collating, from (seed, first position of the micro-batch). With
    `num_workers=0` the caller's own streams are left as they were.

    Args:
        dataset: the samples.
        global_batch_size: samples per step over all ranks.
        local_batch_size: samples per micro-batch; default: the whole share of a rank, or with `rampup` the
            largest size that divides every step of the ramp.
        seed: the run's seed, in [0, 2^64).
        shuffle: a new order each epoch; False: 0, 1, 2, ... each epoch.
        num_workers: processes that read; may change freely between runs.
        prefetch: micro-batches in flight per worker.
        collate_fn: list of samples to batch; default: torch's `default_collate`.
        rank, ranks: this data-parallel rank and their number; default: torch.distributed's when initialised,
            else 0 of 1. Ranks that must read the same data (tensor parallel) pass the same rank.
        pin_memory: deliver tensors in pinned memory where there is an accelerator.
        skip_ranges: half-open ranges [first, last) of stream positions left out on purpose.
        rampup: [start, increment, samples], Megatron's `rampup_batch_size`.

    Raises:
        DataError: the data set is empty, too long, or has no random access.
        UsageError: sizes do not fit each other, or an argument is out of its range.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        local_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        pin_memory: bool = False,
        skip_ranges: Sequence[Sequence[int]] = (),
        rampup: Sequence[int] | None = None,
    ) -> None:
        self._dataset = dataset
        self._name = _name_of(dataset)
        self.length = _length_of(dataset)
        self.seed = check_seed(operator.index(seed))
        self.shuffle = shuffle
        self.rank, self.ranks = _rank_of(rank, ranks)
        self.plan = BatchPlan(operator.index(global_batch_size), rampup=rampup, skip_ranges=skip_ranges)
        self.local_batch_size = _local_batch_size(self.plan, local_batch_size, self.ranks)
        if num_workers < 0 or prefetch < 1:
            raise UsageError(
                f"num_workers must be at least 0 and prefetch at least 1, not {num_workers} and {prefetch}"
            )
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        own_order = getattr(dataset, "stream_order", None)
        self._order: Order = (
            own_order(self.seed, shuffle) if own_order else EpochOrder(self.length, self.seed, shuffle=shuffle)
        )
        self._collate = collate_fn or default_collate
        self._share = _Share(self.plan, self._order, self.local_batch_size, self.rank, self.ranks)
        # Torch's own collate function draws nothing; a given one may.
        self._draws_random = collate_fn is not None or bool(getattr(dataset, "draws_random", True))
        self._consumed = 0
        self._pass = 0
        self._workers: Workers | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks (at the end of the ramp, with `rampup`)."""
        return self.plan.global_batch_size

    @property
    def consumed_samples(self) -> int:
        """The next stream position: that after the last step which `take` has given out."""
        return self._consumed

    @property
    def counters(self) -> Counters:
        """`epoch_num` and `step_num` at the present position."""
        return counters(self._consumed, self.length, self.plan.batch_at(self._consumed))

    def seek(self, consumed_samples: int) -> None:
        """Goes to a stream position, aligned to steps or not. Reads nothing; ends passes in progress."""
        position = operator.index(consumed_samples)
        if position < 0:
            raise UsageError(f"consumed_samples must not be negative, but is {position}")
        self._consumed = position
        self._pass += 1

    def set_init_step(self, step: int) -> None:
        """Goes to where `step` steps from the beginning end, at this loader's batch size, ramp and skips."""
        self.seek(self.plan.consumed_at(operator.index(step)))

    def resume(self, progress: Progress) -> None:
        """Goes to the position of a run's progress: its consumed samples, whatever the batch size was.

        Where those are unknown (None; checkpoints made by others), `global_step * global_batch_size`.
        """
        consumed = progress.consumed_samples
        self.seek(progress.global_step * progress.global_batch_size if consumed is None else consumed)

    def take(self, steps: int | None = None) -> Iterator[StepBatch]:
        """The next steps from the present position; None: without end.

        `consumed_samples` advances as each step is given out, so a pass that is abandoned loses nothing:
        another `take` goes on after the last step given out. A new `take` or a `seek` ends a pass in progress.

        Raises:
            DataError: while iterating: a sample cannot be read, or a worker died; named with source, index,
                stream position and file where known.
            UsageError: `steps` is negative; while iterating: the pass was ended by `seek` or `take`.
        """
        if steps is not None and operator.index(steps) < 0:
            raise UsageError(f"steps must not be negative, but is {steps}")
        self._pass += 1
        return _Pass(self, self._pass, steps)

    def identity(self) -> dict[str, Any]:
        """What the data are: `type`, `length`, `fingerprint` (None where unknown), and what a source adds."""
        own = getattr(self._dataset, "identity", None)
        given = dict(own()) if callable(own) else {}
        return {"type": self._name, "length": self.length, "fingerprint": None, **given}

    def close(self) -> None:
        """Ends the worker processes. The loader stays usable: the next `take` starts new ones."""
        self._pass += 1
        self._close_workers()

    def __enter__(self) -> ResumableLoader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _close_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _begin(self, steps: int | None) -> None:
        if self._workers is None:
            board = new_board(self._num_workers)
            fetcher = Fetcher(
                self._dataset,
                self.seed,
                self._collate,
                name=self._name,
                draws_random=self._draws_random,
                board=board,
            )
            self._workers = Workers(
                fetcher,
                name=self._name,
                num_workers=self._num_workers,
                prefetch=self._prefetch,
                pin_memory=self._pin_memory,
                board=board,
            )
            weakref.finalize(self, self._workers.close)
        share, consumed = self._share, self._consumed
        try:
            self._workers.start(lambda: share.tasks(consumed, steps))
        except DataError:
            self._close_workers()
            raise

    def _next_step(self) -> StepBatch:
        assert self._workers is not None
        step = self.plan.step_range(self._consumed)
        micro_batches = []
        try:
            for runs in self._share.runs_of(step):
                data, ids = self._workers.next()
                micro_batches.append(MicroBatch(runs[0][0], data, ids, _positions(runs)))
        except DataError:
            self._pass += 1
            self._close_workers()
            raise
        self._consumed = step.last
        return StepBatch(step.first, step.last, step.global_batch_size, micro_batches)


class _Pass(Iterator[StepBatch]):
    """One `take`: valid until the loader begins another or moves."""

    def __init__(self, loader: ResumableLoader, number: int, steps: int | None) -> None:
        self._loader = loader
        self._number = number
        self._left = steps
        self._begun = False

    def __next__(self) -> StepBatch:
        if self._left == 0:
            raise StopIteration
        if self._loader._pass != self._number:
            raise UsageError(
                "this pass over the loader has ended: the loader was moved, closed, failed or began another take()",
                hint="take a new iterator from loader.take() after seek()",
            )
        if not self._begun:
            self._loader._begin(self._left)
            self._begun = True
        step = self._loader._next_step()
        if self._left is not None:
            self._left -= 1
        return step


@dataclass(frozen=True)
class _Share:
    """Which micro-batches of which steps are this rank's."""

    plan: BatchPlan
    order: Order
    local_batch_size: int
    rank: int
    ranks: int

    def tasks(self, consumed: int, steps: int | None) -> Iterator[Task]:
        """The tasks of the next steps from a position, in order.

        The order is computed for several micro-batches at once, which costs a fraction of one by one.
        """
        ahead = self._runs(consumed, steps)
        amount = 1
        while bundle := list(islice(ahead, amount)):
            ids = self.order.gather([run for runs in bundle for run in runs])
            for number, runs in enumerate(bundle):
                yield Task(runs, ids[number * self.local_batch_size : (number + 1) * self.local_batch_size])
            amount = min(2 * amount, max(1, _AHEAD // self.local_batch_size))

    def _runs(self, consumed: int, steps: int | None) -> Iterator[Runs]:
        done = 0
        while steps is None or done < steps:
            step = self.plan.step_range(consumed)
            yield from self.runs_of(step)
            consumed = step.last
            done += 1

    def runs_of(self, step: StepRange) -> Iterator[Runs]:
        """The kept positions of each of this rank's micro-batches of a step."""
        skips, size = self.plan.skips, self.local_batch_size
        kept = skips.kept_before(step.first)
        for number in range(self.rank, step.global_batch_size // size, self.ranks):
            first = skips.position_of(kept + number * size)
            last = skips.position_of(kept + (number + 1) * size - 1) + 1
            yield tuple((run.start, run.stop) for run in skips.runs(first, last))


def _positions(runs: Runs) -> Sequence[int]:
    if len(runs) == 1:
        return range(*runs[0])
    return tuple(position for first, last in runs for position in range(first, last))


def _name_of(dataset: Any) -> str:
    kind = type(dataset)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _length_of(dataset: Any) -> int:
    name = _name_of(dataset)
    if isinstance(dataset, Mapping):
        raise DataError(
            f"a mapping ({name}) with the keys {sorted(map(str, dataset))[:8]} is not a sequence of samples",
            hint="pass one of its values, for example dataset['train']",
        )
    positional = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (IterableDataset, str, bytes)) or not positional:
        raise DataError(
            f"{name} has no random access, so its samples cannot be found again by position",
            hint="use a map-style data set (`__len__` and `__getitem__`), or store the items first, for example with "
            "`perdure data prepare`",
        )
    try:
        length = len(dataset)
    except Exception as error:
        raise DataError(f"{name} does not know its length: {type(error).__name__}: {error}") from error
    if length == 0:
        raise DataError(f"{name} is empty: there is no sample to train on")
    if length > MAX_LENGTH:
        raise DataError(f"{name} has {length} samples; up to 2^60 are possible")
    return length


def _rank_of(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (ranks is None):
        raise UsageError("rank and ranks must be given together")
    if rank is None or ranks is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    if not 0 <= rank < ranks:
        raise UsageError(f"rank must be in [0, ranks), but is {rank} of {ranks}")
    return rank, ranks


def _local_batch_size(plan: BatchPlan, given: int | None, ranks: int) -> int:
    ramp = plan.rampup
    # Every step of a ramp is the start plus some increments, so a divisor of both divides them all.
    common = plan.global_batch_size if ramp is None else gcd(ramp.start, ramp.target - ramp.start and ramp.increment)
    if given is not None and operator.index(given) < 1:
        raise UsageError(f"local_batch_size must be at least 1, not {given}")
    unit = ranks * (given or 1)
    if common % unit:
        what = (
            f"global_batch_size {common}" if ramp is None else f"rampup_batch_size {ramp.start} + k * {ramp.increment}"
        )
        share = f"{ranks} ranks" if given is None else f"ranks x local_batch_size = {ranks} x {given}"
        below, above = common // unit * unit, (common // unit + 1) * unit
        hint = (
            f"the nearest possible sizes are {below} and {above}" if below else f"the smallest possible size is {above}"
        )
        if ramp is not None:
            hint = f"start, increment and global_batch_size must each be a multiple of {unit}"
        raise UsageError(f"{what} is not a multiple of {share}", hint=hint)
    return given or common // ranks
