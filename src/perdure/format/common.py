"""common.json: the progress of a run, in the reference's seven keys and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import DamagedCheckpointError
from perdure.format.jsonio import encode

__all__ = ["HEALTHY", "SCALE_LIMIT", "UNHEALTHY", "CommonInfo"]

HEALTHY, UNHEALTHY = 0, 1
_LIMIT = 1 << 62

SCALE_LIMIT = 2.0**127
"""Gradient scales are below this, so that float32 holds them."""


class CommonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume needs to know of the run.

    Attributes:
        epoch_num: epochs completed: `consumed_samples // length` of the training data, or where they have grown
            those of each length; 0 where unknown.
        step_num: steps within the epoch: `consumed_samples % length // global_batch_size`.
        global_step: optimizer steps done (a skipped step counts).
        loss_scale: gradient scale; 1.0 without a scaler.
        global_batch_size: samples per step when this was saved.
        consumed_samples: the next position in the run's sample stream.
        ckpt_status: 0 healthy, 1 abnormal.
    """

    epoch_num: int = 0
    step_num: int = 0
    global_step: int = 0
    loss_scale: float = 1.0
    global_batch_size: int = 1
    consumed_samples: int = 0
    ckpt_status: int = HEALTHY

    @property
    def position_unknown(self) -> bool:
        """Whether steps were done of which neither the samples nor their number per step are known (made by others)."""
        return self.global_step > 0 and self.consumed_samples == 0 and self.global_batch_size == 0

    def encode(self) -> bytes:
        """The bytes of common.json."""
        return encode(self)

    @classmethod
    def decode(cls, data: bytes, file: str = "common.json") -> CommonInfo:
        """Reads common.json, ours or another program's.

        Nulls, unknown keys, and a missing `consumed_samples` are accepted; the latter is then
        `global_step * global_batch_size`.

        Raises:
            DamagedCheckpointError: not JSON, or a value of the wrong kind or out of range.
        """
        try:
            raw = msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
            raise DamagedCheckpointError(f"{file}: not JSON: {error}", file=file) from None
        if not isinstance(raw, dict):
            raise DamagedCheckpointError(f"{file}: expected an object, found {type(raw).__name__}", file=file)
        step = _count(raw, "global_step", file, None)
        batch = _count(raw, "global_batch_size", file, 0)
        consumed = _count({"consumed_samples": step * batch} | _known(raw), "consumed_samples", file, None)
        scale = raw.get("loss_scale")
        scale = 1.0 if scale is None else scale
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < SCALE_LIMIT:
            raise DamagedCheckpointError(
                f"{file}: loss_scale: expected a positive number, found {_short(scale)}", file=file
            )
        status = raw.get("ckpt_status")
        return cls(
            epoch_num=_count(raw, "epoch_num", file, 0),
            step_num=_count(raw, "step_num", file, 0),
            global_step=step,
            loss_scale=float(scale),
            global_batch_size=batch,
            consumed_samples=consumed,
            ckpt_status=UNHEALTHY if isinstance(status, int) and status != HEALTHY else HEALTHY,
        )


def _known(raw: dict[str, Any]) -> dict[str, Any]:
    """Without the nulls, which other programs write for what they don't know."""
    return {key: value for key, value in raw.items() if value is not None}


def _count(raw: dict[str, Any], key: str, file: str, default: int | None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise DamagedCheckpointError(f"{file}: {key}: expected a whole number >= 0, found {_short(value)}", file=file)
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
