"""Which checkpoint a start loads: RESUME.md's order, 1 and 2. Reads directories and changes nothing."""

from __future__ import annotations

import os
import time
from typing import Any

from perdure.catalog.choose import choose, locate
from perdure.catalog.foreign import choose_foreign, recognise
from perdure.catalog.root import Iteration, Root
from perdure.config.schema import CheckpointConfig
from perdure.engine.saveroot import SaveRoot
from perdure.errors import CheckpointNotFoundError, UsageError
from perdure.format.names import parse_iteration_dirname, path_text

__all__ = ["VISIBLE_S", "find_checkpoint", "iteration_named"]

VISIBLE_S = 5.0  # how long a rank waits to see what rank 0 has seen


def find_checkpoint(config: CheckpointConfig, save_root: SaveRoot, checkpoint_path: str | None) -> dict[str, Any]:
    """What to load, as rank 0 tells it to all; {} for a fresh start.

    `root`; `dirname` and `named` (the path itself named the iteration) of ours, `path` and `kind` of another program's;
    `warnings` and `weights_only`.

    Args:
        checkpoint_path: wins over `load_path`.

    Raises:
        CheckpointNotFoundError: a path was given and nothing committed is there.
        DamagedCheckpointError, FormatTooNewError: what there is cannot be read.
        UsageError: path and `auto_resume` contradict each other.
    """
    path = path_text(checkpoint_path, "checkpoint_path") if checkpoint_path else config.load_path
    own, storage = save_root.iterations(), save_root.root.storage
    kind = recognise(path, storage) if path else None
    if config.auto_resume:
        inside = bool(path) and save_root.contains(path)
        if inside and parse_iteration_dirname(os.path.basename(os.path.normpath(path))) is not None:
            raise UsageError(
                f"{path} names one iteration of the root that auto_resume would continue",
                hint=f"perdure rewind {save_root.root.path} --to N, then start again with auto_resume",
            )
        if own:
            return _choice(config, save_root, save_root.root, None, weights_only=False)
        here = inside and os.path.abspath(path) == save_root.root.path
        if (here and kind is None) or (inside and not os.path.lexists(path)):
            return {}
    if not path:
        return {}
    if kind is not None:
        foreign = choose_foreign(path, kind, storage, load_healthy=config.load_healthy)
        return {
            "root": foreign.root,
            "path": foreign.path,
            "kind": kind,
            "warnings": foreign.warnings,
            "weights_only": config.no_load_optim,
        }
    try:
        located = locate(path, storage)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            error.message,
            hint=error.hint or "for a first start leave load_path empty, or set checkpoint.auto_resume=True",
        ) from None
    return _choice(config, save_root, located.root, located.iteration, weights_only=config.no_load_optim)


def _choice(
    config: CheckpointConfig, save_root: SaveRoot, root: Root, named: Iteration | None, *, weights_only: bool
) -> dict[str, Any]:
    warnings: list[str] = []
    explicit = named is not None
    if named is None:
        choice = choose(root, load_healthy=config.load_healthy, exclude=save_root.damaged(root))
        named, warnings = choice.iteration, choice.warnings
    return {
        "root": root.path,
        "dirname": named.dirname,
        "named": explicit,
        "warnings": warnings,
        "weights_only": weights_only,
    }


def iteration_named(root: Root, dirname: str, wait_s: float = 0.0) -> Iteration:
    """The iteration of that name, which was there when it was looked for.

    Args:
        wait_s: how long to go on looking; network file systems show new names to other hosts a little later.

    Raises:
        CheckpointNotFoundError: it cannot be seen.
    """
    deadline = time.monotonic() + wait_s
    while True:
        for iteration in root.iterations():
            if iteration.dirname == dirname:
                return iteration
        if time.monotonic() >= deadline:
            raise CheckpointNotFoundError(
                f"{root.path}: {dirname} is not visible here, or has gone meanwhile",
                hint="every rank must see the same storage: put checkpoint.save_path on a shared file system",
            )
        time.sleep(0.05)
