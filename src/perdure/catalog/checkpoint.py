"""One iteration, read-only: what `inspect` shows and what a program asks without torch."""

from __future__ import annotations

import os
from collections.abc import Callable

from perdure.catalog.choose import choose, locate
from perdure.catalog.read import IterationContent, read_iteration
from perdure.catalog.root import Iteration
from perdure.catalog.verify import Report, verify
from perdure.format.commit import CommitRecord
from perdure.format.common import CommonInfo
from perdure.format.metadata import CheckpointMetadata, Section, TensorRecord
from perdure.storage.base import Storage

__all__ = ["Checkpoint"]


class Checkpoint:
    """A committed iteration, opened by a root (the one a resume would take) or by its own directory.

    Args:
        path: the root or the iteration directory.
        storage: where it lies.

    Raises:
        CheckpointNotFoundError: no committed iteration is there.
        DamagedCheckpointError: its JSON files aren't what was written.
        FormatTooNewError: a newer version wrote it.
    """

    def __init__(self, path: str | os.PathLike[str], storage: Storage | None = None) -> None:
        located = locate(os.fspath(path), storage)
        self.warnings: list[str] = []
        found = located.iteration
        if found is None:
            choice = choose(located.root)
            found, self.warnings = choice.iteration, choice.warnings
        self._found: Iteration = found
        self._storage = located.root.storage
        with located.root.open(found) as directory:
            self._content: IterationContent = read_iteration(directory)

    @property
    def path(self) -> str:
        """The iteration's directory."""
        return self._found.path

    @property
    def iteration(self) -> int:
        """The global step it was saved at."""
        return self._found.iteration

    @property
    def commit(self) -> CommitRecord:
        """Who saved it, when, and what it descends from."""
        return self._content.commit

    @property
    def common(self) -> CommonInfo:
        """The run's progress."""
        return self._content.common

    @property
    def metadata(self) -> CheckpointMetadata:
        """What is where."""
        return self._content.metadata

    def names(self, section: Section = "model") -> list[str]:
        """Names of the tensors of one section."""
        return list(self.metadata.section(section))

    def tensor_record(self, name: str, section: Section = "model") -> TensorRecord:
        """Dtype, shape and shards of one tensor; an alias names it too.

        Raises:
            KeyError: no such tensor.
        """
        tensors = self.metadata.section(section)
        if name in tensors:
            return tensors[name]
        for record in tensors.values():
            if name in record.aliases:
                return record
        raise KeyError(f"no {section} tensor {name!r} in {self.path}")

    def verify(self, *, read_data: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Checks the iteration against what was written; `read_data` reads every byte."""
        return verify(self.path, read_data=read_data, storage=self._storage, progress=progress)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, iteration={self.iteration})"
