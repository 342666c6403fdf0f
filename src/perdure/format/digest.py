"""Digests: xxh3-128 tags of bytes and of shards. They catch damage, not malice.

A shard of up to one block (8 MiB) has one digest. A larger one has a digest per block, and its own
is the digest of the concatenated block digests; so a partial read can be checked block by block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import xxhash

__all__ = ["BLOCK", "ShardDigester", "block_count", "digest_bytes", "is_digest", "shard_digest", "tag"]

BLOCK = 8 << 20
_TAG = "xxh3-128:"
_PATTERN = re.compile(r"xxh3-128:[0-9a-f]{32}")


def tag(hexadecimal: str) -> str:
    """`xxh3-128:<hex>`."""
    return _TAG + hexadecimal


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """The tag of a run of bytes."""
    return tag(xxhash.xxh3_128_hexdigest(data))


def is_digest(text: str) -> bool:
    """Whether `text` is a well-formed tag."""
    return _PATTERN.fullmatch(text) is not None


def block_count(size: int) -> int:
    """How many block digests a shard of `size` bytes carries: none up to one block."""
    return 0 if size <= BLOCK else -(-size // BLOCK)


def shard_digest(blocks: Sequence[str]) -> str:
    """A large shard's own digest, from the tags of its blocks."""
    return digest_bytes(b"".join(bytes.fromhex(b.removeprefix(_TAG)) for b in blocks))


class ShardDigester:
    """Digests one shard that is fed in order, in pieces of any size."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._room = BLOCK
        self._blocks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Feeds the next bytes."""
        start, end = 0, len(data)
        while start < end:
            if self._room == 0:
                self._close_block()
            piece = data[start : start + self._room]
            self._hasher.update(piece)
            self._room -= len(piece)
            start += len(piece)

    def finish(self) -> tuple[str, list[str]]:
        """The shard's tag and its block tags (an empty list up to one block)."""
        if not self._blocks:
            return tag(self._hasher.hexdigest()), []
        self._close_block()
        return shard_digest(self._blocks), self._blocks

    def _close_block(self) -> None:
        self._blocks.append(tag(self._hasher.hexdigest()))
        self._hasher = xxhash.xxh3_128()
        self._room = BLOCK
