"""Who descends from whom: ancestors by parents and sequence, never by iteration number.

A parent that retention removed still links its child to its own parent: the events remember every save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from perdure.catalog.root import Iteration

__all__ = ["Links", "ancestors", "last_save_of", "links", "newest_by_lineage", "next_sequence"]

Links = Mapping[tuple[str, int], int]
"""(lineage, sequence) -> sequence of its parent, 0 for none."""


def links(iterations: Iterable[Iteration], events: Iterable[dict[str, Any]] = ()) -> Links:
    """The parents known from commits and from `save` events; a commit on disk wins."""
    known: dict[tuple[str, int], int] = {}
    for event in events:
        if _is_save(event):
            known[event["lineage"], event["sequence"]] = event["parent"]
    for iteration in iterations:
        commit = iteration.commit
        known[commit.lineage, commit.sequence] = commit.parent
    return known


def last_save_of(iteration: int, events: Iterable[dict[str, Any]]) -> tuple[str, int] | None:
    """Lineage and sequence of the save that wrote this iteration last, as the events remember it."""
    saves = [e for e in events if _is_save(e) and type(e.get("step")) is int and e["step"] == iteration]
    return (saves[-1]["lineage"], saves[-1]["sequence"]) if saves else None


def _is_save(event: dict[str, Any]) -> bool:
    lineage, sequence, parent = event.get("lineage"), event.get("sequence"), event.get("parent")
    return event["event"] == "save" and isinstance(lineage, str) and type(sequence) is int and type(parent) is int


def ancestors(iterations: Iterable[Iteration], lineage: str, parent: int, known: Links) -> Iterator[Iteration]:
    """The iterations on disk from which a save with `parent` descends, nearest first."""
    by_sequence = {i.commit.sequence: i for i in iterations if i.commit.lineage == lineage}
    # A parent is always older than its child: an absurd record cannot send this round in circles.
    bound = None
    while parent > 0 and (bound is None or parent < bound):
        if parent in by_sequence:
            yield by_sequence[parent]
        elif (lineage, parent) not in known:
            return
        bound, parent = parent, known.get((lineage, parent), 0)


def newest_by_lineage(iterations: Iterable[Iteration]) -> dict[str, Iteration]:
    """The highest sequence of each lineage; the lineage that committed last comes first."""
    newest: dict[str, Iteration] = {}
    last: dict[str, float] = {}
    for iteration in iterations:
        commit = iteration.commit
        last[commit.lineage] = max(last.get(commit.lineage, commit.time), commit.time)
        held = newest.get(commit.lineage)
        if held is None or (held.commit.sequence, held.commit.time) < (commit.sequence, commit.time):
            newest[commit.lineage] = iteration
    return {name: newest[name] for name in sorted(newest, key=lambda n: (-last[n], n))}


def next_sequence(
    iterations: Iterable[Iteration], lineage: str, parent: int = 0, events: Iterable[dict[str, Any]] = ()
) -> int:
    """A sequence that no save of this lineage, on disk or remembered, has had here."""
    used = [s for (name, s) in links(iterations, events) if name == lineage]
    return max([parent, *used]) + 1
