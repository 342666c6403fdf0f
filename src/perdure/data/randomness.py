"""Random streams by position: the same draws for the same sample, whatever process makes them.

The streams meant are Python's `random`, numpy's legacy global one and torch's default CPU generator,
which is what data sets and collate functions draw from. Seeding all three takes several microseconds for
each sample, so only those are seeded that the data set uses; that the others stay untouched is checked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from perdure.format.keys import GAMMA, MASK, derive, extend, mix64
from perdure.state.random import seed_cpu

__all__ = ["SampleKeys", "Streams"]

PYTHON, NUMPY, TORCH = 1, 2, 4

# Each purpose has keys of its own, so that augmentation and masking are independent.
_SAMPLE, _COLLATE = 0x73616D706C65, 0x636F6C6C617465


class SampleKeys:
    """The 64-bit keys of a run's samples, and of the collating of its micro-batches, by stream position."""

    def __init__(self, seed: int) -> None:
        self._sample, self._collate = derive(_SAMPLE, seed), derive(_COLLATE, seed)

    def sample(self, position: int) -> int:
        """The key of the sample at a stream position."""
        return mix64(((self._sample ^ position) + GAMMA) & MASK)  # extend(), called once per sample

    def collate(self, first: int) -> int:
        """The key of collating the micro-batch whose first sample is at `first`."""
        return extend(self._collate, first)


def _seed_numpy(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)


class Streams:
    """The three streams as one reader of samples uses them: seeded where it draws from them, else watched.

    In the first micro-batch all are seeded, and after each sample it is looked which have moved. From then on a
    stream that hasn't is put in a known state before a micro-batch; its next number afterwards tells whether
    anything was drawn. Numpy's functions draw from a generator that belongs to this object.
    """

    _KEY = derive(0x6472617773)

    def __init__(self) -> None:
        self._twister = np.random.MT19937(0)
        self._numpy_twin = np.random.RandomState(np.random.MT19937(0))
        # Both have turned out their first block, which would otherwise be made anew each time.
        watched = random.Random(self._KEY)
        watched.getrandbits(64)
        self._python_state = watched.getstate()
        self._python_next = watched.getrandbits(64)
        generator = torch.Generator()
        generator.manual_seed(self._KEY)
        self._number = torch.empty((), dtype=torch.int64, device="cpu")
        self._number.random_(generator=generator)
        self._torch_state = generator.get_state()
        self._torch_next = int(self._number.random_(generator=generator))
        self.seeded: list[Callable[[int], object]] = [self._seed_all]
        self._used = 0
        self._learning, self._last = True, 0

    def own_numpy(self) -> None:
        """Makes numpy's legacy functions draw from this object's generator, a kind that they can seed."""
        np.random.mtrand.set_bit_generator(self._twister)

    def watch(self) -> None:
        """Puts the watched streams in their known states."""
        if self._learning:
            return
        if not self._used & PYTHON:
            random.setstate(self._python_state)
        if not self._used & TORCH:
            torch.default_generator.set_state(self._torch_state)

    def found_draws(self) -> bool:
        """Whether a watched stream was drawn from; it is seeded from now on."""
        if self._learning:
            self._look()
            self._learning = False
            self._settle()
            return False
        drawn = 0
        if not self._used & PYTHON and random.getrandbits(64) != self._python_next:
            drawn |= PYTHON
        if not self._used & NUMPY and np.random.random_sample() != self._numpy_twin.random_sample():
            drawn |= NUMPY
        if not self._used & TORCH and int(self._number.random_()) != self._torch_next:
            drawn |= TORCH
        if drawn:
            self._used |= drawn
            self._settle()
        return bool(drawn)

    def _settle(self) -> None:
        # About a microsecond for torch's; torch.manual_seed would take two hundred.
        torch_seed = torch.default_generator.manual_seed
        table: dict[int, Callable[[int], object]] = {PYTHON: random.seed, NUMPY: _seed_numpy, TORCH: torch_seed}
        self.seeded = [seed for stream, seed in table.items() if self._used & stream]
        _seed_numpy(self._KEY)
        self._numpy_twin.seed(self._KEY & 0xFFFFFFFF)

    def _seed_all(self, key: int) -> None:
        self._look()
        seed_cpu(key)
        self._last = key

    def _look(self) -> None:
        """Which streams have moved since all were seeded last. Draws from each itself."""
        key, number = self._last, self._number
        if not key:
            return
        if random.getrandbits(64) != random.Random(key).getrandbits(64):
            self._used |= PYTHON
        if np.random.random_sample() != np.random.RandomState(key & 0xFFFFFFFF).random_sample():
            self._used |= NUMPY
        if int(number.random_()) != int(number.random_(generator=torch.Generator().manual_seed(key))):
            self._used |= TORCH

    def __enter__(self) -> None:
        """Puts the caller's three streams aside."""
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._pending = np.random.get_state(legacy=False) if _normal_pending() else None
        self._numpy = np.random.mtrand.get_bit_generator()
        self.own_numpy()

    def __exit__(self, *error: object) -> None:
        """Gives them back as they were, whatever was drawn or seeded."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        np.random.mtrand.set_bit_generator(self._numpy)
        if self._pending is not None:
            np.random.set_state(self._pending)


class _StandIn:
    state = {"bit_generator": "MT19937"}  # noqa: RUF012


def _normal_pending() -> bool:
    """Whether numpy keeps the second of a pair of normal numbers, which changing its generator would lose.

    Its whole state says so too, but copies 624 words one by one, which takes longer than a small batch.
    """
    stream: Any = np.random.mtrand._rand
    try:
        present = stream._bit_generator
        stream._bit_generator = _StandIn
    except AttributeError:
        return True
    try:
        return bool(stream.get_state(legacy=False)["has_gauss"])
    finally:
        stream._bit_generator = present
