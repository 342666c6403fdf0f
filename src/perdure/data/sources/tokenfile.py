"""A flat file of token ids, and the small JSON file beside it that says what they are.

`NAME.bin` holds little-endian uint16 or uint32 token ids and nothing else. `NAME.bin.json`, written by
`perdure data prepare`, holds a `TokenFileInfo`; without it, the dtype is given by the `dtype` key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from perdure.data.sources.base import check_seq_length, existing, files_fingerprint, next_token_sample, window_count
from perdure.data.sources.bytefile import ByteFile
from perdure.errors import DataError, UsageError

__all__ = ["TOKEN_DTYPES", "TokenFile", "TokenFileInfo", "info_path"]

TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_VERSION = 1


class TokenFileInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What stands beside a token file.

    Attributes:
        format, version: "perdure-tokens", 1.
        dtype: "uint16" or "uint32".
        tokens: how many there are.
        documents: how many were written.
        vocab_size: token ids are below it.
        separator: the token after each document, or None.
        tokenizer: "bytes", or the name and digest of the tokenizer file.
        fingerprint: digest of the tokens.
    """

    format: str = "perdure-tokens"
    version: int = _VERSION
    dtype: str
    tokens: int
    documents: int
    vocab_size: int
    separator: int | None
    tokenizer: str
    fingerprint: str


class TokenFile:
    """Windows over a flat file of token ids, read where they are needed.

    Sample i is the tokens [i * seq_length, (i + 1) * seq_length]; the last one is the label of the one
    before it. What does not fill a window at the end is left out.

    Args:
        path: the `.bin` file; the ending may be left out.
        seq_length: tokens per sample.
        dtype: "uint16" or "uint32"; default: what the JSON file beside it says, else uint16.

    Raises:
        DataError: no such file, a size that fits neither dtype nor JSON file, or too few tokens.
        UsageError: another dtype than the JSON file's, or than these two.
    """

    draws_random = False

    def __init__(self, path: str | Path, seq_length: int, dtype: str | None = None) -> None:
        self.path = _token_path(path)
        self.seq_length = check_seq_length(seq_length)
        self.info = _read_info(self.path)
        if dtype is not None and dtype not in TOKEN_DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(TOKEN_DTYPES)}, not {dtype!r}")
        if self.info is not None and dtype not in (None, self.info.dtype):
            raise UsageError(f"{info_path(self.path)} says {self.info.dtype}, but dtype is {dtype}")
        self.dtype = dtype or (self.info.dtype if self.info else "uint16")
        self._width = TOKEN_DTYPES[self.dtype].itemsize
        self._file = ByteFile(self.path)
        size = self._file.size
        if size % self._width:
            raise DataError(f"{self.path}: {size} bytes are no whole number of {self.dtype} tokens")
        if self.info is not None and size != self.info.tokens * self._width:
            raise DataError(
                f"{self.path}: holds {size // self._width} tokens, but {info_path(self.path)} says {self.info.tokens}",
                hint="make both again with `perdure data prepare`",
            )
        self._length = window_count(size // self._width, seq_length, str(self.path))

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it; None where unknown."""
        return self.info.vocab_size if self.info else None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is outside [0, {self._length})")
        wanted = (self.seq_length + 1) * self._width
        offset = index * self.seq_length * self._width
        content = self._file.read(offset, wanted)
        return next_token_sample(np.frombuffer(content, dtype=TOKEN_DTYPES[self.dtype]).astype(np.int64))

    def identity(self) -> dict[str, Any]:
        """Type, number of samples, sequence length, and a digest.

        The digest is that of the tokens where `perdure data prepare` noted it, else of the file's name and size.
        """
        fingerprint = self.info.fingerprint if self.info else files_fingerprint([(self.path.name, self._file.size)])
        return {
            "type": "TokenFile",
            "length": self._length,
            "fingerprint": fingerprint,
            "seq_length": self.seq_length,
            "dtype": self.dtype,
        }

    def whereabouts(self, index: int) -> str:
        """The file and the byte at which a sample starts."""
        return f"{self.path} at byte {index * self.seq_length * self._width}"


def info_path(path: Path) -> Path:
    """The JSON file beside a token file."""
    return path.with_name(f"{path.name}.json")


def _token_path(path: str | Path) -> Path:
    given = Path(path)
    if not given.exists():
        with_ending = given.with_name(f"{given.name}.bin")
        if given.name and with_ending.is_file():
            return with_ending
    found = existing(given)
    if not found.is_file():
        raise DataError(f"{path}: a token file was expected, but this is a folder", hint="name the .bin file in it")
    if found.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    return found


def _read_info(path: Path) -> TokenFileInfo | None:
    beside = info_path(path)
    try:
        info = msgspec.json.decode(beside.read_bytes(), type=TokenFileInfo)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{beside}: cannot be read as the description of a token file: {error}") from error
    if info.format != "perdure-tokens" or info.version != _VERSION or info.dtype not in TOKEN_DTYPES:
        raise DataError(
            f"{beside}: describes {info.format!r} version {info.version} with dtype {info.dtype!r}, "
            f"but 'perdure-tokens' version {_VERSION} was expected"
        )
    return info
