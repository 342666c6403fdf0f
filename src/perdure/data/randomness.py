"""Random streams by position: the same draws for the same sample, whatever process makes them.

The streams meant are Python's `random`, numpy's legacy global one and torch's default CPU generator,
which is what data sets and collate functions draw from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from perdure.data.keys import derive

__all__ = ["collate_key", "preserved_streams", "sample_key", "seed_streams", "training_key"]

# Each purpose has keys of its own, so that augmentation, masking and dropout are independent.
_SAMPLE, _COLLATE, _TRAINING = 0x73616D706C65, 0x636F6C6C617465, 0x747261696E


def sample_key(seed: int, position: int) -> int:
    """The 64-bit key of the sample at a stream position."""
    return derive(_SAMPLE, seed, position)


def collate_key(seed: int, first: int) -> int:
    """The 64-bit key of collating the micro-batch whose first sample is at `first`."""
    return derive(_COLLATE, seed, first)


def training_key(seed: int, first: int) -> int:
    """The 64-bit key of the forward and backward pass of the micro-batch that starts at `first`."""
    return derive(_TRAINING, seed, first)


def seed_streams(key: int) -> None:
    """Seeds Python's, numpy's and torch's default CPU stream from a 64-bit key."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    # About a microsecond; torch.manual_seed would take two hundred.
    torch.default_generator.manual_seed(key)


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Gives the three streams back as they were, whatever the body draws or seeds."""
    python, numpy, default = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(default)
