"""`perdure ls`: the iterations under a root, committed or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from perdure.catalog.choose import locate_root
from perdure.catalog.events import damage_marks
from perdure.catalog.foreign import recognise
from perdure.catalog.root import Iteration, Root, RootListing, TrackerReading
from perdure.cli import render
from perdure.cli.ls_foreign import show_foreign
from perdure.cli.paths import FilePath
from perdure.errors import CheckpointNotFoundError

__all__ = ["command"]


@click.command("ls")
@click.argument("root", type=FilePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def command(root: Path, as_json: bool) -> None:
    """Lists the iterations under ROOT by the order in which they were saved.

    `*` marks the one that the tracker names, which a resume takes. Roots of MindSpore Transformers and Hugging Face
    directories are listed too; theirs don't tell in which order they were saved.
    """
    kind = recognise(str(root))
    if kind is not None:
        show_foreign(root, kind, as_json)
        return
    place = Root(root)
    listing, tracker = place.listing(), place.tracker()
    if not listing.iterations and not listing.uncommitted:
        locate_root(root)
    marked = damage_marks(place)
    if as_json:
        render.print_json(
            {
                "root": str(root),
                "tracker": {"text": tracker.text, "iteration": tracker.iteration, "state": tracker.state},
                "iterations": [_record(i, tracker, marked) for i in listing.iterations],
                "uncommitted": [{"name": u.name, "kind": u.kind, "why": u.why} for u in listing.uncommitted],
            }
        )
    else:
        _show(listing, tracker, marked)
    if not listing.iterations:
        raise CheckpointNotFoundError(f"{root} holds no committed iteration")


def _record(iteration: Iteration, tracker: TrackerReading, marked: set[str]) -> dict[str, Any]:
    commit = iteration.commit
    return {
        "iteration": iteration.iteration,
        "directory": iteration.dirname,
        "sequence": commit.sequence,
        "parent": commit.parent,
        "lineage": commit.lineage,
        "attempt": commit.attempt,
        "consumed_samples": commit.consumed_samples,
        "bytes": commit.size,
        "ranks": commit.ranks,
        "time": commit.time,
        "healthy": commit.healthy,
        "damaged": commit.digest in marked,
        "tracker": iteration.iteration == tracker.iteration,
        "writer": commit.writer,
    }


def _show(listing: RootListing, tracker: TrackerReading, marked: set[str]) -> None:
    now, rows = time.time(), []
    for iteration in listing.iterations:
        commit = iteration.commit
        health = "damaged" if commit.digest in marked else "yes" if commit.healthy else "no"
        rows.append(
            (
                "*" if iteration.iteration == tracker.iteration else "",
                iteration.dirname,
                render.human_count(iteration.iteration),
                render.human_count(commit.consumed_samples),
                commit.sequence,
                commit.parent or None,
                render.human_bytes(commit.size),
                render.human_seconds(max(0.0, now - commit.time)),
                health,
                commit.ranks,
                commit.lineage[:8],
            )
        )
    if rows:
        columns = ["", "iteration", "step", "samples", "save", "after", "size", "age", "healthy", "ranks", "run"]
        render.table(columns, rows, numbers={"step", "samples", "save", "after", "size", "age", "ranks"})
    if tracker.state == "missing":
        render.note("there is no tracker; a resume takes the newest committed iteration")
    elif all(i.iteration != tracker.iteration for i in listing.iterations):
        render.warn(f"the tracker says {tracker.text!r}, which is not a committed iteration")
    for entry in listing.uncommitted:
        render.note(f"not counted: {entry.name}: {entry.why}")
