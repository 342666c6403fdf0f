"""Some columns of a data set whose samples are mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perdure.errors import UsageError

__all__ = ["Columns"]

# What a data set may say about itself beside its samples; see ResumableLoader.
_OPTIONAL = {"whereabouts", "stream_order", "mixture_record", "draws_random", "vocab_size"}


class Columns:
    """A map-style data set, of whose samples only the named columns are delivered.

    Args:
        dataset: its samples are mappings.
        names: the columns, in order.

    Raises:
        UsageError: the first sample is no mapping, or lacks a column.
    """

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self._dataset, self._names = dataset, list(names)
        first = dataset[0]
        if not isinstance(first, Mapping):
            raise UsageError(f"samples are {type(first).__name__}, not mappings of columns")
        missing = [name for name in names if name not in first]
        if missing:
            raise UsageError(f"samples have no column {missing[0]!r}, only {', '.join(map(str, first))}")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self._dataset[index]
        return {name: sample[name] for name in self._names}

    def identity(self) -> dict[str, Any]:
        """The data set's own: which columns are delivered changes no order."""
        own = getattr(self._dataset, "identity", None)
        kind = type(self._dataset)
        return dict(own()) if callable(own) else {"type": f"{kind.__module__}.{kind.__qualname__}"}

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return getattr(self._dataset, name)
        raise AttributeError(name)
