"""Host memory for input and output: page-aligned, in huge pages where the system has them.

Huge pages are handed out many times faster than small ones, and a device moves them in fewer pieces.
"""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["address_of", "aligned", "prefer_huge_pages"]

_HUGE = 2 << 20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def aligned(size: int) -> mmap.mmap:
    """`size` bytes (at least one) of private memory that begin on a page; freed with the object."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size, flags=private)
    prefer_huge_pages(address_of(memory), size)
    return memory


def address_of(memory: mmap.mmap | memoryview) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def prefer_huge_pages(address: int, size: int) -> None:
    """Asks for huge pages wherever the range, not touched yet, has room for whole ones; never fails."""
    begin, end = -(-address // _HUGE) * _HUGE, (address + size) // _HUGE * _HUGE
    if _ADVICE is not None and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _ADVICE)
