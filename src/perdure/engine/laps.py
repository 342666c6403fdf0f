"""Where the time of a start goes: seconds by phase, from the start of the process on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

__all__ = ["Laps", "process_age"]


class Laps:
    """Seconds by phase, in the order in which the phases ended; what is done twice adds up.

    Args:
        age: seconds that have passed already before the first phase ends.
    """

    def __init__(self, age: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last = now() - age
        self.seconds: dict[str, float] = {}

    def end(self, phase: str, within: Mapping[str, float] | None = None) -> None:
        """The phase ends now; `within` are parts of it that are known, and stand before what remains of it."""
        now = self._now()
        parts = dict(within or {})
        parts[phase] = parts.get(phase, 0.0) + max(now - self._last - sum(parts.values()), 0.0)
        for name, seconds in parts.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._last = now

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        return f"{total:.2f} s since the process began: " + ", ".join(f"{k} {v:.2f}" for k, v in self.seconds.items())


def process_age() -> float:
    """Seconds since this process began; 0 where the system doesn't tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
