"""Random streams: seeded from a position in the run (the Trainer's way), or captured (a loop of one's own)."""

from __future__ import annotations

import random
from typing import Any

import torch

from perdure.format.keys import MASK, derive

__all__ = ["RandomState", "seed_all", "seed_cpu", "seed_streams", "training_key"]

_TRAINING = 0x747261696E


def training_key(*parts: int) -> int:
    """The key of training's own draws at a place; any change of any number gives an unrelated one."""
    return derive(_TRAINING, *(part & MASK for part in parts))


def seed_cpu(key: int) -> None:
    """Seeds Python's, NumPy's and torch's default CPU stream from a 64-bit key.

    Generators are seeded directly: `torch.manual_seed` costs a fifth of a millisecond, all of this some
    microseconds.
    """
    import numpy

    random.seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def seed_streams(*parts: int) -> None:
    """Seeds Python's, NumPy's and torch's default streams (CPU and every CUDA device in use) from a position."""
    key = training_key(*parts)
    seed_cpu(key)
    if _cuda_in_use():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(key)


def seed_all(*parts: int) -> None:
    """Seeds Python's, NumPy's and torch's streams: once at a start, before anything is built."""
    key = training_key(*parts)
    seed_cpu(key)
    torch.manual_seed(key)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class RandomState:
    """The classic capture of all random streams, as an object to register with a `Checkpointer`.

    The Trainer doesn't need it: it seeds every micro-batch from the seed and the stream position.
    One state per rank; restored on the same number of ranks.
    """

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        import numpy

        version, internal, gauss = random.getstate()
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state: dict[str, Any] = {
            "python": [version, torch.tensor(internal, dtype=torch.int64, device="cpu"), gauss],
            "numpy": [
                name,
                torch.from_numpy(numpy.asarray(keys).astype("int64")),
                int(position),
                int(has_gauss),
                float(cached),
            ],
            "torch": torch.get_rng_state(),
        }
        if _cuda_in_use():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy

        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal.tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda"])
