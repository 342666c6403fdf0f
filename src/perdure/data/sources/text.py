"""UTF-8 text as bytes: no tokenizer, no download, fit for trying things out."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from perdure.data.sources.base import check_seq_length, existing, files_fingerprint, next_token_sample, window_count
from perdure.errors import DataError
from perdure.format.digest import tag

__all__ = ["PYTHON_DOCS", "SEPARATOR", "VOCAB_SIZE", "Text"]

PYTHON_DOCS = "python-docs"
SEPARATOR = 256
VOCAB_SIZE = 257
_BLOCK = 1 << 20


class Text:
    """Windows over the bytes of text files: tokens 0 to 255, and 256 after each document.

    Sample i is the tokens [i * seq_length, (i + 1) * seq_length] of all documents in a row; the last one
    is the label of the one before it. What does not fill a window at the end is left out.

    All files are read once when the source is made, to check that they are UTF-8; for more than a few
    gigabytes, `perdure data prepare` and `TokenFile` start faster.

    Args:
        path: a file, a folder (its files below, hidden ones left out, sorted by name), or `python-docs`:
            the language reference that ships inside Python.
        seq_length: tokens per sample.

    Raises:
        DataError: no such path, no file, an empty file alone, not UTF-8, or too little text.
    """

    vocab_size = VOCAB_SIZE
    draws_random = False

    def __init__(self, path: str | Path, seq_length: int) -> None:
        self.path = str(path)
        self.seq_length = check_seq_length(seq_length)
        self._documents = _python_docs() if self.path == PYTHON_DOCS else _files(existing(path))
        if self.path == PYTHON_DOCS:
            self._fingerprint = _content_fingerprint(self._documents)
        else:
            self._fingerprint = files_fingerprint((document.name, document.size) for document in self._documents)
        # Where each document's tokens end, its separator included.
        self._ends = list(accumulate(document.size + 1 for document in self._documents))
        if self._ends[-1] == len(self._documents):
            raise DataError(f"{self.path}: there is no text in it")
        self._length = window_count(self._ends[-1], seq_length, self.path)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is outside [0, {self._length})")
        start = index * self.seq_length
        tokens = np.full(self.seq_length + 1, SEPARATOR, dtype=np.int64)
        filled = 0
        number = bisect_right(self._ends, start)
        while filled < len(tokens):
            document = self._documents[number]
            offset = start + filled - (self._ends[number] - document.size - 1)
            piece = document.read(offset, min(len(tokens) - filled, document.size - offset))
            tokens[filled : filled + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            filled += len(piece) + 1
            number += 1
        return next_token_sample(tokens)

    def identity(self) -> dict[str, Any]:
        """Type, number of samples, sequence length, and a digest of file names and sizes.

        For `python-docs` the digest is of the content, which differs between versions of Python.
        """
        return {
            "type": "Text",
            "length": self._length,
            "fingerprint": self._fingerprint,
            "seq_length": self.seq_length,
        }

    def whereabouts(self, index: int) -> str:
        """The file and byte at which a sample starts."""
        start = index * self.seq_length
        number = bisect_right(self._ends, start)
        document = self._documents[number]
        return f"{document.label} at byte {start - (self._ends[number] - document.size - 1)}"


class _File:
    """A document in a file, read where it is needed."""

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name
        self.label = str(file)
        self.size = _checked_size(file)

    def read(self, offset: int, size: int) -> bytes:
        if size <= 0:
            return b""
        try:
            with self.file.open("rb") as stream:
                stream.seek(offset)
                piece = stream.read(size)
        except OSError as error:
            raise DataError(f"{self.file}: cannot be read at byte {offset}: {error.strerror or error}") from error
        if len(piece) < size:
            raise DataError(f"{self.file}: ends before byte {offset + size}; it was shortened after the run's start")
        return piece


class _Memory:
    """A document that is in memory anyway."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self.label = f"{PYTHON_DOCS} topic {name!r}"
        self.content = content
        self.size = len(content)

    def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + max(size, 0)]


_Document = _File | _Memory


def _files(path: Path) -> list[_Document]:
    if not path.is_dir():
        return [_File(path, path.name)]
    files = sorted(
        (file.relative_to(path).as_posix(), file)
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{path}: the folder holds no file")
    return [_File(file, name) for name, file in files]


def _checked_size(file: Path) -> int:
    """The file's size, once all of it has been found to be UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                pending = len(decoder.getstate()[0])
                try:
                    decoder.decode(block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(file, size - pending + error.start) from error
                size += len(block)
        pending = len(decoder.getstate()[0])
        if pending:
            raise _not_utf8(file, size - pending)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    return size


def _not_utf8(file: Path, offset: int) -> DataError:
    return DataError(f"{file}: not UTF-8 at byte {offset}", hint="convert it, for example with iconv -t UTF-8")


def _python_docs() -> list[_Document]:
    try:
        from pydoc_data import topics
    except ImportError as error:
        raise DataError(
            f"this Python was installed without its language reference, which {PYTHON_DOCS} needs",
            hint="set path to a text file or a folder of text files",
        ) from error
    return [_Memory(name, text.encode()) for name, text in sorted(topics.topics.items())]


def _content_fingerprint(documents: list[_Document]) -> str:
    hasher = xxhash.xxh3_128()
    for document in documents:
        hasher.update(f"{document.name}\0{document.size}\n".encode())
        hasher.update(document.read(0, document.size))
    return tag(hasher.hexdigest())
