"""64-bit keys derived from integers: the one source of all pseudo-randomness of a run.

Sample order, the draws of samples and of the model, and the ledger's digests all come from here. The
functions are part of the format ("order version 1"): changing a constant changes the order in which every
existing run would see its samples, so they are frozen and pinned by tests. The mixing steps are the
finaliser of splitmix64 (Steele, Lea, Flood, 2014).
"""

from __future__ import annotations

from perdure.errors import UsageError

__all__ = [
    "GAMMA",
    "MASK",
    "MULTIPLIER_1",
    "MULTIPLIER_2",
    "check_seed",
    "derive",
    "extend",
    "is_whole",
    "mix64",
    "unextend",
    "unmix64",
]

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

_INVERSE_1 = pow(MULTIPLIER_1, -1, 1 << 64)
_INVERSE_2 = pow(MULTIPLIER_2, -1, 1 << 64)


def mix64(value: int) -> int:
    """A bijection on [0, 2^64) in which every input bit changes about half of the output bits."""
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK
    return value ^ (value >> 31)


def unmix64(value: int) -> int:
    """The inverse of `mix64`."""
    value = ((value ^ (value >> 31) ^ (value >> 62)) * _INVERSE_2) & MASK
    value = ((value ^ (value >> 27) ^ (value >> 54)) * _INVERSE_1) & MASK
    return value ^ (value >> 30) ^ (value >> 60)


def extend(key: int, word: int) -> int:
    """The key of the words that `key` stands for and one more; a bijection of either argument."""
    return mix64(((key ^ word) + GAMMA) & MASK)


def unextend(key: int, extended: int) -> int:
    """The word with which `extend(key, word)` is `extended`."""
    return ((unmix64(extended) - GAMMA) & MASK) ^ key


def derive(*words: int) -> int:
    """A 64-bit key from integers in [0, 2^64); their order and number matter."""
    key = GAMMA
    for word in words:
        key = extend(key, word)
    return key


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
