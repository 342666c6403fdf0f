"""A digest does not depend on how bytes arrive, and a large shard's is that of its blocks."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.format import digest
from perdure.format.digest import BLOCK, ShardDigester, block_count, digest_bytes, is_digest, shard_digest


def fed(data: bytes, cuts: list[int]) -> tuple[str, list[str]]:
    digester = ShardDigester()
    edges = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        digester.update(memoryview(data)[begin:end])
    return digester.finish()


def whole(data: bytes, block: int) -> tuple[str, list[str]]:
    if len(data) <= block:
        return digest_bytes(data), []
    blocks = [digest_bytes(data[i : i + block]) for i in range(0, len(data), block)]
    return shard_digest(blocks), blocks


@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=8), st.integers(1, 40))
def test_any_split_gives_the_digest_of_the_whole(data: bytes, cuts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "BLOCK", block)
        found = fed(data, [min(c, len(data)) for c in cuts])
        assert found == whole(data, block)
        assert len(found[1]) == block_count(len(data))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_the_edges_of_real_blocks(size: int) -> None:
    data = os.urandom(1024) * (size // 1024 + 1)
    data = data[:size]
    cuts = [c for c in (1, BLOCK - 1, BLOCK, BLOCK + 1, size - 1) if 0 <= c <= size]
    found = fed(data, cuts)
    assert found == whole(data, BLOCK) == fed(data, [])
    assert len(found[1]) == block_count(size)


@given(st.text())
def test_only_tags_are_tags(text: str) -> None:
    assert is_digest(digest_bytes(text.encode("utf-8", "surrogatepass")))
    assert not is_digest(text + "\n")
    assert not is_digest(digest_bytes(b"").upper())
    assert not is_digest(digest_bytes(b"") + "\n")
