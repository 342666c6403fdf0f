"""`perdure ls` on what other programs made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.catalog.foreign import WRITERS, ForeignEntry, ForeignKind, ForeignListing, list_foreign
from perdure.cli import render
from perdure.errors import CheckpointNotFoundError
from perdure.format.common import HEALTHY

__all__ = ["show_foreign"]


def show_foreign(path: Path, kind: ForeignKind, as_json: bool) -> None:
    """Lists a foreign root, or the one directory that the path is.

    Raises:
        CheckpointNotFoundError: after all was shown: nothing of it is complete.
    """
    listing = list_foreign(str(path), kind)
    tracker = listing.tracker
    if as_json:
        render.print_json(
            {
                "root": str(path),
                "kind": kind,
                "writer": WRITERS[kind],
                "tracker": {"text": tracker.text, "iteration": tracker.iteration, "state": tracker.state},
                "iterations": [_record(e, listing) for e in listing.entries if e.content is not None],
                "uncommitted": [{"name": e.dirname, "why": e.why} for e in listing.entries if e.content is None],
            }
        )
    else:
        _show(listing)
    if all(entry.content is None for entry in listing.entries):
        raise CheckpointNotFoundError(f"{path} holds no complete checkpoint of {WRITERS[kind]}")


def _record(entry: ForeignEntry, listing: ForeignListing) -> dict[str, Any]:
    assert entry.content is not None
    metadata, common, ranks = entry.content
    return {
        "iteration": entry.iteration,
        "directory": entry.dirname,
        "consumed_samples": None if common is None or common.position_unknown else common.consumed_samples,
        "bytes": sum(f.size for f in metadata.files),
        "ranks": ranks,
        "tensors": len(metadata.model),
        "optimizer": bool(metadata.optimizer),
        "healthy": common is None or common.ckpt_status == HEALTHY,
        "tracker": entry.iteration is not None and entry.iteration == listing.tracker.iteration,
    }


def _show(listing: ForeignListing) -> None:
    rows = []
    for entry in listing.entries:
        if entry.content is None:
            continue
        record = _record(entry, listing)
        samples, step = record["consumed_samples"], entry.iteration
        rows.append(
            (
                "*" if record["tracker"] else "",
                entry.dirname,
                None if step is None else render.human_count(step),
                None if samples is None else render.human_count(samples),
                record["tensors"],
                "yes" if record["optimizer"] else "no",
                render.human_bytes(record["bytes"]),
                "yes" if record["healthy"] else "no",
                record["ranks"],
            )
        )
    if rows:
        columns = ["", "iteration", "step", "samples", "weights", "optimizer", "size", "healthy", "ranks"]
        render.table(columns, rows, numbers={"step", "samples", "weights", "size", "ranks"})
    render.note(f"made by {WRITERS[listing.kind]}")
    tracker = listing.tracker
    if listing.kind == "mindformers" and tracker.state == "missing":
        render.note("there is no tracker; a resume takes the highest complete iteration")
    elif listing.kind == "mindformers" and len(listing.entries) > 1 and tracker.iteration not in listing.complete:
        render.warn(f"the tracker says {tracker.text!r}, which is not a complete iteration")
    for entry in listing.entries:
        if entry.content is None:
            render.note(f"not counted: {entry.dirname}: {entry.why}")
