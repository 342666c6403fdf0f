"""`perdure data prepare`: text files into one token file, streamed."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from perdure.data.sources.base import existing
from perdure.data.sources.text import SEPARATOR, VOCAB_SIZE
from perdure.data.sources.tokenfile import TOKEN_DTYPES, TokenFileInfo, info_path
from perdure.errors import DataError, UsageError
from perdure.format.digest import tag

__all__ = ["prepare"]

_BLOCK = 1 << 20
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class _Encoder(Protocol):
    name: str
    vocab_size: int
    separator: int | None

    def encode(self, text: str) -> Sequence[int] | np.ndarray[Any, Any]: ...


def prepare(
    inputs: Iterable[str | Path],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    dtype: str | None = None,
    separator: str | None = None,
) -> TokenFileInfo:
    """Writes `output` (`.bin` is added) and the JSON file beside it; both appear whole or not at all.

    Each file is a document. Files are read in blocks of about a megabyte that end at a line's end, so
    memory stays small; a tokenizer sees one block at a time.

    Args:
        inputs: UTF-8 files, and folders whose files below (hidden ones left out) are taken sorted by name.
        output: where to write.
        tokenizer: "bytes" (tokens 0 to 255), or the path of a `tokenizers` JSON file.
        dtype: "uint16" or "uint32"; default: the smaller one that holds the vocabulary.
        separator: the token put after each document; default: 256 for bytes, else the first of the usual
            end-of-text tokens that the tokenizer knows, or none.

    Returns:
        What was written beside the tokens.

    Raises:
        DataError: no such input, no file, not UTF-8, or nothing in it.
        UsageError: the dtype is too small or unknown, the tokenizer cannot be loaded.
    """
    files = _input_files(inputs)
    encoder = _BytesEncoder(separator) if tokenizer == "bytes" else _tokenizers_encoder(tokenizer, separator)
    dtype = dtype or ("uint16" if encoder.vocab_size <= 1 << 16 else "uint32")
    if dtype not in TOKEN_DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(TOKEN_DTYPES)}, not {dtype!r}")
    if encoder.vocab_size > 1 << (8 * TOKEN_DTYPES[dtype].itemsize):
        raise UsageError(f"{dtype} cannot hold a vocabulary of {encoder.vocab_size} tokens", hint="use dtype uint32")
    target = Path(output)
    if target.suffix != ".bin":
        target = target.with_name(f"{target.name}.bin")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, hasher, tokens = target.with_name(f".{target.name}.partial"), xxhash.xxh3_128(), 0
    try:
        with partial.open("wb") as stream:
            for file in files:
                for piece in _encoded(file, encoder, TOKEN_DTYPES[dtype]):
                    stream.write(piece)
                    hasher.update(piece)
                    tokens += len(piece) // TOKEN_DTYPES[dtype].itemsize
            if not tokens:
                raise DataError("there is no text in the given files, so no token file was written")
            stream.flush()
            os.fsync(stream.fileno())
        info = TokenFileInfo(
            dtype=dtype,
            tokens=tokens,
            documents=len(files),
            vocab_size=encoder.vocab_size,
            separator=encoder.separator,
            tokenizer=encoder.name,
            fingerprint=tag(hasher.hexdigest()),
        )
        _publish(partial, target, info)
    finally:
        partial.unlink(missing_ok=True)
    return info


class _BytesEncoder:
    name = "bytes"
    vocab_size = VOCAB_SIZE
    separator: int | None = SEPARATOR

    def __init__(self, separator: str | None) -> None:
        if separator is not None:
            raise UsageError("bytes have a separator of their own, 256; separator is for tokenizer files")

    def encode(self, text: str) -> np.ndarray[Any, Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)


class _TokenizersEncoder:
    def __init__(self, tokenizer: Any, name: str, separator: int | None) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        self.separator = separator

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _tokenizers_encoder(path: str, separator: str | None) -> _Encoder:
    file = existing(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UsageError(
            "a tokenizer file needs the `tokenizers` package", hint="pip install 'perdure[datasets]'"
        ) from error
    content = file.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:
        raise UsageError(f"{path}: not a `tokenizers` JSON file: {error}") from error
    if separator is not None:
        number = tokenizer.token_to_id(separator)
        if number is None:
            raise UsageError(f"{path}: has no token {separator!r} to separate documents with")
    else:
        known = (tokenizer.token_to_id(token) for token in _SEPARATORS)
        number = next((found for found in known if found is not None), None)
    return _TokenizersEncoder(tokenizer, f"{file.name} {tag(xxhash.xxh3_128_hexdigest(content))}", number)


def _input_files(inputs: Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for given in inputs:
        path = existing(given)
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(
            (file.relative_to(path).as_posix(), file)
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        files += [file for _, file in inside]
    if not files:
        raise DataError("no input file was found", hint="name text files, or folders that hold some")
    return files


def _encoded(file: Path, encoder: _Encoder, dtype: np.dtype[Any]) -> Iterator[bytes]:
    for text in _blocks(file):
        yield np.asarray(encoder.encode(text)).astype(dtype).tobytes()
    if encoder.separator is not None:
        yield np.asarray([encoder.separator], dtype=dtype).tobytes()


def _blocks(file: Path) -> Iterator[str]:
    """The file's text in blocks that end at a line's end, where the lines are shorter than a block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept, read = "", 0
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                text = kept + decoder.decode(block)
                read += len(block)
                end = text.rfind("\n") + 1 or len(text)
                kept = text[end:]
                yield text[:end]
            kept += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 after byte {read}: {error.reason}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if kept:
        yield kept


def _publish(partial: Path, target: Path, info: TokenFileInfo) -> None:
    """The JSON file goes first out of the way and comes last, so that it never describes other tokens."""
    beside = info_path(target)
    beside_partial = beside.with_name(f".{beside.name}.partial")
    with beside_partial.open("wb") as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(info), indent=2) + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    beside.unlink(missing_ok=True)
    partial.replace(target)
    beside_partial.replace(beside)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
