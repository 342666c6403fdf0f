"""Random streams: seeded from a position in the run (the Trainer's way), or captured (a loop of one's own)."""

from __future__ import annotations

import random
from typing import Any

import torch

__all__ = ["RandomState", "mix", "seed_all", "seed_streams"]

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """A 63-bit seed from whole numbers, such that any change of any of them gives an unrelated seed."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_streams(*parts: int) -> None:
    """Seeds Python's, NumPy's and torch's default streams (CPU and every CUDA device in use) from a position.

    Generators are seeded directly: `torch.manual_seed` costs a fifth of a millisecond, all of this some
    microseconds.
    """
    import numpy

    seed = mix(*parts)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(seed)


def seed_all(*parts: int) -> None:
    """Seeds Python's, NumPy's and torch's streams: once at a start, before anything is built."""
    import numpy

    seed = mix(*parts)
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


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
            "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
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
