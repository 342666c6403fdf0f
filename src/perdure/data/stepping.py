"""Steps of a run's sample stream, one rank's share of each, and the position from which they go on."""

from __future__ import annotations

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from perdure.data.cursor import BatchPlan, scale_step
from perdure.data.growth import Counters, Stretches, counters
from perdure.data.record import StreamRecord
from perdure.data.share import Share
from perdure.errors import UsageError

__all__ = ["MicroBatch", "Progress", "StepBatch", "SteppedLoader"]


_Loader = TypeVar("_Loader", bound="SteppedLoader")


class Progress(Protocol):
    """What `resume` reads of a run's progress, and sets in it."""

    global_step: int
    global_batch_size: int
    stretches: Stretches

    @property
    def consumed_samples(self) -> int | None: ...


@dataclass(slots=True)
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


@dataclass(slots=True)
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


class SteppedLoader(ABC):
    """Gives out steps from a position on.

    Args:
        share: which positions make up a step, and which of them are this rank's.
        length: samples of an epoch; 0 where unknown.

    Attributes:
        by_state: going on needs a state of the data set; a position alone does not find the next sample.
    """

    by_state = False

    def __init__(self, share: Share, length: int) -> None:
        self.share = share
        self.length = length
        self._consumed = 0
        self._pass = 0

    @property
    def plan(self) -> BatchPlan:
        """Which stream positions make up which step."""
        return self.share.plan

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks (at the end of the ramp, with `rampup`)."""
        return self.plan.global_batch_size

    @property
    def local_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self.share.local_batch_size

    @property
    def consumed_samples(self) -> int:
        """The next stream position: that after the last step which `take` has given out."""
        return self._consumed

    @property
    def stretches(self) -> Stretches:
        """(first stream position, samples of an epoch from there on): more than one where the data have grown; none
        where an epoch's length is unknown."""
        return ((0, self.length),) if self.length else ()

    @property
    def counters(self) -> Counters:
        """`epoch_num` and `step_num` at the present position; zeros where an epoch's length is unknown."""
        if not self.stretches:
            return Counters(0, 0)
        return counters(self.stretches, self._consumed, self.plan.batch_at(self._consumed))

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
        Progress is brought in line with this loader: it takes its batch size and the lengths of its epochs, and with
        another batch size than before its step is scaled (RESUME.md, Batch size changes), except along a ramp.

        Warns:
            UserWarning: the scaled step isn't whole and was rounded down.
        """
        step, old, consumed = progress.global_step, progress.global_batch_size, progress.consumed_samples
        self.seek(step * old if consumed is None else consumed)
        new = self.plan.batch_at(self._consumed)
        if step and old != new and self.plan.rampup is None:
            progress.global_step, whole = scale_step(step, old, new)
            if not whole:
                warnings.warn(
                    f"step {step} x {old} / {new} is not whole; it was rounded down to {progress.global_step}, "
                    f"and data go on at sample {self._consumed} exactly",
                    stacklevel=2,
                )
        progress.global_batch_size, progress.stretches = new, self.stretches

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

    def use_stretches(self, stretches: Sequence[Sequence[int]]) -> None:
        """Goes by the lengths that the data set has had; none where they are unknown. Ends passes in progress.

        Raises:
            DataError: the last of them is not its length.
            UsageError: growth cannot be taken in with this data set.
        """
        if len(stretches) > 1:
            raise UsageError("growth cannot be taken in with data whose order is not a function of the position")

    def close(self) -> None:
        """Ends the worker processes. The loader stays usable: the next `take` starts new ones."""
        self._pass += 1
        self._close_workers()

    def __enter__(self: _Loader) -> _Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def leave_out(self, ranges: Sequence[Sequence[int]]) -> None:
        """Leaves out these stream positions too, as half-open ranges [first, last); ends passes in progress."""
        plan, ramp = self.plan, self.plan.rampup
        rampup = None if ramp is None else [ramp.start, ramp.increment, ramp.samples]
        more = BatchPlan(plan.global_batch_size, rampup=rampup, skip_ranges=[*plan.skips.ranges, *ranges])
        self.share = replace(self.share, plan=more)
        self._pass += 1

    @property
    def warnings(self) -> list[str]:
        """What must be said at each start: where a resume is not exact."""
        return []

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What the data are: `type`, `length`, `fingerprint` (None where unknown), and what a source adds."""

    @abstractmethod
    def record(self) -> StreamRecord:
        """All that decides which sample stands where, for the ledger."""

    @abstractmethod
    def _begin(self, steps: int | None) -> None:
        """A pass over so many steps begins at the present position."""

    @abstractmethod
    def _micro_batches(self, runs: Sequence[tuple[tuple[int, int], ...]]) -> list[MicroBatch]:
        """The next micro-batches of the pass; their kept positions are given."""

    @abstractmethod
    def _close_workers(self) -> None: ...

    def _next_step(self) -> StepBatch:
        step = self.plan.step_range(self._consumed)
        try:
            micro_batches = self._micro_batches(self.share.runs_of(step))
        except BaseException:
            # An interrupt, too, may have come after a task was begun, which the pass would then leave out.
            self._pass += 1
            self._close_workers()
            raise
        self._consumed = step.last
        return StepBatch(step.first, step.last, step.global_batch_size, micro_batches)


class _Pass(Iterator[StepBatch]):
    """One `take`: valid until the loader begins another or moves."""

    def __init__(self, loader: SteppedLoader, number: int, steps: int | None) -> None:
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
