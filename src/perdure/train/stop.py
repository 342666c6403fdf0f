"""Stop requests: SIGTERM, SIGINT and SIGUSR1 end a run after the step under way, saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["StopRequest"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_S = 2.0  # launchers deliver a signal twice


class StopRequest:
    """Listens for signals while it is entered; `signal` is the number of the first, 0 before.

    A repeat within two seconds is the same request; a later one ends the process at once. Outside the
    main thread nothing is listened for.
    """

    def __init__(self, tell: bool = True) -> None:
        self.signal = 0
        self._first = 0.0
        self._tell = tell
        self._before: dict[int, Any] = {}
        self._parent = os.getppid()
        self._launched = "TORCHELASTIC_RUN_ID" in os.environ

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check_parent(self) -> None:
        """Ends a rank whose launcher has died: nobody would end it otherwise."""
        if self._launched and os.getppid() != self._parent:
            sys.stderr.write("the launcher of this rank has died; the rank ends\n")
            os._exit(1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal and now - self._first > REPEAT_S:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._first = number, now
            if self._tell:
                name = signal.Signals(number).name
                os.write(2, f"\n{name}: stopping after this step; once more stops at once\n".encode())
