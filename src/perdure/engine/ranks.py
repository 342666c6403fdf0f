"""The ranks of a job: what they tell each other, and how an error of one ends all.

Every exchange goes over a gloo group of our own with a deadline, so that a lost rank is an error that
names it and never a hang. What breaks outside of an exchange, in a user's model say, is a last word that
ends the other ranks too (engine/watch.py). A job of one process makes no exchange at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from perdure import errors
from perdure.engine.launcher import deadline_told, number_told
from perdure.engine.watch import Phase, Stopped, Watch
from perdure.errors import PerdureError, RanksError
from perdure.format.digest import digest_bytes

__all__ = ["DEADLINE_S", "Ranks", "adopt", "neighbours", "present_watch"]

T = TypeVar("T")
DEADLINE_S = deadline_told("PERDURE_RANK_DEADLINE", 300)
_HEAD = 1024  # bytes that every rank tells at once, whatever there is to tell
_LOOK_S = 0.25  # how often one that waits in shared memory looks whether the others live
_REASON_S = 4.0  # how long after a broken connection its reason may become known
_BROKEN = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out waiting", "broken pipe")
_watch: Watch | None = None


class Ranks:
    """This process among its peers.

    Args:
        deadline_s: how long an exchange may take before it is an error.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._group: Any = None
        self._watch: Watch | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.phase = Phase()
        if self.size > 1:
            self._watch = _watch if _watch is not None and not _watch.left else None
            self.phase = self._watch.phase if self._watch is not None else self.phase
            try:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
            except RuntimeError as error:
                raise self._lost("joining", error) from error
            if not all(self.gather(self._is_watched(), "joining")):
                self._watch = self._start_watch()

    def _is_watched(self) -> bool:
        """Whether there is a watch without a last word; a process group of ours ends with one."""
        return self._watch is not None and (self._watch.joined or self._watch.word is None)

    def _start_watch(self) -> Watch:
        """A watch for a process group that the user made; its keys are new, whatever the store holds.

        An earlier one is given up: its last word was of an error that the user's program has caught on every rank.
        """
        if self._watch is not None:
            self._watch.leave()
            self.phase = Phase()
        start = self.gather(os.urandom(8).hex(), "starting")[0]
        default = c10d._get_default_store()
        # A store that torch waits on in C++ would keep the watch waiting too.
        store = default.clone() if hasattr(default, "clone") else default
        watch = Watch(
            c10d.PrefixStore(f"perdure-watch/{start}", store),
            self.rank,
            self.size,
            self.phase,
            deadline_s=self.deadline_s,
            neighbours=neighbours(self.rank, self.size),
            serves=self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        )
        adopt(watch)
        return watch

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Every rank's `value` (anything msgspec encodes), in the order of the ranks, on every rank.

        Raises:
            RanksError: a rank did not answer in time; `doing` says what was under way.
        """
        if self.size == 1:
            return [value]
        data = msgspec.msgpack.encode(value)
        data = len(data).to_bytes(8, "little") + data
        with self._exchange(doing):
            # Most of what is told is short, and goes along with its length.
            told = self._all_gather(data[:_HEAD], _HEAD)
            ends = [8 + int.from_bytes(head[:8], "little") for head in told]
            if (rest := max(ends) - _HEAD) > 0:
                tails = self._all_gather(data[_HEAD:], rest)
                told = [head + tail for head, tail in zip(told, tails, strict=True)]
        return [msgspec.msgpack.decode(each[8:end]) for each, end in zip(told, ends, strict=True)]

    def compare(self, told: Mapping[str, str], doing: str) -> dict[str, list[str]]:
        """Where the ranks do not say the same: every rank's text ("" for none) by key; empty where all agree.

        One short exchange where they do, one more where they don't.
        """
        digests = self.gather(digest_bytes(msgspec.msgpack.encode(sorted(told.items()))), doing)
        if len(set(digests)) == 1:
            return {}
        every = self.gather(dict(told), doing)
        texts = {key: [each.get(key, "") for each in every] for each in every for key in each}
        return {key: found for key, found in texts.items() if len(set(found)) > 1}

    def _all_gather(self, data: bytes, size: int) -> list[bytes]:
        """Up to `size` bytes of every rank, filled up to `size`."""
        mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [part.numpy().tobytes() for part in parts]

    def agree(self, error: BaseException | None, doing: str, value: Any = None) -> list[Any]:
        """Raises on every rank if any rank has an error: its own where it happened, `RanksError` elsewhere.

        Where the same class fits (damage, mismatch), the others raise that class, so that all take the
        same branch.

        Returns:
            As `gather`, every rank's `value`.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return [value]
        mine = None if error is None else [type(error).__name__, _one_line(error), getattr(error, "hint", None)]
        reports = self.gather([mine, value], doing)
        failed = [(rank, report) for rank, (report, _) in enumerate(reports) if report is not None]
        if not failed:
            return [told for _, told in reports]
        if error is not None and failed[0][0] == self.rank:
            raise error
        rank, (kind, text, hint) = failed[0]
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, PerdureError):
            raise known(f"rank {rank}: {text}", hint=hint) from error
        raise RanksError(f"rank {rank} failed while {doing}: {kind}: {text}", hint=hint) from error

    def together(self, work: Callable[[], T], doing: str) -> T:
        """Runs `work` on every rank, then agrees on errors; its result on this rank."""
        result, error = self._try(work, doing)
        self.agree(error, doing)
        return result  # type: ignore[return-value]

    def exchange(self, work: Callable[[], T], doing: str) -> list[T]:
        """Runs `work` on every rank, then agrees on errors; every rank's result (anything msgspec encodes)."""
        result, error = self._try(work, doing)
        return self.agree(error, doing, result)

    def decide(self, work: Callable[[], T], doing: str, kind: type[T] | None = None) -> T:
        """Runs `work` on rank 0 and gives its result (anything msgspec encodes) to every rank."""
        shared = self.exchange(lambda: work() if self.is_first else None, doing)[0]
        return msgspec.convert(shared, kind) if kind is not None and self.size > 1 else shared  # type: ignore[return-value]

    def _try(self, work: Callable[[], T], doing: str) -> tuple[T | None, BaseException | None]:
        try:
            with self.phase.at(doing):
                return work(), None
        except Exception as caught:
            return None, caught

    def sum(self, value: Tensor, doing: str) -> Tensor:
        """Sum of a CPU tensor over all ranks, in place."""
        if self.size > 1:
            with self._exchange(doing):
                dist.all_reduce(value, group=self._group)
        return value

    def share(self, data: bytes, doing: str) -> bytes:
        """Rank 0's `data` on every rank, sent once to each."""
        if self.size == 1:
            return data
        with self._exchange(doing):
            size = torch.tensor([len(data)], device="cpu")
            dist.broadcast(size, group=self._group, group_src=0)
            held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_first and data else None
            held = torch.empty(int(size), dtype=torch.uint8, device="cpu") if held is None else held
            dist.broadcast(held, group=self._group, group_src=0)
        return held.numpy().tobytes()

    def send(self, data: Tensor, to: int, tag: int, doing: str) -> Callable[[], None]:
        """Begins to send a CPU tensor to one rank; what is returned waits until it has been taken."""
        with self._exchange(doing, of_all=False):
            work = dist.isend(data, group=self._group, group_dst=to, tag=tag)
        return partial(self._finish, work, data, doing)

    def receive(self, into: Tensor, source: int, tag: int, doing: str) -> Callable[[], None]:
        """Begins to receive a CPU tensor from one rank; what is returned waits until it is there."""
        with self._exchange(doing, of_all=False):
            work = dist.irecv(into, group=self._group, group_src=source, tag=tag)
        return partial(self._finish, work, into, doing)

    def _finish(self, work: Any, held: Tensor, doing: str) -> None:
        with self._exchange(doing, of_all=False):
            work.wait()

    def await_near(self, ready: Callable[[float], bool], doing: str) -> None:
        """Waits for what another rank of this machine does in memory that both see.

        Args:
            ready: waits so many seconds for it; tells whether it has come.

        Raises:
            RanksError: a rank failed, or it did not come in time.
        """
        if ready(0.0):
            return
        end = time.monotonic() + self.deadline_s
        with self.phase.at(doing, waiting=True, counts=False):
            while not ready(_LOOK_S):
                self.check()
                if time.monotonic() > end:
                    raise self._lost(doing, TimeoutError("timed out"))

    # ---- failures outside of an exchange

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """An error that leaves the body ends every rank of the job.

        The rank where it happened raises it as it is; the others raise `RanksError` with its message, or
        are ended with one line where they are stuck in an exchange.
        """
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            told = self.failed(error)
            if told is error:
                raise
            raise told from error

    def failed(self, error: BaseException) -> BaseException:
        """Tells all ranks that an error ends this one; gives the error to raise, which may be another rank's."""
        if self._watch is None:
            return error
        if isinstance(error, RuntimeError) and not isinstance(error, PerdureError) and _is_broken(error):
            lost = self._lost(self.phase.doing, error)
            self._watch.fail(lost.message if isinstance(lost, RanksError) else str(lost))
            return lost
        if isinstance(error, Stopped):
            self._watch.fail(f"rank {self.rank} was asked to stop while starting", number=error.signal)
            return error
        where = f" at step {self.phase.step}" if self.phase.step >= 0 else ""
        kind = "" if isinstance(error, PerdureError) else f"{type(error).__name__}: "
        self._watch.fail(f"rank {self.rank} failed{where} while {self.phase.doing}: {kind}{_one_line(error)}")
        return error

    def check(self, after_s: float = 0.0) -> None:
        """To be called in a loop that waits for another rank's files; takes no time.

        Raises:
            RanksError: a rank failed, `after_s` or longer ago.
        """
        if self._watch is not None:
            self._watch.check(after_s)

    def leave(self) -> None:
        """This rank needs the others no more; its end is no failure. (`join` has its own way of leaving.)"""
        if self._watch is not None and not self._watch.joined:
            self._watch.leave()

    def post(self, key: str, text: str) -> None:
        """Leaves a text for a rank that looks for it."""
        if self._watch is not None:
            self._watch.post(key, text)

    def posted(self, key: str) -> str:
        """The text that another rank has left under a key, or ""."""
        return self._watch.posted(key) if self._watch is not None else ""

    @contextmanager
    def _exchange(self, doing: str, *, of_all: bool = True) -> Iterator[None]:
        try:
            with self.phase.at(doing, waiting=True, counts=of_all):
                yield
        except RuntimeError as error:
            raise self._lost(doing, error) from None

    def _lost(self, doing: str, error: Exception) -> BaseException:
        """What a broken or overdue exchange means: the failed rank's word, or who is missing."""
        word = self._watch.await_word(_REASON_S) if self._watch is not None else None
        if word is not None and word.rank != self.rank:
            return word.error()
        missing = self._watch.missing() if self._watch is not None else []
        who = "; ".join(missing) or "one of them is gone"
        return RanksError(
            f"rank {self.rank} waited for the other ranks while {doing}, and an answer did not come within "
            f"{self.deadline_s:g} s or the connection broke: {who} ({_one_line(error)[:200]})",
            hint="look at the first error of the other ranks; start the same command again to resume",
        )


def adopt(watch: Watch) -> None:
    """Every `Ranks` made from now on uses this watch."""
    global _watch
    _watch = watch


def present_watch() -> Watch | None:
    """The watch of this process, if it is one of several ranks."""
    return _watch


def neighbours(rank: int, size: int) -> Sequence[int]:
    """The ranks that may be on this machine: those that torchrun says are, or all of a small job."""
    local, count = number_told("LOCAL_RANK"), number_told("LOCAL_WORLD_SIZE", least=1)
    if local is not None and count is not None:
        first = rank - local
        return range(max(first, 0), min(first + count, size))
    return range(size) if size <= 64 else ()


def _is_broken(error: BaseException) -> bool:
    """Whether an error says that a peer is gone, rather than that something is wrong here."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _BROKEN)


def _one_line(error: BaseException) -> str:
    text = error.message if isinstance(error, PerdureError) else str(error)
    return " ".join(text.split())[:2000]
