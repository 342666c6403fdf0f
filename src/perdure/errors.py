"""Every error a user can meet: one sentence of what, a hint of what to do next, and an exit code.

Each class is also the builtin that a user would already catch. Exit codes: 1 damage found or run
failed, 2 usage or configuration, 10 no such root or iteration, 11 format newer than this program,
12 another writer holds the root.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import ClassVar

__all__ = [
    "CheckpointNotFoundError",
    "ConfigError",
    "DamagedCheckpointError",
    "DataError",
    "FormatTooNewError",
    "MismatchError",
    "PerdureError",
    "RanksError",
    "RootLockedError",
    "SaveError",
    "TrainingError",
    "UnsupportedStateError",
    "UsageError",
    "few",
]


class PerdureError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one sentence: what was wrong, where, and what was expected.
        hint: what to type or change next; printed on a line of its own.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class UsageError(PerdureError, ValueError):
    """A call or a command line that cannot be meant."""

    exit_code = 2


class ConfigError(UsageError):
    """Faults of a configuration, all of them, each as `file:line:column: key: what`."""


class CheckpointNotFoundError(PerdureError, FileNotFoundError):
    """No such root, no such iteration, or nothing committed in it."""

    exit_code = 10


class FormatTooNewError(PerdureError, ValueError):
    """A sound checkpoint whose format version this program does not know."""

    exit_code = 11


class RootLockedError(PerdureError, BlockingIOError):
    """Another living writer holds the root."""

    exit_code = 12


class DamagedCheckpointError(PerdureError, ValueError):
    """Bytes on disk are not what was written: digest, size, structure or parse.

    `file` and `tensor` name the place where they are known.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, file: str | None = None, tensor: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.file = file
        self.tensor = tensor


class MismatchError(PerdureError, ValueError):
    """A sound checkpoint that does not fit the live model, optimizer, data or ranks."""


class UnsupportedStateError(PerdureError, TypeError):
    """Something that cannot be held in a checkpoint; raised at save time, naming it."""


class SaveError(PerdureError, OSError):
    """A save failed; earlier checkpoints are untouched. The original error is the cause."""


class DataError(PerdureError, ValueError):
    """The data cannot be read, or are not the data that the checkpoint was trained on."""

    exit_code = 1


class TrainingError(PerdureError, RuntimeError):
    """The run itself cannot go on (for example too many non-finite steps)."""


class RanksError(PerdureError, RuntimeError):
    """Another rank failed, disagreed, or did not answer in time; it is named."""


def few(names: Collection[str], most: int = 5) -> str:
    """The first names, and how many more, for a sentence."""
    shown = ", ".join(n if len(n) <= 100 else n[:97] + "..." for n in islice(names, most))
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"
