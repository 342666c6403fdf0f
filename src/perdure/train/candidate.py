"""The checkpoint that a start would load: found and looked at as a load does, but not loaded."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

from perdure.catalog.choose import fallback
from perdure.catalog.foreign import WRITERS, list_foreign, read_foreign
from perdure.catalog.read import ShardFiles, read_iteration
from perdure.catalog.root import Root
from perdure.config.schema import CheckpointConfig, TrainConfig
from perdure.engine.find_checkpoint import find_checkpoint, iteration_named
from perdure.engine.own_record import from_record
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.engine.restore import check_foreign
from perdure.engine.saveroot import SaveRoot, check_continues, check_unused
from perdure.errors import DamagedCheckpointError
from perdure.format.common import CommonInfo
from perdure.format.metadata import CheckpointMetadata
from perdure.storage.local import LocalStorage

__all__ = ["Candidate", "SaveTarget", "find_candidate", "save_target"]


@dataclass
class Candidate:
    """A checkpoint that a start would load.

    Attributes:
        path: its directory.
        root: the root it lies in.
        made_by: the program that wrote it.
        metadata: what is where, under its own names.
        training: what its run recorded for a resume to compare; {} of another program's.
        progress: where its run was.
        ranks: how many saved it.
        weights_only: nothing but its weights is taken.
        lineage, attempt: of its run; "" of another program's.
        why: why this one.
        warnings: what the user should know about the choice.
        not_counted: what lies beside it and is no candidate, as (name, reason).
    """

    path: str
    root: str
    made_by: str
    metadata: CheckpointMetadata
    progress: Progress
    ranks: int
    weights_only: bool
    training: dict[str, Any] = field(default_factory=dict)
    lineage: str = ""
    attempt: str = ""
    why: str = ""
    warnings: list[str] = field(default_factory=list)
    not_counted: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class SaveTarget:
    """Where a start would save: the root, which is opened by nobody, and the section without saving."""

    root: SaveRoot
    config: CheckpointConfig


def save_target(config: TrainConfig) -> SaveTarget:
    """The root that `config` saves below; nothing is made, locked or cleaned."""
    silent = config.checkpoint.model_copy(update={"enable_save": False})
    path = config.checkpoint.save_path or os.path.join(config.output_dir, "checkpoint")
    return SaveTarget(SaveRoot(silent, path, LocalStorage(), Ranks(), "", lambda line: None), silent)


def find_candidate(config: TrainConfig, target: SaveTarget, checkpoint_path: str | None = None) -> Candidate | None:
    """What a start would load, or None for a fresh start.

    Headers are looked at, contents are not. Damage that shows is gone round as a load would.

    Raises:
        PerdureError: what the start would say.
    """
    found = find_checkpoint(target.config, target.root, checkpoint_path)
    if not found:
        if config.checkpoint.enable_save:
            check_unused(target.root.root.path, target.root.iterations())
        return None
    candidate = _foreign(config, found) if "kind" in found else _own(config, target, found)
    if config.checkpoint.enable_save:
        here = target.root.root.path
        if candidate.weights_only:
            check_unused(here, target.root.iterations())
        elif candidate.root != here:
            check_continues(here, target.root.iterations(), candidate.path, candidate.lineage)
    return candidate


def _foreign(config: TrainConfig, found: dict[str, Any]) -> Candidate:
    kind, path = found["kind"], found["path"]
    with LocalStorage().open_directory(path) as directory:
        content = read_foreign(directory, kind)
    check_foreign(content, path, found["weights_only"])
    others = [] if kind == "huggingface" else list_foreign(found["root"], kind).entries
    named = os.path.abspath(config.checkpoint.load_path) == path
    return Candidate(
        path=path,
        root=found["root"],
        made_by=WRITERS[kind],
        metadata=content.metadata,
        progress=Progress.from_common(content.common or CommonInfo()),
        ranks=content.ranks,
        weights_only=found["weights_only"],
        why="the path names it" if named else _why(found, "none has a higher number"),
        warnings=found["warnings"],
        not_counted=[(entry.dirname, entry.why) for entry in others if entry.content is None],
    )


def _own(config: TrainConfig, target: SaveTarget, found: dict[str, Any]) -> Candidate:
    root = Root(found["root"])
    iteration = iteration_named(root, found["dirname"])
    warnings, excluded = list(found["warnings"]), target.root.damaged(root)
    while True:
        try:
            with root.open(iteration) as directory:
                content = read_iteration(directory)
                training = from_record(content.metadata.training, iteration.path)
                with contextlib.closing(ShardFiles(directory, content.metadata, content.commit)) as files:
                    files.check()
            break
        except DamagedCheckpointError as error:
            excluded |= {iteration.commit.digest}
            older = fallback(root, iteration, exclude=excluded)
            if found["named"] or config.checkpoint.on_corrupt == "error" or older is None:
                raise
            warnings.append(f"{error.message}; a start goes back to {older.dirname}")
            iteration = older
    return Candidate(
        path=iteration.path,
        root=root.path,
        made_by=content.commit.writer,
        metadata=content.metadata,
        progress=Progress.from_common(content.common),
        ranks=content.commit.ranks,
        weights_only=found["weights_only"],
        training=training,
        lineage=content.commit.lineage,
        attempt=content.commit.attempt,
        why="the path names it" if found["named"] else _why(found, "none was saved later"),
        warnings=warnings,
        not_counted=[(entry.name, entry.why) for entry in root.uncommitted()],
    )


def _why(found: dict[str, Any], newest: str) -> str:
    return "; ".join(found["warnings"]) or f"the tracker names it, and {newest}"
