"""Which micro-batches of which steps are one rank's.

A step takes the next `global_batch_size` stream positions, cut into micro-batches of
`local_batch_size`; rank r of R gets the micro-batches r, r + R, r + 2R, ... of every step. So a step's
set of samples does not depend on the number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch.distributed

from perdure.data.cursor import BatchPlan, StepRange
from perdure.errors import UsageError

__all__ = ["Runs", "Share", "make_share", "positions_of"]

Runs = tuple[tuple[int, int], ...]
"""The kept stream positions of a micro-batch, as (first, last) pairs."""


@dataclass(frozen=True)
class Share:
    """One rank's part of each step.

    Attributes:
        plan: which stream positions make up which step.
        local_batch_size: samples per micro-batch.
        rank, ranks: the data-parallel rank and their number.
    """

    plan: BatchPlan
    local_batch_size: int
    rank: int
    ranks: int

    def runs_of(self, step: StepRange) -> list[Runs]:
        """The kept positions of each of this rank's micro-batches of a step."""
        skips, size = self.plan.skips, self.local_batch_size
        numbers = range(self.rank * size, step.global_batch_size, self.ranks * size)
        if step.last - step.first == step.global_batch_size:
            # Nothing is skipped inside.
            return [((step.first + number, step.first + number + size),) for number in numbers]
        kept = skips.kept_before(step.first)
        return [self._kept(kept + number) for number in numbers]

    def _kept(self, number: int) -> Runs:
        """The positions of a micro-batch that begins with this kept sample."""
        skips = self.plan.skips
        first, last = skips.position_of(number), skips.position_of(number + self.local_batch_size - 1) + 1
        return tuple((run.start, run.stop) for run in skips.runs(first, last))

    def steps(self, consumed: int, steps: int | None) -> Iterator[StepRange]:
        """The next steps from a position; None: without end."""
        done = 0
        while steps is None or done < steps:
            step = self.plan.step_range(consumed)
            yield step
            consumed = step.last
            done += 1


def make_share(
    global_batch_size: int,
    local_batch_size: int | None,
    rank: int | None,
    ranks: int | None,
    *,
    rampup: Sequence[int] | None = None,
    skip_ranges: Sequence[Sequence[int]] = (),
) -> Share:
    """The share that a loader's arguments describe; see `ResumableLoader`.

    Raises:
        UsageError: sizes do not fit each other, or an argument is out of its range.
    """
    number, count = _rank_of(rank, ranks)
    plan = BatchPlan(operator.index(global_batch_size), rampup=rampup, skip_ranges=skip_ranges)
    return Share(plan, _local_batch_size(plan, local_batch_size, count), number, count)


def positions_of(runs: Runs) -> Sequence[int]:
    """The positions of ranges in a row."""
    if len(runs) == 1:
        return range(*runs[0])
    return tuple(position for first, last in runs for position in range(first, last))


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
