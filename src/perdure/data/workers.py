"""The worker processes behind a loader: started once, reused by every pass, ended for certain.

Workers ignore the signals by which a run is asked to stop: launchers send them to the whole process
group, and the trainer must still be able to finish its step. They end when the loader closes them or
when the training process dies.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from perdure.data.fetch import BOARD_FIELDS, Failure
from perdure.data.transfer import Opened, Parcel
from perdure.errors import DataError

__all__ = ["Workers", "new_board"]

_SIGNALS_IGNORED = ("SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
_PR_SET_PDEATHSIG = 1


def new_board(num_workers: int) -> Any:
    """Shared integers: `BOARD_FIELDS` per worker, and a last one that says the loader is closing; None for none."""
    if num_workers == 0:
        return None
    return RawArray(ctypes.c_int64, num_workers * BOARD_FIELDS + 1)


class ServesTasks(Protocol):
    """Makes of each task what is delivered, or a `Failure`; in one process, tasks come in order."""

    def __getitem__(self, task: Any) -> Any: ...


class Workers:
    """A torch DataLoader over tasks, whose workers live until `close`.

    Args:
        fetcher: what serves a task.
        name: what the data set is called in errors.
        where: says in words where the sample of a data set index lies.
        num_workers: processes; 0 fetches in the caller's.
        prefetch: tasks in flight per worker.
        pin_memory: copy tensors into pinned memory (only where there is an accelerator).
        board: from `new_board(num_workers)`, the one that the fetcher has.
        cpus: processors that the workers are bound to; None for any.
    """

    def __init__(
        self,
        fetcher: ServesTasks,
        *,
        name: str,
        where: Callable[[int], str],
        num_workers: int,
        prefetch: int,
        pin_memory: bool,
        board: Any,
        cpus: Collection[int] | None = None,
    ) -> None:
        self._name, self._where = name, where
        self._board = board
        self._num_workers = num_workers
        self._owner = os.getpid()
        self._tasks = _TaskStream()
        self._iterator: Iterator[Any] | None = None
        self._fetcher = fetcher
        self._cpus = cpus
        self._loader: DataLoader[Any] | None = None
        pin = pin_memory and torch.accelerator.is_available()
        if num_workers or pin:
            self._loader = self._torch_loader(prefetch, pin)
        atexit.register(self.close)

    def _torch_loader(self, prefetch: int, pin_memory: bool) -> DataLoader[Any]:
        settings: dict[str, Any] = {}
        if self._num_workers:
            settings["prefetch_factor"] = prefetch
            settings["persistent_workers"] = True
            settings["worker_init_fn"] = _WorkerStart(self._board, os.getpid(), _in_main_thread(), self._cpus)
        with warnings.catch_warnings():
            # More workers than cores is the user's choice, and changes no result.
            warnings.filterwarnings("ignore", message=".*worker processes in total")
            return DataLoader(
                self._fetcher,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._tasks,
                num_workers=self._num_workers,
                collate_fn=_as_it_is,
                pin_memory=pin_memory,
                # A generator of its own: starting a pass draws a number, which must not come from the caller's stream.
                generator=torch.Generator(),
                **settings,
            )

    def start(self, tasks: Callable[[], Iterator[Any]]) -> None:
        """Begins a new pass over tasks; what was in flight is dropped."""
        self._tasks.make = tasks
        try:
            with warnings.catch_warnings(), _deaths.raised():
                warnings.filterwarnings("ignore", message=".*worker processes in total")
                self._iterator = iter(self._loader) if self._loader else map(self._fetcher.__getitem__, tasks())
                if self._num_workers:
                    _deaths.hold_back()
        except RuntimeError as error:
            raise self._died(error) from error

    def next(self) -> Any:
        """What the fetcher made of the next task.

        Raises:
            DataError: a sample cannot be read or collated, or a worker died. The workers are ended.
        """
        assert self._iterator is not None
        if self._num_workers == 0:
            fetched = next(self._iterator)
        else:
            try:
                with _deaths.raised():
                    fetched = next(self._iterator)
            except RuntimeError as error:
                raise self._died(error) from error
        if isinstance(fetched, Failure):
            self.close()
            fetched.raise_error()
        return fetched if type(fetched) is tuple else self._opened(fetched)

    def _opened(self, parcel: Parcel | Opened) -> Any:
        try:
            return parcel.open()
        except Exception as error:
            self.close()
            raise DataError(
                f"{self._name}: a batch cannot be taken over from its worker: {type(error).__name__}: {error}",
                hint="give batches of tensors, arrays, numbers and texts; see collate_fn",
            ) from error

    def close(self, *, at_once: bool = False) -> None:
        """Ends the workers, `at_once` without waiting for the sample in hand; safe to call again."""
        if os.getpid() != self._owner:
            return  # a copy inherited by a forked process
        atexit.unregister(self.close)
        iterator, self._iterator = self._iterator, None
        if iterator is None or self._num_workers == 0 or self._board is None:
            return
        self._board[self._num_workers * BOARD_FIELDS] = 1
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if self._loader is not None:
            self._loader._iterator = None
        if at_once:
            self._kill()
        if shutdown is not None:
            shutdown()
        self._kill()

    def _kill(self) -> None:
        """Kills those of the workers that still live."""
        pids = set(self._board[0 : self._num_workers * BOARD_FIELDS : BOARD_FIELDS])
        for process in multiprocessing.active_children():
            if process.pid in pids:
                process.kill()
                process.join()

    def _died(self, error: RuntimeError) -> DataError:
        """A worker's death in words; the board knows which sample it had in hand."""
        sample = ""
        board = self._board or []
        dead = {int(pid) for group in re.findall(r"pid(?:\(s\))? ([\d, ]+)", str(error)) for pid in group.split(",")}
        for worker in range(self._num_workers):
            pid, position, index = board[worker * BOARD_FIELDS : (worker + 1) * BOARD_FIELDS]
            if pid in dead:
                sample = f" near {self._where(index)}, stream position {position}"
        # The dead one may have taken the lock of the queue with it, on which the others then wait.
        self.close(at_once=True)
        return DataError(
            f"{self._name}: loading failed in a worker process{sample}: {error}",
            hint="run once with num_workers 0 to see the error itself; a worker killed by the system often means "
            "that memory or /dev/shm is full",
        )


class _Deaths:
    """Makes a worker's death an error of the pass that needs it, not of whatever the main thread does.

    Torch raises from its SIGCHLD handler wherever the main thread is: in the middle of an update, or in
    a collective that the other ranks have entered. Here it raises only while a pass waits for data; a
    death in between is found when the next batch is asked for.
    """

    def __init__(self) -> None:
        self._torch: Callable[[int, Any], Any] | None = None
        self._waiting = False

    def hold_back(self) -> None:
        """Puts itself before torch's handler, which stands once a first pass with workers has begun."""
        if not _in_main_thread():
            return
        present = signal.getsignal(signal.SIGCHLD)
        if present != self._handle and callable(present):
            self._torch = present
            signal.signal(signal.SIGCHLD, self._handle)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """While the body runs, deaths raise RuntimeError; one that has happened already does at once."""
        if self._torch is None or not _in_main_thread():
            yield
            return
        self._waiting = True
        try:
            self._torch(signal.SIGCHLD, None)
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: Any) -> None:
        if self._waiting and self._torch is not None:
            self._torch(number, frame)


_deaths = _Deaths()


class _TaskStream:
    """The sampler of the DataLoader: whatever tasks the present pass has."""

    def __init__(self) -> None:
        self.make: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.make()

    def __len__(self) -> int:
        return sys.maxsize


@dataclass
class _WorkerStart:
    """Run first in every worker process."""

    board: Any
    parent: int
    die_with_parent: bool
    cpus: Collection[int] | None

    def __call__(self, worker: int) -> None:
        self.board[worker * BOARD_FIELDS] = os.getpid()
        for name in _SIGNALS_IGNORED:
            number = getattr(signal, name, None)
            if number is not None:
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        if self.die_with_parent and sys.platform == "linux":
            # An orphan would go on holding what it inherited, the locks on the run's directories too.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.parent:
                os._exit(1)

    def _terminated(self, number: int, frame: object) -> None:
        if self.board[len(self.board) - 1]:
            os._exit(0)


def _in_main_thread() -> bool:
    # Linux sends the death signal when the starting thread ends, and only the main one surely outlives the workers.
    return threading.current_thread() is threading.main_thread()


def _as_it_is(fetched: Any) -> Any:
    return fetched
