"""What a load found and did, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from perdure.engine.linked import Linkable
from perdure.engine.progress import Progress

__all__ = ["Loaded"]


@dataclass
class Loaded:
    """What a load found and did.

    `sequence` is 0 for a foreign checkpoint; `weights_only` means that the run starts at step 0; `model_tensors` are
    the names of those that it brought to this rank; `links` its files of frozen weights.
    """

    path: str
    root: str
    progress: Progress
    training: dict[str, Any]
    weights_only: bool
    sequence: int = 0
    lineage: str = ""
    attempt: str = ""
    ranks: int = 1
    bytes_read: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    model_tensors: frozenset[str] = frozenset()
    links: dict[str, Linkable] = field(default_factory=dict)

    def told(self, place: str, notes: Sequence[str], phases: str = "") -> str:
        """One line, human and complete: what was loaded from where, what is worth knowing, bytes and seconds.

        Args:
            place: where the run goes on.
            phases: on what the seconds went.
        """
        whole = ["weights only: step 0, first sample, optimizer as it was made"] if self.weights_only else []
        return (
            f"{'started from' if self.weights_only else 'resumed from'} {self.path}: {place}"
            + "".join(f"; {note}" for note in (*self.notes, *whole, *notes))
            + f" ({self.bytes_read / 2**20:,.1f} MiB in {self.seconds:.2f} s{phases and '; '}{phases})"
        )
