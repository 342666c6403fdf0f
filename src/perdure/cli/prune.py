"""`perdure prune`: remove old iterations of a run, or say which would go and why the others stay."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import click

from perdure.catalog.choose import choose, fallback, locate_root
from perdure.catalog.events import append_event
from perdure.catalog.lock import RootLock
from perdure.catalog.retention import keep, remove
from perdure.cli import render
from perdure.cli.paths import FilePath

__all__ = ["command"]


@click.command("prune")
@click.argument("root", type=FilePath(path_type=Path))
@click.option("--keep", "most", type=click.IntRange(min=1), default=1, show_default=True, help="How many stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def command(root: Path, most: int, dry_run: bool, as_json: bool) -> int:
    """Removes all but the newest iterations of the run that ROOT points at.

    The one that a resume would take always stays, and so does what belongs to another run.
    """
    place = locate_root(root)
    warnings: list[str] = []
    with contextlib.ExitStack() as stack:
        if not dry_run:
            # First of all: what is found then stands until it is acted upon.
            stack.callback(RootLock.acquire(place.path, attempt=f"prune-{uuid.uuid4().hex[:8]}").release)
        chosen = choose(place).iteration
        pinned = {chosen.commit.sequence: "a resume would take it"}
        iterations = place.iterations()
        nearest = fallback(place, chosen, among=iterations) if most > 1 else None
        if nearest is not None:
            pinned[nearest.commit.sequence] = "a resume would take it if that one is damaged"
        verdicts = keep(iterations, most, lineage=chosen.commit.lineage, pinned=pinned)
        for iteration in [] if dry_run else [i for i, verdict in verdicts.items() if verdict.remove]:
            told = remove(place, iteration)
            warnings += told
            if not told:
                append_event(place, "remove", iteration=iteration.iteration, sequence=iteration.commit.sequence)
    done = "would go" if dry_run else "removed"
    rows = [(i.dirname, done if v.remove else "stays", v.reason) for i, v in verdicts.items()]
    if as_json:
        render.print_json([{"directory": name, "verdict": what, "reason": why} for name, what, why in rows])
    else:
        render.table(("iteration", "verdict", "because"), rows)
    for warning in warnings:
        render.warn(warning)
    return 1 if warnings else 0
