"""What is kept and what goes: a pure decision, then removal that cannot fail a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.catalog.publish import hide, remove_tree
from perdure.catalog.root import Iteration, Root
from perdure.format.names import COMMIT, COMMON, METADATA, parse_shard_filename

__all__ = ["Verdict", "delete", "keep", "remove", "withdraw"]


@dataclass(frozen=True)
class Verdict:
    """Whether an iteration goes, and why it goes or stays."""

    remove: bool
    reason: str


def keep(
    iterations: Sequence[Iteration], save_max: int, *, lineage: str, pinned: Mapping[int, str]
) -> dict[Iteration, Verdict]:
    """A verdict for every iteration: of the lineage the newest `save_max` by sequence stay.

    Args:
        pinned: sequences of the lineage that stay whatever the count, with the reason; they count too.
    """
    verdicts = {i: Verdict(False, "of another run") for i in iterations if i.commit.lineage != lineage}
    own = sorted((i for i in iterations if i.commit.lineage == lineage), key=lambda i: -i.commit.sequence)
    room = save_max - sum(i.commit.sequence in pinned for i in own)
    for iteration in own:
        reason = pinned.get(iteration.commit.sequence)
        if reason is not None:
            verdicts[iteration] = Verdict(False, reason)
        elif room > 0:
            room -= 1
            verdicts[iteration] = Verdict(False, f"one of the newest {save_max}")
        else:
            verdicts[iteration] = Verdict(True, f"not among the newest {save_max}")
    return verdicts


def remove(root: Root, iteration: Iteration) -> list[str]:
    """Removes an iteration; gives warnings instead of raising. One that is gone already is no fault."""
    hidden, warnings = withdraw(root, iteration)
    return warnings if hidden is None else warnings + delete(root, hidden)


def withdraw(root: Root, iteration: Iteration) -> tuple[str | None, list[str]]:
    """Makes an iteration invisible in one rename; gives the path to `delete` at leisure (None for none), and warnings.

    What a crash leaves in between is deleted at the next start.
    """
    try:
        with root.open(iteration) as directory:
            foreign = [n for n in directory.names() if not _ours(n)]
        if foreign:
            return None, [f"{iteration.dirname} is not removed: it holds what is not of the checkpoint: {foreign[0]}"]
        hidden = hide(root, iteration.path, iteration.iteration, iteration.commit.sequence)
        root.storage.sync_directory(root.path)
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [f"{iteration.dirname} could not be removed now and will be tried again: {error}"]
    return hidden, []


def delete(root: Root, hidden: str) -> list[str]:
    """Deletes what was withdrawn; gives warnings instead of raising."""
    try:
        remove_tree(root, hidden)
    except OSError as error:
        return [f"{hidden} could not be removed now and will be tried again at the next start: {error}"]
    return []


def _ours(name: str) -> bool:
    return name in (COMMIT, METADATA, COMMON) or parse_shard_filename(name) is not None
