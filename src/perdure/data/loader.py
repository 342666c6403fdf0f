"""`ResumableLoader`: the samples of every step as a function of the position in the stream.

Nothing needs to be stored but the number of consumed samples: neither the number of ranks nor that of
workers changes which samples a step has.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from perdure.data.collate import stack_samples
from perdure.data.fetch import Fetcher, Task, where
from perdure.data.growth import GrownOrder, Stretches
from perdure.data.identity import differences, identity_of
from perdure.data.order import MAX_LENGTH, EpochOrder, Order
from perdure.data.reading import ReadingLoader
from perdure.data.record import StreamRecord
from perdure.data.share import Runs, Share, make_share, positions_of
from perdure.data.stepping import MicroBatch, StepBatch
from perdure.errors import DataError, UsageError
from perdure.format.keys import check_seed

__all__ = ["MicroBatch", "ResumableLoader", "StepBatch", "check_workers", "name_of"]

# Samples whose indices are computed in one go.
_AHEAD = 2048


class ResumableLoader(ReadingLoader):
    """Loads a map-style data set from any position of its sample stream.

    The data set is anything with `__len__` and `__getitem__(int)`: a list, a torch or a Hugging Face
    data set, one of `perdure.data.sources`. It may say more about itself by these optional names:
    `identity() -> dict`, `whereabouts(index) -> str` (file and offset, for errors), `draws_random = False`
    (it never draws from global random streams, which saves looking whether it does), and
    `stream_order(seed, shuffle) -> Order` (a sample order of its own).

    Before each sample, Python's, numpy's and torch's default CPU streams stand where (seed, stream position)
    puts them; before collating, where (seed, first position of the micro-batch) does. With
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
        collate_fn: list of samples to batch; default: what torch's `default_collate` gives.
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
        self._name = name_of(dataset)
        length = _length_of(dataset)
        self.seed = check_seed(operator.index(seed))
        self.shuffle = shuffle
        share = make_share(global_batch_size, local_batch_size, rank, ranks, rampup=rampup, skip_ranges=skip_ranges)
        super().__init__(share, length)
        check_workers(num_workers, prefetch)
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._stretches: Stretches = ((0, length),)
        self._order = self._order_of_data()
        self._collate = collate_fn or stack_samples
        # Torch's own collate function draws nothing; a given one may.
        self._draws_random = collate_fn is not None or bool(getattr(dataset, "draws_random", True))

    @property
    def stretches(self) -> Stretches:
        return self._stretches

    def use_stretches(self, stretches: Sequence[Sequence[int]]) -> None:
        given = tuple((int(start), int(length)) for start, length in stretches)
        if given in ((), self._stretches):
            return
        if hasattr(self._dataset, "stream_order"):
            raise UsageError(
                f"{self._name} orders its samples itself, so growth of its data cannot be taken in",
                hint="add what is new as a source of its own, with a weight from a position on",
            )
        if given[-1][1] != self.length:
            raise DataError(f"{self._name} has {self.length} samples, not {given[-1][1]}")
        self._stretches = given
        self._order = self._order_of_data()
        self._pass += 1

    def identity(self) -> dict[str, Any]:
        """What the data are: `type`, `length`, `fingerprint` (None where unknown), and what a source adds."""
        return identity_of(self._dataset, self._name, self.length)

    def record(self) -> StreamRecord:
        """All that decides which sample stands where, for the ledger."""
        own_order = hasattr(self._dataset, "stream_order")
        describe = getattr(self._dataset, "mixture_record", None)
        ramp = self.plan.rampup
        return StreamRecord(
            kind="own" if own_order and describe is None else "order",
            seed=self.seed,
            shuffle=self.shuffle,
            lengths=[] if own_order else list(self._stretches),
            mixture=None if describe is None else describe(),
            global_batch_size=self.global_batch_size,
            rampup=None if ramp is None else [ramp.start, ramp.increment, ramp.samples],
            skip_ranges=list(self.plan.skips.ranges),
            identity=self.identity(),
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in: for a loop that registers its loader (`extra=`)."""
        return {
            "consumed_samples": self._consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "stretches": [list(stretch) for stretch in self._stretches],
            "identity": self.identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position, if it is one in the same stream of samples.

        Raises:
            DataError: data, order or seed are not those of the state.
        """
        present = self.state_dict()
        found = differences(state["identity"], present["identity"], consumed_samples=state["consumed_samples"])
        found += [f"{key}: {state[key]} -> {present[key]}" for key in ("seed", "shuffle") if state[key] != present[key]]
        if found:
            raise DataError(
                "the data are not those that the checkpoint was trained on:\n  " + "\n  ".join(found),
                hint="bring them back, or leave the loader out of the registered objects to go on by position alone",
            )
        self.use_stretches(state["stretches"])
        self.seek(state["consumed_samples"])

    def _order_of_data(self) -> Order:
        own: Callable[[int, bool], Order] | None = getattr(self._dataset, "stream_order", None)
        if own is not None:
            return own(self.seed, self.shuffle)
        if len(self._stretches) > 1:
            return GrownOrder(self._stretches, self.seed, shuffle=self.shuffle)
        return EpochOrder(self.length, self.seed, shuffle=self.shuffle)

    def _reader(self, board: Any) -> tuple[Fetcher, Callable[[int], str]]:
        dataset = self._dataset
        fetcher = Fetcher(
            dataset, self.seed, self._collate, name=self._name, draws_random=self._draws_random, board=board
        )
        return fetcher, lambda index: where(dataset, index)

    def _tasks(self, steps: int | None) -> Callable[[], Iterator[Task]]:
        share, order, consumed = self.share, self._order, self._consumed
        return lambda: _tasks(share, order, consumed, steps)

    def _micro_batches(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        assert self._workers is not None
        micro_batches = []
        for positions in runs:
            data, ids = self._workers.next()
            ids = array("q", ids).tolist() if isinstance(ids, bytes) else ids
            micro_batches.append(MicroBatch(positions[0][0], data, ids, positions_of(positions)))
        return micro_batches


def _tasks(share: Share, order: Order, consumed: int, steps: int | None) -> Iterator[Task]:
    """The tasks of the next steps from a position, in order.

    The order is computed for several micro-batches at once, which costs a fraction of one by one.
    """
    size = share.local_batch_size
    ahead = (runs for step in share.steps(consumed, steps) for runs in share.runs_of(step))
    amount = 1
    while bundle := list(islice(ahead, amount)):
        ids = order.gather([run for runs in bundle for run in runs])
        for number, runs in enumerate(bundle):
            yield Task(runs, ids[number * size : (number + 1) * size])
        amount = min(2 * amount, max(1, _AHEAD // size))


def check_workers(num_workers: int, prefetch: int) -> None:
    """Raises UsageError for impossible numbers."""
    if num_workers < 0 or prefetch < 1:
        raise UsageError(f"num_workers must be at least 0 and prefetch at least 1, not {num_workers} and {prefetch}")


def name_of(dataset: Any) -> str:
    """What a data set is called in messages: its class."""
    kind = type(dataset)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _length_of(dataset: Any) -> int:
    name = name_of(dataset)
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
            "`perdure data prepare`; for one that can say where it stands: perdure.data.iterable.IterableLoader",
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
