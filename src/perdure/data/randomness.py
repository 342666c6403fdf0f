"""Random streams by position: the same draws for the same sample, whatever process makes them.

The streams meant are Python's `random`, numpy's legacy global one and torch's default CPU generator,
which is what data sets and collate functions draw from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from perdure.format.keys import derive

__all__ = [
    "DrawDetector",
    "StreamState",
    "collate_key",
    "preserved_streams",
    "sample_key",
    "seed_streams",
]

# Each purpose has keys of its own, so that augmentation and masking are independent.
_SAMPLE, _COLLATE = 0x73616D706C65, 0x636F6C6C617465


def sample_key(seed: int, position: int) -> int:
    """The 64-bit key of the sample at a stream position."""
    return derive(_SAMPLE, seed, position)


def collate_key(seed: int, first: int) -> int:
    """The 64-bit key of collating the micro-batch whose first sample is at `first`."""
    return derive(_COLLATE, seed, first)


def seed_streams(key: int) -> None:
    """Seeds Python's, numpy's and torch's default CPU stream from a 64-bit key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # About a microsecond; torch.manual_seed would take two hundred.
    torch.default_generator.manual_seed(key)


class StreamState:
    """Where the three streams stand at the moment of construction."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()
        self._torch = torch.default_generator.get_state()

    def restore(self) -> None:
        """Puts the streams back there."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StreamState):
            return NotImplemented
        mine, theirs = self._numpy, other._numpy
        return (
            torch.equal(self._torch, other._torch)
            and self._python == other._python
            and np.array_equal(mine[1], theirs[1])
            and bool(mine[2:] == theirs[2:])
        )

    __hash__ = None  # type: ignore[assignment]


class DrawDetector:
    """Tells whether anything was drawn since `arm`: then the streams' next numbers are not those of its seed."""

    _KEY = derive(0x6472617773)

    def __init__(self) -> None:
        with preserved_streams():
            self.arm()
            self._expected = _next_numbers()

    def arm(self) -> None:
        """Seeds the streams with a fixed key."""
        seed_streams(self._KEY)

    def drawn(self) -> bool:
        """Whether a stream has moved since `arm`. Draws from each itself."""
        return _next_numbers() != self._expected


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Gives the three streams back as they were, whatever the body draws or seeds."""
    state = StreamState()
    try:
        yield
    finally:
        state.restore()


def _next_numbers() -> tuple[int, bytes, int]:
    return random.getrandbits(64), np.random.bytes(8), int(torch.empty((), dtype=torch.int64).random_())
