"""One iteration, read-only: what `inspect` shows and what a program asks without torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Literal

from perdure.catalog.choose import choose, locate
from perdure.catalog.foreign import WRITERS, choose_foreign, read_foreign, recognise
from perdure.catalog.read import ShardFiles, read_iteration
from perdure.catalog.report import Report
from perdure.catalog.verify import verify
from perdure.format.commit import CommitRecord
from perdure.format.common import HEALTHY, CommonInfo
from perdure.format.metadata import CheckpointMetadata, Section, TensorRecord
from perdure.format.names import parse_iteration_dirname, path_text
from perdure.storage.base import Storage
from perdure.storage.local import LocalStorage

__all__ = ["Checkpoint"]


class Checkpoint:
    """A complete iteration, opened by a root (the one a resume would take) or by its own directory.

    Iterations of MindSpore Transformers and weight directories in Hugging Face's layout are opened too.

    Args:
        path: the root or the iteration directory.
        storage: where it lies.

    Attributes:
        path: the iteration's directory.
        kind: whose format it is in.
        warnings: what the user should know about the choice.
        commit: who saved it, when, and what it descends from; None for another program's.
        common: the run's progress; None where another program left none.
        metadata: what is where.
        ranks: how many ranks saved it, as far as its files tell.

    Raises:
        CheckpointNotFoundError: nothing complete is there.
        DamagedCheckpointError: its JSON files or headers aren't what was written.
        FormatTooNewError: a newer version wrote it.
    """

    kind: Literal["perdure", "mindformers", "huggingface"]
    path: str
    commit: CommitRecord | None
    common: CommonInfo | None
    metadata: CheckpointMetadata

    def __init__(self, path: str | os.PathLike[str], storage: Storage | None = None) -> None:
        self._storage = storage or LocalStorage()
        self.warnings: list[str] = []
        path = path_text(path)
        foreign = recognise(path, self._storage)
        if foreign is not None:
            choice = choose_foreign(path, foreign, self._storage)
            self.kind, self.path, self.warnings, self.commit = foreign, choice.path, choice.warnings, None
            with self._storage.open_directory(self.path) as directory:
                self.metadata, self.common, self.ranks = read_foreign(directory, foreign)
            return
        located = locate(path, storage)
        found = located.iteration
        if found is None:
            chosen = choose(located.root)
            found, self.warnings = chosen.iteration, chosen.warnings
        self.kind, self.path = "perdure", found.path
        with located.root.open(found) as directory:
            self.commit, self.metadata, self.common = read_iteration(directory)
        self.ranks = self.commit.ranks

    @property
    def iteration(self) -> int | None:
        """The global step it was saved at; None for weights alone that don't say."""
        if self.commit is not None:
            return self.commit.iteration
        return self.common.global_step if self.common is not None else parse_iteration_dirname(self._name)

    @property
    def writer(self) -> str:
        """The program that wrote it."""
        return self.commit.writer if self.commit is not None else WRITERS[self.kind] if self.kind != "perdure" else ""

    @property
    def healthy(self) -> bool:
        """Whether nothing marks it as abnormal."""
        return self.common is None or self.common.ckpt_status == HEALTHY

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return self.commit.size if self.commit is not None else sum(f.size for f in self.metadata.files)

    @property
    def _name(self) -> str:
        return os.path.basename(self.path)

    def names(self, section: Section = "model") -> list[str]:
        """Names of the tensors of one section.

        Raises:
            UsageError: no such section.
        """
        return list(self.metadata.section(section))

    def tensor_record(self, name: str, section: Section = "model") -> TensorRecord:
        """Dtype, shape and shards of one tensor; an alias names it too.

        Raises:
            KeyError: no such tensor.
            UsageError: no such section.
        """
        tensors = self.metadata.section(section)
        if name in tensors:
            return tensors[name]
        for record in tensors.values():
            if name in record.aliases:
                return record
        raise KeyError(f"no {section} tensor {name!r} in {self.path}")

    @contextlib.contextmanager
    def open_files(self) -> Iterator[ShardFiles]:
        """Its shard files, to read tensors from; closed when the block ends."""
        with (
            self._storage.open_directory(self.path) as directory,
            ShardFiles(directory, self.metadata, self.commit) as files,
        ):
            yield files

    def verify(self, *, read_data: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
        """Checks the iteration against what was written; `read_data` reads every byte."""
        return verify(self.path, read_data=read_data, storage=self._storage, progress=progress)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, iteration={self.iteration})"
