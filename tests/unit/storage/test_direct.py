"""Large ranges read past the page cache or from it: the same bytes, wherever they begin and end."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from perdure.storage.local import LocalStorage

MIB = 1 << 20
SIZE = 9 * MIB + 1234


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    data = random.Random(1).randbytes(SIZE)
    path = tmp_path_factory.mktemp("direct") / "f"
    path.write_bytes(data)
    return path, data


def bring(path: Path, where: str) -> None:
    """Puts a file, or the half of it, into the page cache, or takes it out."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if where != "cold":
            os.pread(fd, SIZE if where == "warm" else SIZE // 2, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("where", ["cold", "half", "warm"])
@pytest.mark.parametrize(
    ("begin", "size"),
    [
        (0, SIZE),
        (4096, 8 * MIB),
        (1, 2 * MIB),
        (4095, 2 * MIB + 2),
        (777, MIB),
        (SIZE - MIB - 5, MIB + 5),
        (SIZE - 3 * MIB, 3 * MIB),
        (12, MIB - 1),
    ],
)
def test_any_range(written: tuple[Path, bytes], direct: bool, where: str, begin: int, size: int) -> None:
    path, data = written
    bring(path, where)
    with LocalStorage(direct).open_directory(str(path.parent)) as directory:
        reader = directory.open(path.name)
        buffer = bytearray(size + 16)
        reader.pread_into(memoryview(buffer)[8 : 8 + size], begin)
        reader.close()
    assert buffer[8 : 8 + size] == data[begin : begin + size]
    assert not any(buffer[:8])
    assert not any(buffer[8 + size :])


@pytest.mark.parametrize("where", ["cold", "warm"])
def test_a_range_over_the_end_is_an_end(written: tuple[Path, bytes], where: str) -> None:
    path, _ = written
    bring(path, where)
    with LocalStorage().open_directory(str(path.parent)) as directory:
        reader = directory.open(path.name)
        with pytest.raises(EOFError):
            reader.pread_into(memoryview(bytearray(2 * MIB)), SIZE - 2 * MIB + 1)
        with pytest.raises(EOFError):
            reader.pread_into(memoryview(bytearray(2 * MIB)), SIZE + MIB)
        reader.close()


def test_reading_cold_leaves_the_page_cache_alone(written: tuple[Path, bytes]) -> None:
    path, _ = written
    bring(path, "cold")
    with LocalStorage().open_directory(str(path.parent)) as directory:
        reader = directory.open(path.name)
        if reader._direct_fd < 0:  # type: ignore[attr-defined]
            pytest.skip("this file system reads through the page cache only")
        reader.pread_into(memoryview(bytearray(8 * MIB)), 0)
        reader.close()
        for where in ("cold", "warm"):
            if where == "warm":
                bring(path, where)
            reader = directory.open(path.name)
            assert reader._is_cached(MIB) == (where == "warm")  # type: ignore[attr-defined]
            reader.close()
