"""Stop requests: SIGTERM, SIGINT and SIGUSR1 end a run after the step under way, saved; before the first, at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from perdure.engine.launcher import deadline_told
from perdure.engine.watch import Stopped

__all__ = ["SIGNALS", "StopRequest", "Stopped", "listen"]

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
REPEAT_S = 2.0  # launchers deliver a signal twice
UNWIND_S = 5.0  # for the main thread to give back what it holds
DEADLINE_S = deadline_told("PERDURE_STOP_DEADLINE", 600)
ORPHAN_S = 1.0

_active: StopRequest | None = None


@contextlib.contextmanager
def listen(*, importing: bool = False) -> Iterator[StopRequest]:
    """The process's stop request, listening from now on; where one listens already it is that one.

    Outside the main thread nothing is listened for.

    Args:
        importing: until `imported` is called nothing is held, and a signal ends the process at once. torch aborts
            where an exception meets it in the middle of its import.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield _active or StopRequest()
        return
    _active = StopRequest(importing)
    try:
        with _active._listening():
            yield _active
    except Exception as error:
        if _active.interrupted:
            raise Stopped(_active.signal) from error
        raise
    finally:
        _active = None


class StopRequest:
    """Whether a signal has asked to stop; `signal` is the number of the first, 0 before.

    Until `finish_steps` is called, a signal raises `Stopped` in the main thread. A repeat within two seconds
    is the same request; a later one ends the process at once, even one that is stuck in C++: the signals are
    read by a thread of their own. That thread also ends a process whose step does not come to its end, and a
    rank whose launcher has died.
    """

    def __init__(self, importing: bool = False) -> None:
        self.signal, self._importing = 0, importing
        self._first = self._alive = 0.0
        self._starting, self._raised = True, False
        self._reached = self._over = False
        self._parent = os.getppid()
        self._launched = "TORCHELASTIC_RUN_ID" in os.environ
        self._pid = os.getpid()

    def imported(self) -> None:
        """From now on there may be something to give back."""
        self._importing = False

    @property
    def interrupted(self) -> bool:
        """Whether `Stopped` was raised before the first step.

        Code that it meets in the middle of an import may lose it, or fail with an error of its own for it.
        """
        return self._starting and self._raised

    def finish_steps(self) -> None:
        """From now on a signal waits for the end of the step under way.

        Raises:
            Stopped: it was raised before, and lost on the way.
        """
        if self.interrupted:
            raise Stopped(self.signal)
        self._starting = False

    def passed(self) -> None:
        """A step begins or has ended: the run moves on. Ends a rank whose launcher has died."""
        self._alive = time.monotonic()
        if self._is_orphan():
            self._end(1, "the launcher of this rank has died; the rank ends")

    def reached(self) -> None:
        """The last step has been done; what is left is to save."""
        self._reached = True

    # ---- signals

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._receive)
        thread = threading.Thread(target=self._watch, args=(reader,), name="perdure-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
            for known, handler in before.items():
                signal.signal(known, handler if handler is not None else signal.SIG_DFL)
            # Told by a byte: the end of the pipe never comes where a process that was forked meanwhile holds it open.
            self._over = True
            with contextlib.suppress(BlockingIOError):
                os.write(writer, b"\0")
            thread.join()
            os.close(writer)
            os.close(reader)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        self._note(number)
        if self._starting and not self._raised:
            self._raised = True
            raise Stopped(number)

    def _note(self, number: int) -> None:
        if not self.signal:
            self.signal = number
            self._first = self._alive = time.monotonic()
            what = "before the first step" if self._starting else "once saved" if self._reached else "after this step"
            _tell(f"\n{signal.Signals(number).name}: stopping {what}; once more stops at once")
            # By whoever has told: main thread or watcher, which both note each signal.
            if self._importing:
                os._exit(128 + number)

    # ---- the thread

    def _watch(self, reader: int) -> None:
        poll = select.poll()
        poll.register(reader, select.POLLIN | select.POLLHUP)
        orphan_since = 0.0
        while True:
            if poll.poll(1000 * ORPHAN_S if self.signal or self._launched else None):
                for number in os.read(reader, 256):
                    if number in SIGNALS:
                        if self.signal and time.monotonic() - self._first > REPEAT_S:
                            os._exit(128 + number)
                        self._note(number)
                if self._over:
                    return
            now = time.monotonic()
            if self.signal and self._starting and now - self._first > UNWIND_S:
                os._exit(128 + self.signal)
            if self.signal and not self._starting and not self._reached and now - self._alive > DEADLINE_S:
                self._end(128 + self.signal, f"the step has not ended for {DEADLINE_S:g} s: stopping without saving it")
            if self._is_orphan():
                # The main thread finds it too, at its next step, unless it is stuck.
                orphan_since = orphan_since or now
                if now - orphan_since > UNWIND_S:
                    self._end(1, "the launcher of this rank has died; the rank ends")

    def _is_orphan(self) -> bool:
        return self._launched and os.getppid() != self._parent

    def _end(self, code: int, why: str) -> None:
        _tell(why)
        os._exit(code)


def _forked() -> None:
    """A child must not tell its parent of signals of its own; it goes on ignoring those that launchers send to all."""
    global _active
    if _active is not None:
        with contextlib.suppress(ValueError, OSError):
            signal.set_wakeup_fd(-1)
        _active = None


os.register_at_fork(after_in_child=_forked)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
        os.write(2, f"{line}\n".encode())
