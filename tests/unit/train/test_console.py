"""What is said while a run trains: on narrow terminals, and where nobody listens any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Iterator

import pytest

from perdure.train.console import Console
from perdure.train.state import TrainerState


@contextlib.contextmanager
def stderr_to(fd: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`sys.stderr` writes to a file descriptor."""
    with monkeypatch.context() as patch, contextlib.suppress(OSError), os.fdopen(fd, "w") as stream:
        patch.setattr(sys, "stderr", stream)
        yield


def test_a_progress_line_fits_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 20, 0, 0))
    monkeypatch.delenv("PERDURE_NO_PROGRESS", raising=False)
    with stderr_to(theirs, monkeypatch):
        console = Console(True)
        console.begin(0)
        console._last = -1.0
        console.step(TrainerState(global_step=1, steps=100), 10, -1)
        console.end()
        shown = os.read(mine, 4096).decode().split("\r")
    os.close(mine)
    assert shown[1].startswith("step 1/100")
    assert max(map(len, shown)) < 20


def test_a_pipe_that_nobody_reads_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with stderr_to(writer, monkeypatch):
        console = Console(True)
        for _ in range(3):
            console.say("a line")
        console.end()


def test_a_process_without_stderr_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    console = Console(True)
    console.say("a line")
    console.step(TrainerState(), 1, 0)
    console.end()
