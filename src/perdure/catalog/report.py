"""What a verification finds: faults, and what is no fault but worth knowing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from perdure.errors import DamagedCheckpointError

__all__ = ["Problem", "Report", "problem_of"]


@dataclass(frozen=True)
class Problem:
    """One fault.

    Attributes:
        path: the iteration's directory, or the root.
        file: the file's name in it; "" where the fault is of the directory itself.
        tensor: the tensor concerned; "" where it isn't one.
        what: one sentence, complete in itself.
        expected, found: what was recorded and what lies there, where they can be shown.
        hint: what to do next.
    """

    path: str
    file: str
    tensor: str
    what: str
    expected: str = ""
    found: str = ""
    hint: str = ""


@dataclass
class Report:
    """What `verify` looked at and found.

    Attributes:
        path: as asked for.
        iterations: names of the directories that were checked.
        problems: the faults; none of them means that all is well.
        notes: what is no fault but worth knowing (leftovers of a killed save).
        bytes_read: bytes of tensor data that were read and compared.
    """

    path: str
    iterations: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0

    @property
    def ok(self) -> bool:
        """Whether no fault was found."""
        return not self.problems


def problem_of(path: str, error: DamagedCheckpointError | OSError, file: str, tensor: str = "") -> Problem:
    """What reading `file` of the directory `path` raised, as a fault."""
    if isinstance(error, DamagedCheckpointError):
        return Problem(path, file, error.tensor or tensor, error.message, hint=error.hint or "")
    what = f"{os.path.join(path, file)}: cannot be read: {error.strerror or error}"
    return Problem(path, file, tensor, what, hint="the storage failed; this is no damage yet")
