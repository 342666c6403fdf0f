"""All that decides which sample stands where in a run's stream, written down so that it can be recomputed.

It stands in the ledger at the head of each attempt, and in the checkpoint as far as it is the run's own.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec

from perdure.data.cursor import BatchPlan
from perdure.data.growth import GrownOrder
from perdure.data.mixture import MixtureOrder, MixtureRecord
from perdure.data.order import ORDER_VERSION, Order
from perdure.errors import DataError

__all__ = ["StreamRecord"]


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sample stream of an attempt.

    Attributes:
        kind: "order" (a function of the position), "own" (an order of the data set's own, which cannot be
            recomputed here) or "iterable" (in the order in which the data set gives its samples).
        version: of the order.
        seed, shuffle: what the order is keyed by.
        lengths: (first position, length of the data set from there on); empty where it orders itself.
        mixture: of several sources, or None.
        global_batch_size, rampup, skip_ranges: how positions make up steps.
        identity: the data set's.
    """

    kind: str
    version: int = ORDER_VERSION
    seed: int
    shuffle: bool
    lengths: list[tuple[int, int]]
    mixture: MixtureRecord | None = None
    global_batch_size: int
    rampup: list[int] | None = None
    skip_ranges: list[tuple[int, int]] = []
    identity: dict[str, Any] = {}

    @property
    def length(self) -> int:
        """Samples of an epoch; 0 for an iterable."""
        return self.lengths[-1][1] if self.lengths else int(self.identity.get("length") or 0)

    def plan(self) -> BatchPlan:
        """Which positions make up which step."""
        return BatchPlan(self.global_batch_size, rampup=self.rampup, skip_ranges=self.skip_ranges)

    def order(self) -> Order | None:
        """Which data set index stands at which position; None where that cannot be recomputed.

        Raises:
            DataError: the order is of a version that is not known here.
        """
        if self.kind != "order":
            return None
        if self.version != ORDER_VERSION:
            raise DataError(
                f"the sample order is of version {self.version}; this program knows {ORDER_VERSION}",
                hint="use the version of perdure that the run was trained with",
            )
        if self.mixture is not None:
            schedule = tuple((at, tuple(Fraction(w) for w in weights)) for at, weights in self.mixture.schedule)
            return MixtureOrder(self.mixture.lengths, schedule, self.seed, shuffle=self.shuffle)
        return GrownOrder(self.lengths, self.seed, shuffle=self.shuffle)
