"""`perdure rewind`: point a root at an earlier iteration, so that the next start goes on from there."""

from __future__ import annotations

import uuid
from pathlib import Path

import click

from perdure.catalog.choose import locate_root
from perdure.catalog.events import append_event
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import set_tracker
from perdure.cli import render
from perdure.cli.paths import FilePath
from perdure.errors import CheckpointNotFoundError

__all__ = ["command"]


@click.command("rewind")
@click.argument("root", type=FilePath(path_type=Path))
@click.option("--to", "target", type=int, required=True, help="The iteration to go on from.")
def command(root: Path, target: int) -> None:
    """Points ROOT at iteration N: the next start resumes from it.

    Later iterations stay on disk as a branch, until retention or you remove them.
    """
    place = locate_root(root)
    lock = RootLock.acquire(place.path, attempt=f"rewind-{uuid.uuid4().hex[:8]}")
    try:
        iteration = place.find(target)
        if iteration is None:
            have = ", ".join(str(i.iteration) for i in place.iterations()) or "none"
            raise CheckpointNotFoundError(f"{root} holds no committed iteration {target}; it has {have}")
        before = place.tracker().text
        set_tracker(place, target)
        # A mark of damage ends with it: the iteration may have been repaired, and is looked at anew.
        commit = iteration.commit
        append_event(place, "rewind", to=target, sequence=commit.sequence, commit=commit.digest, tracker_before=before)
    finally:
        lock.release()
    render.say(f"{root} now points at {iteration.dirname} (before: {before or 'nothing'})")
