"""The numbers of a position: any kind of integer, and none that a reader would refuse."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from perdure import Progress
from perdure.errors import UsageError
from perdure.format.common import CommonInfo


def test_integers_of_any_kind_are_written_as_such() -> None:
    progress = Progress(numpy.int64(3), torch.tensor(12), numpy.uint8(4), 2**126)  # type: ignore[arg-type]
    expected = CommonInfo(global_step=3, consumed_samples=12, global_batch_size=4, loss_scale=2.0**126)
    assert CommonInfo.decode(progress.common().encode()) == expected


@pytest.mark.parametrize(
    "numbers",
    [
        *({"global_step": step} for step in (-1, 1.5, 10**19, None, "3")),
        *({"consumed_samples": -1}, {"global_batch_size": 0}, {"ckpt_status": 7}),
        *({"loss_scale": scale} for scale in (0.0, -1.0, float("inf"), float("nan"), None)),
    ],
    ids=repr,
)
def test_what_could_not_be_read_again_is_refused_before_it_is_written(numbers: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"progress.{next(iter(numbers))}: expected"):
        Progress(**numbers).common()
