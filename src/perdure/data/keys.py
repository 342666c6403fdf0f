"""64-bit keys derived from integers: the one source of all pseudo-randomness about data.

The functions here are part of the format ("order version 1"): changing a constant changes the
order in which every existing run would see its samples, so they are frozen and pinned by tests.
The mixing steps are the finaliser of splitmix64 (Steele, Lea, Flood, 2014).
"""

from __future__ import annotations

from perdure.errors import UsageError

__all__ = ["GAMMA", "MASK", "MULTIPLIER_1", "MULTIPLIER_2", "check_seed", "derive", "is_whole", "mix64"]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """A bijection on [0, 2^64) in which every input bit changes about half of the output bits."""
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def derive(*words: int) -> int:
    """A 64-bit key from integers in [0, 2^64); their order and number matter."""
    state = GAMMA
    for word in words:
        state = mix64(((state ^ word) + GAMMA) & MASK)
    return state


def is_whole(value: object, highest: int, lowest: int = 0) -> bool:
    """Whether a value from outside is an integer (not a bool) in [lowest, highest]."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def check_seed(seed: int) -> int:
    """The seed itself.

    Raises:
        UsageError: it is not an integer in [0, 2^64).
    """
    if not is_whole(seed, MASK):
        raise UsageError(f"seed must be an integer in [0, 2^64), not {seed!r}")
    return seed
