"""Positions in the run's sample stream, by arithmetic alone: no sample is read, nothing is counted up.

A stream position numbers the samples of the run from 0: the concatenation of its epochs. The cursor
of a run is `consumed_samples`, the next stream position. Positions that are skipped on purpose count
as consumed. Every conversion costs O(log) of the number of skip ranges and ramp plateaus, at any step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perdure.errors import UsageError
from perdure.format.keys import MASK, is_whole

__all__ = ["BatchPlan", "Rampup", "SkipRanges", "StepRange", "scale_step"]


class StepRange(NamedTuple):
    """One step: stream positions [first, last), of which all but the skipped ones are its samples."""

    first: int
    last: int
    global_batch_size: int


def scale_step(step: int, saved_batch_size: int, batch_size: int) -> tuple[int, bool]:
    """The step at which a run goes on when its global batch size changes.

    Returns `step * saved_batch_size // batch_size`, and whether the division is whole. Data go on at
    exactly the consumed samples in either case.
    """
    scaled, rest = divmod(step * saved_batch_size, batch_size)
    return scaled, rest == 0


class SkipRanges:
    """Stream positions left out on purpose, as half-open ranges [first, last).

    Args:
        ranges: pairs `[first, last]` in any order; overlapping and touching ones are merged.

    Raises:
        UsageError: a range is not a pair of integers with 0 <= first < last.
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted(_check_range(r) for r in ranges):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], last))
            else:
                merged.append((first, last))
        self.ranges = tuple(merged)
        self._firsts = [first for first, _ in merged]
        self._skipped = [0]
        for first, last in merged:
            self._skipped.append(self._skipped[-1] + last - first)
        self._kept_at_first = [first - skipped for first, skipped in zip(self._firsts, self._skipped, strict=False)]

    def kept_before(self, position: int) -> int:
        """How many of the positions [0, position) are not skipped."""
        number = bisect_right(self._firsts, position)
        skipped = self._skipped[number]
        if number:
            skipped -= max(0, self.ranges[number - 1][1] - position)
        return position - skipped

    def position_of(self, kept: int) -> int:
        """The position of the `kept`-th (from 0) sample that is not skipped."""
        return kept + self._skipped[bisect_right(self._kept_at_first, kept)]

    def advance(self, position: int, samples: int) -> int:
        """The position after the next `samples` kept ones; `position` itself for none."""
        if samples <= 0 or not self.ranges:
            return position + max(samples, 0)
        return self.position_of(self.kept_before(position) + samples - 1) + 1

    def runs(self, first: int, last: int) -> list[range]:
        """The kept positions of [first, last), as maximal ranges in order."""
        runs: list[range] = []
        number = max(0, bisect_right(self._firsts, first) - 1)
        for skip_first, skip_last in self.ranges[number:]:
            if skip_first >= last:
                break
            if skip_first > first:
                runs.append(range(first, skip_first))
            first = max(first, skip_last)
        if first < last:
            runs.append(range(first, last))
        return runs


@dataclass(frozen=True)
class Rampup:
    """A global batch size that grows with the consumed samples (Megatron's `rampup_batch_size`).

    Attributes:
        start: the first global batch size.
        increment: added at each of (target - start) / increment equal parts of `samples`.
        samples: consumed samples after which the target size holds.
        target: the run's `global_batch_size`.

    Raises:
        UsageError: sizes are not positive, or the target is not reached by whole increments.
    """

    start: int
    increment: int
    samples: int
    target: int

    def __post_init__(self) -> None:
        for name in ("start", "increment", "samples", "target"):
            value = getattr(self, name)
            if not is_whole(value, MASK, 0 if name == "samples" else 1):
                raise UsageError(f"rampup_batch_size: {name} must be a positive integer, not {value!r}")
        if self.start > self.target:
            raise UsageError(f"rampup_batch_size starts at {self.start}, above global_batch_size {self.target}")
        if (self.target - self.start) % self.increment:
            raise UsageError(
                f"rampup_batch_size: increments of {self.increment} do not lead from {self.start} to {self.target}",
                hint=f"choose an increment that divides {self.target - self.start}",
            )

    @property
    def plateaus(self) -> int:
        """Number of increments until the target."""
        return (self.target - self.start) // self.increment

    def level(self, consumed_samples: int) -> int:
        """How many increments are in force at a position."""
        if consumed_samples >= self.samples:
            return self.plateaus
        return consumed_samples * self.plateaus // self.samples

    def threshold(self, level: int) -> int:
        """The first position at which `level` increments are in force."""
        return -(-level * self.samples // self.plateaus) if self.plateaus else 0

    def batch_at(self, consumed_samples: int) -> int:
        """The global batch size of the step that starts at a position."""
        return self.start + self.level(consumed_samples) * self.increment


class BatchPlan:
    """Which stream positions make up which step.

    Each step takes the next `global_batch_size` positions that lie in no skip range. Its range starts
    where the one before ended, so the ranges of a run tile the stream; skipped positions inside belong
    to no step.

    Args:
        global_batch_size: samples per step over all ranks.
        rampup: `[start, increment, samples]`, or None for a constant size.
        skip_ranges: half-open ranges `[first, last)` of stream positions left out.

    Raises:
        UsageError: sizes or ranges are impossible.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        rampup: Sequence[int] | None = None,
        skip_ranges: Iterable[Sequence[int]] = (),
    ) -> None:
        if not is_whole(global_batch_size, MASK, 1):
            raise UsageError(f"global_batch_size must be a positive integer, not {global_batch_size!r}")
        self.global_batch_size = global_batch_size
        self.skips = SkipRanges(skip_ranges)
        self.rampup: Rampup | None = None
        if rampup is not None:
            if len(rampup) != 3:
                raise UsageError(f"rampup_batch_size must be [start, increment, samples], not {list(rampup)!r}")
            start, increment, samples = rampup
            self.rampup = Rampup(start, increment, samples, global_batch_size)
        self._steps, self._positions, self._batches = self._plateaus()

    def batch_at(self, consumed_samples: int) -> int:
        """The global batch size of the step that starts at a position."""
        return self.global_batch_size if self.rampup is None else self.rampup.batch_at(consumed_samples)

    def step_range(self, consumed_samples: int) -> StepRange:
        """The step that starts at a position, aligned or not."""
        batch = self.batch_at(consumed_samples)
        return StepRange(consumed_samples, self.skips.advance(consumed_samples, batch), batch)

    def consumed_at(self, step: int) -> int:
        """The position after `step` steps from the beginning of the stream."""
        if step < 0:
            raise UsageError(f"step must not be negative, but is {step}")
        row = bisect_right(self._steps, step) - 1
        return self.skips.advance(self._positions[row], (step - self._steps[row]) * self._batches[row])

    def after(self, consumed_samples: int, steps: int) -> int:
        """The position after `steps` more steps from a position, aligned or not."""
        position, ramp = consumed_samples, self.rampup
        while steps and ramp is not None and ramp.level(position) < ramp.plateaus:
            count = min(steps, self._steps_on_plateau(ramp, position))
            position = self.skips.advance(position, count * self.batch_at(position))
            steps -= count
        return self.skips.advance(position, steps * self.batch_at(position))

    def _plateaus(self) -> tuple[list[int], list[int], list[int]]:
        """First step, first position and batch size of each stretch of equal batches."""
        step, position = 0, 0
        steps, positions, batches = [0], [0], [self.batch_at(0)]
        ramp = self.rampup
        while ramp is not None and ramp.level(position) < ramp.plateaus:
            count = self._steps_on_plateau(ramp, position)
            step, position = step + count, self.skips.advance(position, count * batches[-1])
            steps.append(step)
            positions.append(position)
            batches.append(self.batch_at(position))
        return steps, positions, batches

    def _steps_on_plateau(self, ramp: Rampup, position: int) -> int:
        """How many steps from a position on have its batch size."""
        end = self.skips.kept_before(ramp.threshold(ramp.level(position) + 1) - 1) + 1
        return max(1, -(-(end - self.skips.kept_before(position)) // self.batch_at(position)))


def _check_range(given: Sequence[int]) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, (list, tuple)) else ()
    if len(pair) != 2 or not all(is_whole(value, MASK) for value in pair) or pair[0] >= pair[1]:
        raise UsageError(f"a skip range must be [first, last] with 0 <= first < last, not {given!r}")
    return pair[0], pair[1]
