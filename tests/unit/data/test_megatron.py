"""MegatronIndexed against pairs written byte by byte from the format's description."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from perdure.data.loader import ResumableLoader
from perdure.data.sources import build_source
from perdure.data.sources.megatron import MegatronIndexed
from perdure.errors import DataError

CODES = {"<u2": 8, "<i4": 4, "<i8": 5, "u1": 1}


def write_pair(prefix: Path, sequences: list[list[int]], marks: list[int], dtype: str = "<i4") -> None:
    arrays = [np.array(sequence, dtype=dtype) for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    offsets = np.cumsum([0, *[array.nbytes for array in arrays]])[:-1]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(arrays), len(marks))
    lengths = np.array([len(array) for array in arrays], dtype="<i4")
    prefix.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + offsets.astype("<i8").tobytes() + np.array(marks, dtype="<i8").tobytes()
    )


SEQUENCES = [[10, 11, 12], [], [20, 21, 22, 23, 24], [30], [40, 41, 42, 43]]


@pytest.mark.parametrize("dtype", list(CODES))
def test_windows_run_over_the_documents(tmp_path: Path, dtype: str) -> None:
    write_pair(tmp_path / "d", SEQUENCES, [0, 2, 3, 5], dtype)
    flat = [token for sequence in SEQUENCES for token in sequence]
    for name in ("d", "d.bin", "d.idx"):
        source = MegatronIndexed(tmp_path / name, 4)
        assert len(source) == 3
        for index in range(3):
            assert source[index]["input_ids"].tolist() == flat[index * 4 : index * 4 + 4]
            assert source[index]["labels"].tolist() == flat[index * 4 + 1 : index * 4 + 5]
    assert source.whereabouts(1).endswith(f"d.bin at byte {4 * np.dtype(dtype).itemsize}")


def test_sequences_may_lie_anywhere_in_the_file(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", [[1, 2, 3], [4, 5, 6]], [0, 1, 2])
    content = bytearray((tmp_path / "d.idx").read_bytes())
    content[34 + 8 : 34 + 24] = struct.pack("<qq", 12, 0)
    (tmp_path / "d.idx").write_bytes(content)
    assert MegatronIndexed(tmp_path / "d", 5)[0]["input_ids"].tolist() == [4, 5, 6, 1, 2]


def test_document_and_position_ids(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", SEQUENCES, [0, 2, 3, 5])
    source = MegatronIndexed(tmp_path / "d", 6, document_ids=True)
    assert source[0]["document_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert source[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert source[1]["document_ids"].tolist() == [0, 0, 1, 1, 1, 1]
    assert source[1]["position_ids"].tolist() == [3, 4, 0, 1, 2, 3]


def test_it_trains_in_workers_and_has_an_identity(tmp_path: Path) -> None:
    write_pair(tmp_path / "d", SEQUENCES, [0, 2, 3, 5])
    source = build_source("BlendedMegatronDatasetDataLoader", {"path": str(tmp_path / "d"), "seq_length": 2})
    batches = []
    for num_workers in (0, 1):
        with ResumableLoader(source, global_batch_size=2, num_workers=num_workers) as loader:
            batches.append([batch["labels"].tolist() for step in loader.take(6) for batch in step])
    assert batches[0] == batches[1]
    assert source.identity()["fingerprint"].startswith("xxh3-128:")


def test_damaged_pairs_are_refused_by_name(tmp_path: Path) -> None:
    def fresh() -> bytes:
        write_pair(tmp_path / "d", SEQUENCES, [0, 2, 3, 5])
        return (tmp_path / "d.idx").read_bytes()

    index = fresh()
    for content, words in (
        (b"", "not an index"),
        (b"X" * 60, "not an index"),
        (index[:9] + struct.pack("<Q", 2) + index[17:], "version 2"),
        (index[:17] + b"\x06" + index[18:], "dtype code 6"),
        (index[:-1], "need"),
        (index[:-8] + struct.pack("<q", 6), "document mark"),
    ):
        (tmp_path / "d.idx").write_bytes(content)
        with pytest.raises(DataError, match=rf"d\.idx: .*{words}"):
            MegatronIndexed(tmp_path / "d", 4)
    fresh()
    os.truncate(tmp_path / "d.bin", 20)
    with pytest.raises(DataError, match=r"d\.bin: 20 bytes do not hold the 52"):
        MegatronIndexed(tmp_path / "d", 4)
    (tmp_path / "d.bin").unlink()
    with pytest.raises(DataError, match=r"d\.bin: No such file"):
        MegatronIndexed(tmp_path / "d", 4)
