"""Memory of a conversion: what is freed goes back to the system."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["return_freed_memory"]

_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


def return_freed_memory() -> None:
    """Has the C library map large blocks on their own from now on, so that each is given back when it is freed.

    glibc stops doing so once large blocks have come and gone, and then keeps for every thread what it once used: a
    process that holds one tensor at a time would still grow to the size of many. Elsewhere nothing is done.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGE)
