"""Headers of safetensors files: laid out for writing, and parsed without trust for reading.

Our files: entries sorted by element size (largest first, so that every tensor is aligned) and name,
contiguous, no holes; the header is padded with spaces so that data start on a 4096-byte boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

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


class Entry(NamedTuple):
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
        table = msgspec.json.decode(data[8:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DamagedCheckpointError(f"{file}: header is not JSON: {error}", file=file) from None
    if not isinstance(table, dict):
        raise DamagedCheckpointError(f"{file}: header is not an object", file=file)
    text = table.pop(_RESERVED, {})
    if not isinstance(text, dict) or not all(isinstance(v, str) for v in text.values()):
        raise DamagedCheckpointError(f"{file}: header: {_RESERVED} is not a map of strings", file=file)
    entries = {key: _entry(key, value, file) for key, value in table.items()}
    at = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise DamagedCheckpointError(f"{file}: header: {key[:300]}: a hole or overlap at byte {at}", file=file)
        at = entry.end
    if start + at != size:
        raise DamagedCheckpointError(
            f"{file}: {size} bytes on disk, but its header describes {start + at}",
            file=file,
            hint="the file was cut or grown",
        )
    return Header(start, entries, text)


def _entry(key: str, value: Any, file: str) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, begin, end]
        sound = isinstance(dtype, str) and isinstance(shape, list)
        sound = sound and all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
        held = as_held(dtype, tuple(shape)) if sound else None
        if held is not None and end - begin == prod(held[1]) * BY_SAFETENSORS[held[0]].itemsize:
            return Entry(held[0], held[1], begin, end, held[2])
    except (KeyError, TypeError, ValueError):
        pass
    raise DamagedCheckpointError(
        f"{file}: header: {key[:300]}: not a valid entry: {str(value)[:120]}", file=file, tensor=key
    )
