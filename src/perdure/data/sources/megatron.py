"""Megatron's indexed data sets: a `.bin` of token ids and an `.idx` that says where documents are.

The `.idx`, all little-endian: the nine bytes `MMIDIDX\\0\\0`, version 1 (u64), a dtype code (u8), the
number of sequences (u64) and of document marks (u64); then the sequences' lengths (i32) and byte
offsets in the `.bin` (i64), and the document marks (i64): the sequence at which each document starts,
and the number of sequences at the end.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.data.sources.base import check_seq_length, existing, files_fingerprint, next_token_sample, window_count
from perdure.data.sources.bytefile import ByteFile
from perdure.errors import DataError

__all__ = ["MegatronIndexed"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class MegatronIndexed:
    """Windows over the documents of a `.bin`/`.idx` pair in file order, as a GPT data set cuts them.

    Sample i is the tokens [i * seq_length, (i + 1) * seq_length] of all sequences in a row; the last one is
    the label of the one before it. What does not fill a window at the end is left out.

    Args:
        path: the pair's common prefix; either file's name is understood too.
        seq_length: tokens per sample.
        document_ids: also give `position_ids` (from 0 in each document) and `document_ids` (from 0 in the
            sample), int64 of shape (seq_length,), so that attention can be kept inside documents.

    Raises:
        DataError: a file is missing or no such pair, they do not fit each other, or there are too few tokens.
    """

    draws_random = False

    def __init__(self, path: str | Path, seq_length: int, *, document_ids: bool = False) -> None:
        prefix = Path(path)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        self.index_path = existing(f"{prefix}.idx")
        self.path = existing(f"{prefix}.bin")
        self.seq_length = check_seq_length(seq_length)
        self.document_ids = document_ids
        self._file = ByteFile(self.path)
        self._dtype, lengths, self._offsets, documents = _read_index(self.index_path)
        # Where each sequence's tokens end in the row of all tokens.
        self._ends: NDArray[np.int64] = np.cumsum(lengths, dtype=np.int64)
        self._check(lengths)
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._length = window_count(tokens, seq_length, str(prefix))
        begins = np.concatenate([np.zeros(1, dtype=np.int64), self._ends])
        marks = np.unique(np.concatenate([begins[:1], begins[documents], begins[-1:]]))
        self._document_begins, self._document_ends = marks[:-1], marks[1:]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} is outside [0, {self._length})")
        start = index * self.seq_length
        sample = next_token_sample(self._tokens(start, start + self.seq_length + 1))
        if self.document_ids:
            position = np.arange(start, start + self.seq_length)
            document = np.searchsorted(self._document_begins, position, side="right") - 1
            sample["position_ids"] = torch.from_numpy(position - self._document_begins[document])
            sample["document_ids"] = torch.from_numpy(document - document[0])
        return sample

    def document_lengths(self) -> NDArray[np.int64]:
        """Token counts of the documents that have any, for packing."""
        lengths: NDArray[np.int64] = self._document_ends - self._document_begins
        return lengths

    def document(self, index: int) -> NDArray[np.int64]:
        """Token ids of a document."""
        return self._tokens(int(self._document_begins[index]), int(self._document_ends[index]))

    def identity(self) -> dict[str, Any]:
        """Type, number of samples, sequence length, and a digest of both files' names and sizes."""
        files = [(path.name, path.stat().st_size) for path in (self.path, self.index_path)]
        return {
            "type": "MegatronIndexed",
            "length": self._length,
            "fingerprint": files_fingerprint(files),
            "seq_length": self.seq_length,
        }

    def whereabouts(self, index: int) -> str:
        """The file and the byte at which a sample starts."""
        return f"{self.path} at byte {self._place(index * self.seq_length)[0]}"

    def _place(self, token: int) -> tuple[int, int]:
        """Byte offset of a token, and how many tokens its sequence has from it on."""
        number = int(np.searchsorted(self._ends, token, side="right"))
        left = int(self._ends[number]) - token
        length = left + token - (int(self._ends[number - 1]) if number else 0)
        return int(self._offsets[number]) + (length - left) * self._dtype.itemsize, left

    def _tokens(self, first: int, last: int) -> NDArray[np.int64]:
        tokens = np.empty(last - first, dtype=np.int64)
        filled = 0
        while filled < len(tokens):
            offset, left = self._place(first + filled)
            count = min(left, len(tokens) - filled)
            content = self._file.read(offset, count * self._dtype.itemsize)
            tokens[filled : filled + count] = np.frombuffer(content, dtype=self._dtype)
            filled += count
        return tokens

    def _check(self, lengths: NDArray[np.int32]) -> None:
        size = self._file.size
        if not len(lengths):
            return
        ends = self._offsets + lengths.astype(np.int64) * self._dtype.itemsize
        if int(lengths.min()) < 0 or int(self._offsets.min()) < 0 or int(ends.max()) > size:
            raise DataError(
                f"{self.path}: {size} bytes do not hold the {int(ends.max())} that {self.index_path} describes",
                hint="the two files must come from the same run of the preprocessing",
            )


def _read_index(path: Path) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(dtype, lengths, byte offsets, document marks) of an index file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(content) < _HEADER.size or content[:9] != _MAGIC:
        raise DataError(f"{path}: not an index of Megatron's: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        raise DataError(f"{path}: version {version} with dtype code {code}; version 1 with integer tokens is readable")
    needed = _HEADER.size + sequences * 12 + documents * 8
    if len(content) < needed:
        raise DataError(f"{path}: {len(content)} bytes, but {sequences} sequences and {documents} marks need {needed}")
    at = _HEADER.size
    lengths = np.frombuffer(content, dtype="<i4", count=sequences, offset=at)
    offsets = np.frombuffer(content, dtype="<i8", count=sequences, offset=at + 4 * sequences)
    marks = np.frombuffer(content, dtype="<i8", count=documents, offset=at + 12 * sequences)
    if documents and (int(marks.min()) < 0 or int(marks.max()) > sequences):
        raise DataError(f"{path}: a document mark lies outside its {sequences} sequences")
    return np.dtype(_DTYPES[code]), lengths, offsets, marks
