"""Where a run is: the numbers that go into common.json."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from perdure.data.growth import Counters, Stretches, counters
from perdure.errors import UsageError
from perdure.format.common import HEALTHY, SCALE_LIMIT, UNHEALTHY, CommonInfo
from perdure.format.names import MAX_ITERATION

__all__ = ["Progress"]


@dataclass
class Progress:
    """A run's position.

    Attributes:
        global_step: optimizer steps done.
        consumed_samples: the next position in the sample stream.
        global_batch_size: samples of the last step (or the configured number).
        loss_scale: gradient scale; 1.0 without a scaler.
        ckpt_status: 0 healthy, 1 abnormal.
        stretches: (first stream position, samples of an epoch from there on); empty where unknown.
    """

    global_step: int = 0
    consumed_samples: int = 0
    global_batch_size: int = 1
    loss_scale: float = 1.0
    ckpt_status: int = HEALTHY
    stretches: Stretches = ()

    def advance(self, global_batch_size: int | None = None, samples: int | None = None) -> None:
        """One optimizer step is done.

        Args:
            global_batch_size: samples it used (default: as before).
            samples: stream positions it moved by, where some were left out on purpose (default: as many).
        """
        if global_batch_size is not None:
            self.global_batch_size = global_batch_size
        self.global_step += 1
        self.consumed_samples += self.global_batch_size if samples is None else samples

    @property
    def epoch_num(self) -> int:
        """Epochs completed."""
        return self._counters.epoch_num

    @property
    def step_num(self) -> int:
        """Whole steps within the current epoch."""
        return self._counters.step_num

    @property
    def _counters(self) -> Counters:
        if not self.stretches or not self.global_batch_size:
            return Counters(0, 0)
        return counters(self.stretches, self.consumed_samples, self.global_batch_size)

    def common(self) -> CommonInfo:
        """The record for common.json.

        Raises:
            UsageError: a number is not one that can be read again.
        """
        scale: Any = self.loss_scale
        status = self.ckpt_status
        if not isinstance(scale, int | float) or not 0 < scale < SCALE_LIMIT:
            raise UsageError(f"progress.loss_scale: expected a positive, finite number, found {scale!r}")
        if status not in (HEALTHY, UNHEALTHY):
            raise UsageError(f"progress.ckpt_status: expected {HEALTHY} (healthy) or {UNHEALTHY}, found {status!r}")
        step, batch = _whole("global_step", self.global_step), _whole("global_batch_size", self.global_batch_size, 1)
        consumed = _whole("consumed_samples", self.consumed_samples)
        return CommonInfo(
            epoch_num=self.epoch_num,
            step_num=self.step_num,
            global_step=step,
            loss_scale=float(scale),
            global_batch_size=batch,
            consumed_samples=consumed,
            ckpt_status=int(status),
        )

    @classmethod
    def from_common(cls, common: CommonInfo) -> Progress:
        """The position that a checkpoint stands for."""
        return cls(
            global_step=common.global_step,
            consumed_samples=common.consumed_samples,
            global_batch_size=common.global_batch_size,
            loss_scale=common.loss_scale,
            ckpt_status=common.ckpt_status,
        )


def _whole(name: str, value: Any, least: int = 0) -> int:
    """A number of any integer type."""
    try:
        number = int(index(value))
    except TypeError:
        number = -1
    if not least <= number <= MAX_ITERATION:
        raise UsageError(f"progress.{name}: expected a whole number from {least} on, found {str(value)[:80]}")
    return number
