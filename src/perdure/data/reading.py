"""A loader that owns worker processes: made when a pass first needs them, ended when one fails or the loader closes."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from perdure.data.share import Share
from perdure.data.stepping import SteppedLoader
from perdure.data.workers import Workers
from perdure.errors import DataError

__all__ = ["ReadingLoader"]


class ReadingLoader(SteppedLoader):
    """What loaders that read by themselves have in common.

    Attributes:
        worker_cpus: processors that workers are bound to when they start; None for any.
    """

    worker_cpus: frozenset[int] | None = None

    def __init__(self, share: Share, length: int) -> None:
        super().__init__(share, length)
        self._workers: Workers | None = None

    @abstractmethod
    def _make_workers(self) -> Workers:
        """Workers that have not begun."""

    @abstractmethod
    def _tasks(self, steps: int | None) -> Callable[[], Iterator[Any]]:
        """What the workers do for so many steps from the present position."""

    def _begin(self, steps: int | None) -> None:
        if self._workers is None:
            self._workers = self._make_workers()
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
