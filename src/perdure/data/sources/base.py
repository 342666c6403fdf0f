"""What a source of samples offers, and what the file-backed ones share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from perdure.errors import DataError, UsageError
from perdure.format.digest import digest_bytes
from perdure.format.keys import MASK, is_whole

__all__ = ["Source", "check_seq_length", "existing", "files_fingerprint", "next_token_sample", "window_count"]


class Source(Protocol):
    """A map-style data set that knows who it is.

    `draws_random` is False where samples never draw from global random streams, which saves seeding them.
    """

    draws_random: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    def identity(self) -> dict[str, Any]:
        """`type`, `length` and `fingerprint`: what must not change between the starts of a run."""
        ...

    def whereabouts(self, index: int) -> str:
        """File and offset of a sample, for error messages."""
        ...


def files_fingerprint(files: Iterable[tuple[str, int]]) -> str:
    """A digest of file names and sizes, in the given order."""
    return digest_bytes("".join(f"{name}\0{size}\n" for name, size in files).encode("utf-8", "surrogateescape"))


def existing(path: str | Path) -> Path:
    """The path, if something is there.

    Raises:
        DataError: there is nothing.
    """
    found = Path(path)
    try:
        found.stat()
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}", hint="relative paths count from the working directory"
        ) from error
    return found


def check_seq_length(seq_length: int) -> int:
    """The sequence length, if it is a positive integer."""
    if not is_whole(seq_length, MASK, 1):
        raise UsageError(f"seq_length must be a positive integer, not {seq_length!r}")
    return seq_length


def window_count(tokens: int, seq_length: int, name: str) -> int:
    """How many windows of `seq_length` tokens and one more, `seq_length` apart, fit.

    Raises:
        DataError: none does.
    """
    if tokens <= seq_length:
        raise DataError(
            f"{name} has {tokens} tokens, fewer than one sample needs: seq_length + 1 = {seq_length + 1}",
            hint="use a smaller seq_length or more text",
        )
    return (tokens - 1) // seq_length


def next_token_sample(tokens: Any) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels`, int64 of shape (n,), from n + 1 tokens of an int64 array that is ours."""
    window = torch.from_numpy(tokens)
    return {"input_ids": window[:-1], "labels": window[1:]}
