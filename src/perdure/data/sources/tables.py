"""Rows of JSON lines, Parquet, Arrow or Hugging Face data sets, read by the `datasets` library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.data.sources.base import check_seq_length, existing, files_fingerprint
from perdure.errors import DataError, UsageError

__all__ = ["IGNORED", "Arrow", "HuggingFace", "Jsonl", "Parquet"]

IGNORED = -100
_FOLDER_MARK = "dataset_info.json"


class HuggingFace:
    """One sample per row of a table.

    With `tokenizer`, the text column is encoded; its tokens and the same one on are the inputs and labels.
    Without, the rows hold token ids already: `column_names` are taken as they are, or, when there are
    `input_ids` alone, the labels are the same one on. With `seq_length`, rows are cut or filled up to it;
    filled labels are -100, which the loss leaves out.

    Args:
        path: a folder written by `save_to_disk`, a data file or folder of them, or a name on the hub.
        seq_length: tokens per sample; needed with `tokenizer`.
        split, name, data_files: as in `datasets.load_dataset`.
        column_names: the columns to deliver.
        tokenizer: a `tokenizers` JSON file.
        text_column: the column that it encodes.

    Raises:
        DataError: no such data, or they cannot be read, or a column is missing.
        UsageError: the libraries are missing, or keys contradict each other.
    """

    draws_random = False
    kind: ClassVar[str] = "HuggingFace"
    _builder: ClassVar[str | None] = None

    def __init__(
        self,
        path: str | Path,
        seq_length: int | None = None,
        *,
        split: str = "train",
        name: str | None = None,
        data_files: str | Sequence[str] | None = None,
        column_names: Sequence[str] = ("input_ids", "labels"),
        tokenizer: str | Path | None = None,
        text_column: str = "text",
    ) -> None:
        self.path = str(path)
        self.seq_length = None if seq_length is None else check_seq_length(seq_length)
        self._text_column = text_column
        self._tokenizer_text = None if tokenizer is None else _tokenizer_text(existing(tokenizer))
        self._tokenizer: Any = None
        if tokenizer is not None and seq_length is None:
            raise UsageError("seq_length is needed with a tokenizer, since texts differ in length")
        self._rows, self._fingerprint = self._load(split, name, data_files)
        columns = list(self._rows.column_names)
        wanted = [text_column] if tokenizer is not None else [c for c in column_names if c in columns]
        missing = [column for column in wanted or column_names if column not in columns]
        if missing:
            raise DataError(
                f"{self.path}: has no column {missing[0]!r}, only {', '.join(columns)}",
                hint="set column_names, or tokenizer and text_column for a column of text",
            )
        self._columns = wanted
        if self.vocab_size is not None:
            self._encoder()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"sample {index} is outside [0, {len(self._rows)})")
        row = self._rows[index]
        if self._tokenizer_text is not None:
            ids = self._encoder().encode(row[self._text_column]).ids
            return self._shifted(np.asarray(ids, dtype=np.int64))
        if self._columns == ["input_ids"]:
            return self._shifted(np.asarray(row["input_ids"], dtype=np.int64))
        return {column: self._filled(np.asarray(row[column]), column) for column in self._columns}

    @property
    def vocab_size(self) -> int | None:
        """The tokenizer's; None where rows hold token ids already."""
        return None if self._tokenizer_text is None else int(self._encoder().get_vocab_size())

    def identity(self) -> dict[str, Any]:
        """Type, number of rows, sequence length, and a digest of files' names and sizes, or the library's own."""
        return {
            "type": self.kind,
            "length": len(self),
            "fingerprint": self._fingerprint,
            "seq_length": self.seq_length,
            "columns": list(self._columns),
        }

    def whereabouts(self, index: int) -> str:
        """The table and the row."""
        return f"{self.path} row {index}"

    def document_lengths(self) -> NDArray[np.int64]:
        """Token counts of all rows, for packing; rows must hold token ids."""
        if self._tokenizer_text is not None:
            raise UsageError(
                "packing needs token ids, not text", hint="tokenize once with `perdure data prepare` or datasets.map"
            )
        column = self._rows.with_format("arrow")[:]["input_ids"]
        return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks]).astype(np.int64)

    def document(self, index: int) -> NDArray[np.int64]:
        """Token ids of a row."""
        return np.asarray(self._rows[index]["input_ids"], dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def _load(self, split: str, name: str | None, data_files: Any) -> tuple[Any, str | None]:
        try:
            import datasets
        except ImportError as error:
            raise UsageError(
                f"{self.kind} needs the `datasets` package", hint="pip install 'perdure[datasets]'"
            ) from error
        place = Path(self.path)
        try:
            if self._builder is not None:
                files = _files(existing(place))
                rows = datasets.load_dataset(
                    self._builder, data_files=[str(file) for _, file in files], split=split, name=name
                )
                return rows, files_fingerprint((label, file.stat().st_size) for label, file in files)
            if (place / _FOLDER_MARK).exists():
                rows = datasets.load_from_disk(self.path)
            else:
                rows = datasets.load_dataset(self.path, name, data_files=data_files, split=split)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.path}: {type(error).__name__}: {error}") from error
        return rows, getattr(rows, "_fingerprint", None)

    def _encoder(self) -> Any:
        if self._tokenizer is None:
            try:
                from tokenizers import Tokenizer
            except ImportError as error:
                raise UsageError(
                    "a tokenizer file needs the `tokenizers` package", hint="pip install 'perdure[datasets]'"
                ) from error
            self._tokenizer = Tokenizer.from_str(str(self._tokenizer_text))
        return self._tokenizer

    def _shifted(self, ids: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        if self.seq_length is not None:
            ids = ids[: self.seq_length + 1]
        return {"input_ids": self._filled(ids[:-1], "input_ids"), "labels": self._filled(ids[1:], "labels")}

    def _filled(self, values: NDArray[Any], column: str) -> torch.Tensor:
        if self.seq_length is None or values.ndim != 1:
            return torch.from_numpy(np.ascontiguousarray(values))
        full = np.full(self.seq_length, IGNORED if column == "labels" else 0, dtype=values.dtype)
        count = min(len(values), self.seq_length)
        full[:count] = values[:count]
        return torch.from_numpy(full)


class Jsonl(HuggingFace):
    """`HuggingFace` over JSON lines: a file, or a folder's files sorted by name."""

    kind = "Jsonl"
    _builder = "json"


class Parquet(HuggingFace):
    """`HuggingFace` over Parquet: a file, or a folder's files sorted by name."""

    kind = "Parquet"
    _builder = "parquet"


class Arrow(HuggingFace):
    """`HuggingFace` over Arrow streams: a file, or a folder's files sorted by name."""

    kind = "Arrow"
    _builder = "arrow"


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [(path.name, path)]
    files = [(file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file()]
    visible = sorted((label, file) for label, file in files if not any(p.startswith(".") for p in label.split("/")))
    if not visible:
        raise DataError(f"{path}: the folder holds no file")
    return visible


def _tokenizer_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a tokenizer: {error}") from error
