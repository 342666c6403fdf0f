"""Order version 1, pinned: a change here would show every existing run other samples."""

from __future__ import annotations

import pytest

from perdure.data.order import ORDER_VERSION, Permutation
from perdure.format.keys import derive


def test_version() -> None:
    assert ORDER_VERSION == 1


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "indices", "values"),
    [
        (10, 0, 0, range(10), [1, 6, 0, 7, 2, 3, 5, 4, 9, 8]),
        (256, 42, 3, range(8), [36, 180, 71, 231, 174, 44, 204, 200]),
        (257, 42, 0, range(8), [140, 255, 129, 219, 151, 18, 190, 31]),
        (1000, 7, 1, range(6), [872, 579, 706, 837, 916, 273]),
        (70000, 1, 0, range(5), [38370, 6702, 37892, 62915, 44491]),
        (10**12, 42, 0, [0, 1, 2, 10**12 - 1], [752792903028, 327121489702, 122049091587, 725883477062]),
        (10**12, 42, 1, [0, 1], [257587027577, 481864928325]),
        (2**60, 2**64 - 1, 2**63, [0, 1, 2**60 - 1], [1076581393999452724, 297438744253074004, 151314688444844319]),
    ],
)
def test_values(length: int, seed: int, epoch: int, indices: list[int], values: list[int]) -> None:
    permutation = Permutation(length, seed, epoch)
    assert [permutation(i) for i in indices] == values


def test_keys() -> None:
    assert derive() == 0x9E3779B97F4A7C15
    assert derive(1, 2) != derive(2, 1)
