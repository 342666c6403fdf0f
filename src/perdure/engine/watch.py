"""What the ranks of a job know of each other outside of their exchanges: who lives, what each is doing, who failed.

A thread per rank writes a sign of life, with what its rank is doing, into the job's store (the one that
torch.distributed starts with), and looks there for the last word of a rank that failed. Exchanges block
in C++, where no Python is run; the thread ends a rank whose peer has failed all the same, in a bounded
time and with one line that names the peer. Steps pay nothing: the main thread sets attributes only.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from perdure.errors import RanksError

__all__ = ["SAVE_THREAD", "Phase", "Stopped", "Watch", "Word"]

SAVE_THREAD = "perdure-save"
"""How names of threads that write a checkpoint begin; a rank that is ended waits for them a little."""

PERIOD_S = 0.5
GRACE_S = 3.0  # for the main thread to come out of its exchange by itself
SAVE_GRACE_S = 10.0  # for a save under way, once a rank has failed
LOOK_S = 5.0


class Stopped(BaseException):
    """A signal has asked this run to end before its first step: there is nothing to save, and no step to wait for."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class Word(msgspec.Struct):
    """The last word of a rank that failed, or of another about one that died. The first of a job counts.

    Attributes:
        rank: whose failure it is.
        text: one sentence.
        signal: the signal that ended it during start-up, or 0.
    """

    rank: int
    text: str
    signal: int = 0

    def error(self) -> BaseException:
        """What the other ranks raise."""
        if self.signal:
            return Stopped(self.signal)
        return RanksError(self.text, hint="look at that rank's error; start the same command again to resume")


class Phase:
    """What this process is doing, set by its main thread for nothing and read by the watch.

    Attributes:
        step: the step under way; -1 before the first.
        doing: in words, after "was".
        exchange: how many exchanges were entered; the same on all ranks that are equally far.
        waiting: whether it is inside of an exchange.
        background: the save under way in the background, or "".
    """

    def __init__(self) -> None:
        self.step, self.doing, self.since = -1, "starting", time.monotonic()
        self.exchange, self.waiting, self.background = 0, False, ""

    def set(self, doing: str, step: int | None = None) -> None:
        """From now on it does this."""
        if step is not None:
            self.step = step
        self.doing, self.since = doing, time.monotonic()

    @contextlib.contextmanager
    def at(self, doing: str, *, waiting: bool = False, counts: bool = True) -> Iterator[None]:
        """Does this while the body runs; an error leaves it standing. An exchange `counts` if all ranks enter it."""
        before = self.doing
        self.set(doing)
        self.exchange += waiting and counts
        self.waiting = waiting
        yield
        self.waiting = False
        self.set(before)


class Sign(msgspec.Struct, array_like=True):
    """A rank's sign of life."""

    count: int
    host: str
    machine: str
    pid: int
    step: int
    doing: str
    seconds: float
    exchange: int
    waiting: bool
    background: str
    left: bool = False

    def words(self) -> str:
        """`step 120: finishing a step for 41 s`."""
        where = f"step {self.step}: " if self.step >= 0 else ""
        besides = f" (and {self.background})" if self.background else ""
        waiting = "waiting for the others, " if self.waiting else ""
        return f"{where}{waiting}{self.doing} for {self.seconds:.0f} s{besides}"


class Watch:
    """The thread of one rank.

    Args:
        store: a torch.distributed store that nobody else blocks; keys are this start's alone.
        phase: what it publishes.
        deadline_s: after so long without a sign of life a rank counts as lost.
        neighbours: ranks of this machine, whose death is seen at once.
        joined: whether the process group is ours, too, and ends when all ranks leave together.
        serves: whether this process holds the store, which the others then must have read before it ends.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        phase: Phase,
        *,
        deadline_s: float,
        neighbours: Sequence[int],
        joined: bool = False,
        serves: bool = False,
    ) -> None:
        self.joined, self._serves = joined, serves
        self.rank, self.size, self.phase, self.deadline_s = rank, size, phase, deadline_s
        self.word: Word | None = None
        self.noticed = False
        self._store = store
        self._host, self._machine = socket.gethostname(), _machine()
        self._neighbours = [n for n in neighbours if n != rank]
        self._pids: dict[int, int] = {}
        self._heard: dict[int, tuple[int, float]] = {}
        self._mine: Word | None = None
        self._count, self._looked_at, self._since_word = 0, time.monotonic(), 0.0
        self._signs: dict[int, Sign] = {}
        self._wake, self._looked, self._told = threading.Event(), threading.Event(), threading.Event()
        self._heard_by_all = threading.Event()
        self._wanted = self._leaving = False
        # One store serves all: about a thousand requests a second, however many ranks there are.
        self._period = max(PERIOD_S, size / 1000)
        # The first sign is given at once: whoever dies without one cannot be told from one that never came.
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name="perdure-watch", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    @property
    def left(self) -> bool:
        """Whether this rank has ended well."""
        return self._leaving

    # ---- for the main thread; nothing here waits longer than some seconds

    def fail(self, text: str, *, rank: int | None = None, number: int = 0) -> Word:
        """Leaves a last word for all ranks; gives the one that counts, which may be another's."""
        self.noticed = True
        mine = Word(self.rank if rank is None else rank, text, number)
        if self.word is None and self._thread.is_alive():
            self._mine = mine
            self._wake.set()
            self._told.wait(LOOK_S)
        if self._serves:
            self._heard_by_all.wait(2 * self._period + 1)
        return self.word or mine

    def await_word(self, seconds: float) -> Word | None:
        """The word of a rank that failed, waited for a little: a connection breaks before its reason is known."""
        end = time.monotonic() + seconds
        while self.word is None and self._thread.is_alive() and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.05)
        self.noticed = self.noticed or self.word is not None
        return self.word

    def check(self, after_s: float = 0.0) -> None:
        """To be called in a loop that waits for another rank's files.

        Raises:
            RanksError: a rank has failed, `after_s` or longer ago.
        """
        if self.word is not None and time.monotonic() - self._since_word >= after_s:
            raise self.word.error()

    def post(self, key: str, text: str) -> None:
        """Leaves a text for a rank that looks for it; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text)

    def posted(self, key: str) -> str:
        """The text under a key, or ""."""
        with contextlib.suppress(RuntimeError):
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        return ""

    def signs(self) -> dict[int, Sign]:
        """The newest sign of life of every rank that gave one."""
        self._looked.clear()
        self._wanted = True
        self._wake.set()
        self._looked.wait(LOOK_S)
        return dict(self._signs)

    def missing(self) -> list[str]:
        """Who keeps this rank waiting, each with what it does or did last; at most five are told.

        Those that give no sign of life; else those that have not come to the exchange under way; else,
        in a collective of the model's, all others.
        """
        before = self.signs()
        time.sleep(2 * self._period + 0.5)
        signs = self.signs()
        others = [r for r in range(self.size) if r != self.rank]
        silent = [r for r in others if r not in signs or (r in before and signs[r].count == before[r].count)]
        late = [r for r in others if r not in silent and not _there(signs[r], self.phase.exchange)]
        told = [
            f"rank {r} on {signs[r].host} gives no sign of life, it was last {signs[r].words()}"
            if r in signs
            else f"rank {r} never gave a sign of life"
            for r in silent
        ]
        if not silent:
            told = [
                f"rank {r} on {signs[r].host} is {signs[r].words()}" for r in (self.phase.waiting and late) or others
            ]
        return [*told[:5], f"and {len(told) - 5} more"] if len(told) > 5 else told

    def leave(self) -> None:
        """This rank has ended well; the others don't take it for dead."""
        if self._leaving:
            return
        self._leaving = True
        self._wake.set()
        self._thread.join(LOOK_S)
        atexit.unregister(self.leave)

    # ---- the thread

    def _run(self) -> None:
        while True:
            self._wake.wait(0.2 if self.word is not None else self._period)
            self._wake.clear()
            leaving = self._leaving
            try:
                self._beat(leaving)
                self._exchange_words()
                if self._wanted:
                    self._wanted = False
                    self._signs = {r: s for r in range(self.size) if (s := self._read(r)) is not None}
                    self._looked.set()
                if self.word is None and not leaving:
                    self._find_dead()
                    self._find_silent()
            except Exception as error:
                if leaving or sys.is_finalizing():
                    return
                self._hear(self._mine or self._without_store(error))
            if leaving:
                return
            if self.word is not None and time.monotonic() - self._since_word > GRACE_S and not self.noticed:
                self._end(self.word)

    def _beat(self, leaving: bool) -> None:
        phase, self._count = self.phase, self._count + 1
        sign = Sign(
            self._count,
            self._host,
            self._machine,
            os.getpid(),
            phase.step,
            phase.doing,
            time.monotonic() - phase.since,
            phase.exchange,
            phase.waiting,
            phase.background,
            leaving,
        )
        self._store.set(f"sign/{self.rank}", msgspec.json.encode(sign).decode())

    def _exchange_words(self) -> None:
        if self.word is not None:
            if self._serves and int(self._store.add("heard", 0)) >= self.size:
                self._heard_by_all.set()
            return
        if self._mine is not None:
            counts = self._store.compare_set("word", "", msgspec.json.encode(self._mine).decode())
            self._hear(msgspec.json.decode(counts, type=Word))
        elif self._store.check(["word"]):
            self._hear(msgspec.json.decode(self._store.get("word"), type=Word))

    def _hear(self, word: Word) -> None:
        if self.word is None:
            self._since_word = time.monotonic()
            self.word = word
            with contextlib.suppress(RuntimeError):
                self._store.add("heard", 1)
        self._told.set()

    def _read(self, rank: int) -> Sign | None:
        key = f"sign/{rank}"
        return msgspec.json.decode(self._store.get(key), type=Sign) if self._store.check([key]) else None

    def _find_dead(self) -> None:
        """A process of this machine that is gone without having said so."""
        for rank in self._neighbours:
            if rank not in self._pids:
                sign = self._read(rank)
                if sign is None:
                    continue
                self._pids[rank] = sign.pid if sign.machine == self._machine else 0
            if not self._pids[rank] or _alive(self._pids[rank]):
                continue
            sign = self._read(rank)
            self._exchange_words()
            if sign is not None and not sign.left and self.word is None:
                text = f"rank {rank} on {sign.host} is gone without a word (killed, or out of memory); it was last"
                self._tell_of(rank, f"{text} {sign.words()}")
                return

    def _without_store(self, error: Exception) -> Word:
        pid, why = self._pids.get(0, 0), " ".join(str(error).split())[:200]
        time.sleep(0.3)  # a process closes its connections before it is gone
        if pid and not _alive(pid):
            return Word(0, f"rank 0 on {self._host} is gone without a word (killed, or out of memory)")
        return Word(0, f"the store of the job is gone, with rank 0 or its launcher ({why})")

    def _find_silent(self) -> None:
        """Rank 0 looks at all, rank 1 at rank 0: whose count stands still is hung or cut off with its whole machine."""
        now = time.monotonic()
        if self.rank > 1 or now - self._looked_at < self.deadline_s / 5:
            return
        self._looked_at = now
        for rank in range(1, self.size) if self.rank == 0 else [0]:
            sign = self._read(rank)
            if sign is None or sign.left:
                self._heard.pop(rank, None)
                continue
            count, since = self._heard.get(rank, (-1, now))
            if count != sign.count:
                self._heard[rank] = sign.count, now
            elif now - since > self.deadline_s:
                text = f"rank {rank} on {sign.host} has given no sign of life for {now - since:.0f} s; it was last"
                self._tell_of(rank, f"{text} {sign.words()}")
                return

    def _tell_of(self, rank: int, text: str) -> None:
        self._mine = Word(rank, text)
        self._exchange_words()

    def _end(self, word: Word) -> None:
        """The main thread is stuck in an exchange that will never end."""
        end = time.monotonic() + SAVE_GRACE_S
        for thread in threading.enumerate():
            if thread.name.startswith(SAVE_THREAD):
                thread.join(max(0.0, end - time.monotonic()))
        if self.noticed or self._leaving:
            return
        with contextlib.suppress(OSError):
            if not word.signal:
                os.write(2, f"error: {word.text}; rank {self.rank} ends with it\n".encode())
        os._exit(128 + word.signal if word.signal else 1)


def _there(sign: Sign, exchange: int) -> bool:
    return sign.exchange > exchange or (sign.exchange == exchange and sign.waiting)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return not os.path.isdir("/proc/self")


def _machine() -> str:
    """What tells this machine, and what it calls its processes, from others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
