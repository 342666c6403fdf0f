"""What a person sees while a run trains: a progress line on a terminal, sparse lines elsewhere.

A run outlives the terminal or pipe that it speaks to: where nothing can be written, nothing is said any more.
"""

from __future__ import annotations

import os
import sys
import time

from perdure.train.state import TrainerState

__all__ = ["Console"]

QUIET_S = 10.0


class Console:
    """Progress on stderr, of rank 0 only.

    Args:
        shown: False on the other ranks.
    """

    def __init__(self, shown: bool) -> None:
        # A process may be started without any stderr.
        self._shown = shown and sys.stderr is not None
        self._live = self._shown and sys.stderr.isatty() and not os.environ.get("PERDURE_NO_PROGRESS")
        self._width = 0
        self._last = self._began = 0.0
        self._first_step = 0
        self._tokens = 0

    def say(self, line: str) -> None:
        """One line that stays."""
        self._clear()
        self._write(f"{line}\n")

    def begin(self, step: int) -> None:
        """The first step of this start is about to run."""
        self._began = self._last = time.monotonic()
        self._first_step, self._tokens = step, 0

    def step(self, state: TrainerState, tokens: int, saved_step: int) -> None:
        """A step is done."""
        self._tokens += tokens
        now = time.monotonic()
        if not self._shown or now - self._last < (0.1 if self._live else QUIET_S):
            return
        self._last = now
        seconds = max(now - self._began, 1e-9)
        rate = (state.global_step - self._first_step) / seconds
        left = (state.steps - state.global_step) / rate if rate else 0
        saved = f"saved {saved_step}" if saved_step >= 0 else "not saved yet"
        line = (
            f"step {state.global_step}/{state.steps}  loss {state.loss:.4f}  lr {state.learning_rate:.2e}  "
            f"{self._tokens / seconds:,.0f} tokens/s  {_clock(left)} left  {saved}"
        )
        if self._live:
            # A line that the terminal has to wrap could not be written over.
            line = line[: max(_columns() - 1, 1)]
            self._write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._write(line + "\n")

    def end(self) -> None:
        """Leaves the progress line."""
        self._clear()

    def _clear(self) -> None:
        if self._live and self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def _write(self, text: str) -> None:
        if not self._shown:
            return
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):
            self._shown = False


def _columns() -> int:
    """The width of the terminal; as good as none where it has not said it."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 1 << 16
    except (OSError, ValueError):
        return 1 << 16


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
