"""A loader that owns worker processes: made when a pass first needs them, ended when one fails or the loader closes."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from perdure.data.share import Share
from perdure.data.stepping import SteppedLoader
from perdure.data.workers import Workers, new_board
from perdure.errors import DataError

__all__ = ["ReadingLoader"]


class ReadingLoader(SteppedLoader):
    """What loaders that read by themselves have in common.

    Attributes:
        worker_cpus: processors that workers are bound to when they start; None for any.
    """

    worker_cpus: frozenset[int] | None = None
    _name: str
    _num_workers: int
    _prefetch: int
    _pin_memory: bool

    def __init__(self, share: Share, length: int) -> None:
        super().__init__(share, length)
        self._workers: Workers | None = None

    @abstractmethod
    def _reader(self, board: Any) -> tuple[Any, Callable[[int], str]]:
        """What does a task, and what names a sample by its index.

        Neither holds the loader: its workers end when it is forgotten.
        """

    @abstractmethod
    def _tasks(self, steps: int | None) -> Callable[[], Iterator[Any]]:
        """What the workers do for so many steps from the present position."""

    def _begin(self, steps: int | None) -> None:
        if self._workers is None:
            board = new_board(self._num_workers)
            fetcher, where = self._reader(board)
            self._workers = Workers(
                fetcher,
                name=self._name,
                where=where,
                num_workers=self._num_workers,
                prefetch=self._prefetch,
                pin_memory=self._pin_memory,
                board=board,
                cpus=self.worker_cpus,
            )
            weakref.finalize(self, self._workers.close)
        tasks = self._tasks(steps)
        try:
            self._workers.start(tasks)
        except DataError:
            self._close_workers()
            raise

    def _close_workers(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
