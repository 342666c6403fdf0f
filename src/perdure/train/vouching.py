"""Whether a ledger is still the one that the checkpoints' commits vouch for."""

from __future__ import annotations

import os

import xxhash

from perdure.catalog.root import Root
from perdure.format.commit import CommitRecord
from perdure.train.ledger import Ledger, read_ledger

__all__ = ["check_commits"]

_PIECE = 1 << 20


def check_commits(path: str, ledger: Ledger, root: Root) -> tuple[int, list[str]]:
    """Compares the beginnings of a ledger with the lengths and digests in the commits below a root.

    Returns:
        How many commits were compared, and a sentence for each that does not hold.
    """
    attempts = {header.attempt for header in ledger.headers}
    commits = sorted(
        (i.commit for i in root.iterations() if i.commit.ledger_bytes and i.commit.attempt in attempts),
        key=lambda commit: commit.ledger_bytes,
    )
    problems = []
    size = os.path.getsize(path)
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        for commit in commits:
            while (left := commit.ledger_bytes - file.tell()) > 0 and (piece := file.read(min(left, _PIECE))):
                hasher.update(piece)
            if size < commit.ledger_bytes:
                problems.append(
                    f"the ledger has {size} bytes, but the commit of iteration {commit.iteration} vouches for "
                    f"{commit.ledger_bytes}: steps are lost from it"
                )
            elif f"xxh3-128:{hasher.hexdigest()}" != commit.ledger_digest:
                problems.append(
                    f"the first {commit.ledger_bytes} bytes of the ledger are not those that the commit of iteration "
                    f"{commit.iteration} vouches for: it was changed"
                )
            elif fault := _place(path, commit):
                problems.append(fault)
    return len(commits), problems


def _place(path: str, commit: CommitRecord) -> str:
    """What is wrong where the ledger, as it was at a commit, has no step that ends where it was made."""
    at_commit = read_ledger(path, commit.ledger_bytes).standing
    if any(step.step == commit.iteration and step.samples[1] == commit.consumed_samples for _, step in at_commit):
        return ""
    return (
        f"iteration {commit.iteration} was saved at stream position {commit.consumed_samples}, where the ledger had no "
        "such step that ends"
    )
