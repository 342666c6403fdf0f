"""`IterableLoader`: data that can only be read in a row, gone on with from a state that they give themselves.

Where the data set splits itself over ranks, each rank has its own row and its own state, and a resume needs
the same number of ranks. Otherwise every rank reads the same row and keeps its own micro-batches, at the cost
of reading everything everywhere; the state is then the same on all, and ranks may change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from perdure.data.collate import stack_samples
from perdure.data.identity import identity_of
from perdure.data.loader import check_workers, name_of
from perdure.data.reading import ReadingLoader
from perdure.data.record import StreamRecord
from perdure.data.share import Runs, Share, make_share, positions_of
from perdure.data.stepping import MicroBatch
from perdure.data.streaming import StreamFetcher, StreamTask
from perdure.errors import DataError, MismatchError, UsageError
from perdure.format.keys import check_seed

__all__ = ["IterableLoader", "is_iterable"]


class IterableLoader(ReadingLoader):
    """Loads an iterable data set, exactly from where its own state says.

    The data set is anything that can be iterated over. With `state_dict()` and `load_state_dict(state)`, as
    torchdata and Hugging Face's streaming data sets have them, a resume is exact: state is taken after exactly the
    samples of a step, whatever was read ahead. `set_epoch(n)` is called before each epoch where it is there. A
    data set with the attribute `shards_itself = True` gives each rank samples of its own; those of Hugging Face
    are split over ranks here. One process reads, whatever the number of workers.

    It is registered with a checkpoint as an object with a state of its own (`state_dict`, `load_state_dict`).

    Args:
        dataset: the samples.
        exact: False accepts data whose position cannot be restored: each start then begins with its first samples.
        global_batch_size, local_batch_size, seed, num_workers, prefetch, collate_fn, rank, ranks, pin_memory,
            skip_ranges, rampup: as for `ResumableLoader`.

    Raises:
        DataError: the data set cannot be iterated, or cannot say where it stands while `exact` is True.
        UsageError: sizes do not fit each other, or an argument is out of its range.
    """

    by_state = True

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        local_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        ranks: int | None = None,
        pin_memory: bool = False,
        skip_ranges: Sequence[Sequence[int]] = (),
        rampup: Sequence[int] | None = None,
        exact: bool = True,
    ) -> None:
        if not callable(getattr(dataset, "__iter__", None)):
            raise DataError(f"{name_of(dataset)} cannot be iterated over")
        share = make_share(global_batch_size, local_batch_size, rank, ranks, rampup=rampup, skip_ranges=skip_ranges)
        super().__init__(share, 0)
        self._name, self.seed, self._exact = name_of(dataset), check_seed(operator.index(seed)), exact
        self._why_inexact = _why_inexact(dataset)
        if exact and self._why_inexact:
            raise DataError(
                f"{self._name} {self._why_inexact}, so a resume would repeat and miss samples",
                hint="use a map-style data set or one with state_dict() and load_state_dict(), or accept it with "
                "exact: False",
            )
        check_workers(num_workers, prefetch)
        self._num_workers, self._prefetch, self._pin_memory = min(num_workers, 1), prefetch, pin_memory
        self._collate = collate_fn or stack_samples
        self._dataset, self.per_rank = _for_rank(dataset, share)
        self._refuse_skips(skip_ranges)
        self._state: dict[str, Any] = {"position": 0, "epoch": 0, "state": None}

    @property
    def warnings(self) -> list[str]:
        """That a resume is not exact, where it is not."""
        if not self._why_inexact:
            return []
        return [f"{self._name} {self._why_inexact}: resuming is not exact, each start begins with its first samples"]

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        self._refuse_skips(ranges)
        super().leave_out(ranges)

    def state_dict(self) -> dict[str, Any]:
        """Where the data set stands after the last step given out, in its own words."""
        if self._state["position"] != self._consumed and self._consumed and not self._why_inexact:
            raise DataError(
                f"{self._name} stands at stream position {self._state['position']}, not at {self._consumed}",
                hint="save after a step, not between seek() and the step after it",
            )
        return {**self._state, "position": self._consumed, "rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to where a data set stood; `seek` to the same position then keeps it.

        Raises:
            MismatchError: the data set was, or now is, split over another number of ranks.
        """
        if state["rows"] != self._rows:
            raise MismatchError(
                f"{self._name} was split over {state['rows']} ranks when it was saved, and is over {self._rows} now",
                hint=f"resume on {state['rows']} data-parallel ranks, or begin the data afresh: ignore_data_skip",
            )
        self._state = dict(state)
        self.seek(int(state["position"]))

    @property
    def _rows(self) -> int:
        """Into how many rows the data set is split over ranks."""
        return self.share.ranks if self.per_rank else 1

    def identity(self) -> dict[str, Any]:
        """What the data are: `type`, no length, `fingerprint` (None where unknown), and what the data set adds."""
        return identity_of(self._dataset, self._name, None)

    def record(self) -> StreamRecord:
        """How positions make up steps; the samples at them cannot be computed."""
        ramp = self.plan.rampup
        return StreamRecord(
            kind="iterable",
            seed=self.seed,
            shuffle=False,
            lengths=[],
            global_batch_size=self.global_batch_size,
            rampup=None if ramp is None else [ramp.start, ramp.increment, ramp.samples],
            skip_ranges=list(self.plan.skips.ranges),
            identity=self.identity(),
        )

    def _refuse_skips(self, ranges: Sequence[Sequence[int]]) -> None:
        if self.per_rank and ranges:
            raise UsageError(
                f"skip_ranges: {self._name} gives each rank samples of its own, which have no common positions",
                hint="use a map-style data set to leave samples out",
            )

    def _reader(self, board: Any) -> tuple[StreamFetcher, Callable[[int], str]]:
        fetcher = StreamFetcher(
            self._dataset, self.seed, self._collate, name=self._name, speaks=not self._why_inexact, board=board
        )
        return fetcher, lambda index: f"sample {index}"

    def _tasks(self, steps: int | None) -> Callable[[], Iterator[StreamTask]]:
        begin, dropped = self._beginning()
        share, consumed, alone = self.share, self._consumed, self.per_rank
        return lambda: _tasks(share, consumed, steps, begin, dropped, alone)

    def _beginning(self) -> tuple[Mapping[str, Any], tuple[tuple[int, int], ...]]:
        """Where to begin reading, and which positions to drop from there."""
        at, position = self._state["position"], self._consumed
        if self._why_inexact or position == 0:
            return {}, ()
        if at == position and self._state["state"] is not None:
            return self._state, ()
        if self.per_rank:
            raise MismatchError(
                f"{self._name} gives each rank samples of its own, and no state of it for stream position {position} "
                "is there",
                hint="resume with the checkpoint that has it, at the same number of ranks",
            )
        # All samples before are read and dropped, from the nearest place before.
        if at < position and self._state["state"] is not None:
            return self._state, ((at, position),)
        return {}, ((0, position),)

    def _micro_batches(self, runs: Sequence[Runs]) -> list[MicroBatch]:
        assert self._workers is not None
        micro_batches = []
        state = None
        for positions in runs:
            data, ids, state = self._workers.next()
            micro_batches.append(MicroBatch(positions[0][0], data, ids, positions_of(positions)))
        if state is not None:
            last = self.plan.step_range(self._consumed).last
            self._state = {"position": last, **state}
        return micro_batches


def is_iterable(dataset: Any) -> bool:
    """Whether a data set can only be read in a row."""
    # Torch gives its iterable data sets a `__getitem__` that only raises, and they may know their length.
    positional = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    plain = isinstance(dataset, str | bytes | Mapping | set | frozenset)
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not positional and not plain)


def _tasks(
    share: Share,
    consumed: int,
    steps: int | None,
    begin: Mapping[str, Any] | None,
    dropped: tuple[tuple[int, int], ...],
    alone: bool,
) -> Iterator[StreamTask]:
    """This rank's micro-batches in order; where the row is common, those of others are read and dropped."""
    for step in share.steps(consumed, steps):
        mine = share.runs_of(step)
        place = step.first
        for runs in mine:
            ends = runs is mine[-1]
            if alone:
                yield StreamTask(begin, dropped, runs, (), ends)
            else:
                # Positions between are other ranks', or left out on purpose.
                before = (*dropped, *_gaps(place, runs))
                after = ((runs[-1][1], step.last),) if ends and runs[-1][1] < step.last else ()
                yield StreamTask(begin, before, tuple((a, b) for a, b in runs), after, ends)
            begin, dropped, place = None, (), runs[-1][1]


def _gaps(place: int, runs: Runs) -> tuple[tuple[int, int], ...]:
    return ((place, runs[0][0]),) if place < runs[0][0] else ()


def _why_inexact(dataset: Any) -> str:
    """Why the position of a data set cannot be restored; empty where it can."""
    if not all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict")):
        return "has no state_dict() and load_state_dict() to say where it stands"
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None:
        if "BufferShuffled" in type(inner).__name__:
            return "shuffles in a buffer that its state leaves out"
        inner = getattr(inner, "ex_iterable", None)
    return ""


def _for_rank(dataset: Any, share: Share) -> tuple[Any, bool]:
    """What this rank iterates over, and whether that is a row of its own."""
    if getattr(dataset, "shards_itself", False):
        return dataset, True
    if share.ranks > 1 and type(dataset).__module__.split(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, share.rank, share.ranks), True
    return dataset, False
