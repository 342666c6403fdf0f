"""Headers of safetensors files: laid out for writing, and parsed without trust for reading.

Our files: entries sorted by element size (largest first, so that every tensor is aligned) and name,
contiguous, no holes; the header is padded with spaces so that data start on a 4096-byte boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Annotated, NamedTuple

import msgspec

from perdure.errors import DamagedCheckpointError
from perdure.format.dtypes import BY_SAFETENSORS, as_held
from perdure.format.jsonio import encode

__all__ = [
    "ALIGNMENT",
    "HEADER_LIMIT",
    "Entry",
    "Header",
    "header_bytes",
    "header_from",
    "header_length",
    "lay_out",
    "parse_header",
    "table_bytes",
]

ALIGNMENT = 4096
HEADER_LIMIT = 100_000_000  # the safetensors library's own cap
_RESERVED = "__metadata__"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One tensor in a file: its bytes are file[data_start + begin : data_start + end].

    A dtype that only others store is given as we hold it: stored dtype, shape in those, and `logical`.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    logical: str = ""


class Header(NamedTuple):
    """A parsed header: bytes before the data, entries by name, the free text pairs."""

    data_start: int
    entries: dict[str, Entry]
    text: dict[str, str]


class _Listed(msgspec.Struct, gc=False):
    """An entry as it stands in a header."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


_DECODE_TABLE = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_DECODE_ENTRY = msgspec.json.Decoder(_Listed).decode
_DECODE_TEXT = msgspec.json.Decoder(dict[str, str]).decode
# What a decoder says of bytes that it doesn't take.
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, Entry]:
    """Places tensors given as (key, dtype, shape), in the order in which their bytes follow each other."""
    entries: dict[str, Entry] = {}
    begin = 0
    for key, dtype, shape in sorted(tensors, key=lambda t: (-BY_SAFETENSORS[t[1]].bits, t[0])):
        if key == _RESERVED or key in entries:
            raise ValueError(f"key {key!r} is reserved or repeated")
        end = begin + prod(shape) * BY_SAFETENSORS[dtype].itemsize
        entries[key] = Entry(dtype, shape, begin, end)
        begin = end
    return entries


def header_bytes(entries: Mapping[str, Entry], text: Mapping[str, str]) -> bytes:
    """Length prefix, JSON and padding.

    Raises:
        ValueError: the header would exceed what the safetensors library reads.
    """
    return header_from(table_bytes(entries), text)


def table_bytes(entries: Mapping[str, Entry]) -> bytes:
    """The entries as JSON: all of a header that is the same in every file of such tensors."""
    return encode(
        {
            key: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
            for key, entry in entries.items()
        }
    )


def header_from(table: bytes, text: Mapping[str, str]) -> bytes:
    """As `header_bytes`, from what `table_bytes` gave."""
    separator = b"" if table == b"{}" else b","
    body = b'{"%s":%s%s%s' % (_RESERVED.encode(), encode(dict(text)), separator, table[1:])
    size = -(-(8 + len(body)) // ALIGNMENT) * ALIGNMENT
    if size - 8 > HEADER_LIMIT:
        raise ValueError(f"a safetensors header of {size} bytes is over the limit of {HEADER_LIMIT}")
    return (size - 8).to_bytes(8, "little") + body.ljust(size - 8, b" ")


def header_length(prefix: bytes, size: int, file: str) -> int:
    """Bytes of a header, length prefix included, from a file's first 8 bytes and its size.

    Raises:
        DamagedCheckpointError: the file is too short for what the prefix says, or that is absurd.
    """
    if len(prefix) < 8:
        raise DamagedCheckpointError(f"{file}: {size} bytes, too short for a safetensors file", file=file)
    if prefix == b"version ":
        raise DamagedCheckpointError(
            f"{file}: a pointer of Git LFS, {size} bytes, in place of the weights", file=file, hint="git lfs pull"
        )
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise DamagedCheckpointError(f"{file}: header of {length} bytes in a file of {size}", file=file)
    return 8 + length


def parse_header(data: bytes, size: int, file: str) -> Header:
    """Parses a whole header (length prefix included) of a file of `size` bytes.

    Raises:
        DamagedCheckpointError: not a header, or offsets that overlap, leave holes, or leave the file.
    """
    start = len(data)
    try:
        table = _DECODE_TABLE(memoryview(data)[8:])
    except msgspec.ValidationError:
        raise DamagedCheckpointError(f"{file}: header is not an object", file=file) from None
    except _MALFORMED as error:
        raise DamagedCheckpointError(f"{file}: header is not JSON: {error}", file=file) from None
    try:
        text = _DECODE_TEXT(table.pop(_RESERVED, b"{}"))
    except _MALFORMED:
        raise DamagedCheckpointError(f"{file}: header: {_RESERVED} is not a map of strings", file=file) from None
    entries = {key: _entry(key, listed, file) for key, listed in table.items()}
    at = 0
    for begin, end, key in sorted([(entry.begin, entry.end, key) for key, entry in entries.items()]):
        if begin != at:
            raise DamagedCheckpointError(f"{file}: header: {key[:300]}: a hole or overlap at byte {at}", file=file)
        at = end
    if start + at != size:
        raise DamagedCheckpointError(
            f"{file}: {size} bytes on disk, but its header describes {start + at}",
            file=file,
            hint="the file was cut or grown",
        )
    return Header(start, entries, text)


def _entry(key: str, listed: msgspec.Raw, file: str) -> Entry:
    try:
        entry = _DECODE_ENTRY(listed)
        begin, end = entry.data_offsets
        held = _held(entry.dtype, entry.shape)
        if held is not None and end - begin == held[3]:
            return Entry(held[0], held[1], begin, end, held[2])
    except _MALFORMED:
        pass
    shown = bytes(listed)[:120].decode(errors="replace")
    raise DamagedCheckpointError(f"{file}: header: {key[:300]}: not a valid entry: {shown}", file=file, tensor=key)


@lru_cache(maxsize=4096)
def _held(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], str, int] | None:
    """What `as_held` says, and how many bytes that is."""
    held = as_held(dtype, shape)
    return None if held is None else (*held, prod(held[1]) * BY_SAFETENSORS[held[0]].itemsize)
