"""Callbacks that go wrong on one rank, in every way that a user's code can."""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from perdure import Callback

__all__ = ["Trouble"]


class Trouble(Callback):
    """At the end of a step (or in another hook) one rank does something bad.

    Args:
        kind: raise, interrupt, exit, hang, stop, kill, kill-once, or `stuck`: the others are in C++ and one raises.
    """

    def __init__(self, kind: str, rank: int = 1, step: int = 3, hook: str = "on_step_end") -> None:
        self.kind, self.rank, self.step, self.hook = kind, rank, step, hook

    def on_train_begin(self, trainer: Any, state: Any) -> None:
        self._at("on_train_begin", trainer, state)

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self._at("on_step_end", trainer, state)

    def on_train_end(self, trainer: Any, state: Any) -> None:
        self._at("on_train_end", trainer, state)

    def _at(self, hook: str, trainer: Any, state: Any) -> None:
        if hook != self.hook or (hook == "on_step_end" and state.global_step != self.step):
            return
        if trainer.ranks.rank != self.rank:
            if self.kind == "stuck":
                # As in a collective of another library: C++ that no connection tells of a peer's end.
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                store.wait(["never"], datetime.timedelta(seconds=200))
            return
        if self.kind in ("raise", "stuck"):
            raise ValueError("the user's own words")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "exit":
            raise SystemExit(7)
        if self.kind == "hang":
            Path("hangs").touch()
            time.sleep(200)
        if self.kind == "kill-once":
            if Path("killed").exists():
                return
            Path("killed").touch()
        if self.kind == "kill":
            # What it does is told twice a second.
            time.sleep(1.5)
        os.kill(os.getpid(), {"stop": signal.SIGSTOP}.get(self.kind, signal.SIGKILL))
