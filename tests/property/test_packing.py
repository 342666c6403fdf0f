"""Packing: every token of every document once, no pack over its capacity, a pure function of the index."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.data.loader import ResumableLoader
from perdure.data.packing import IGNORED, Packed, plan_packs
from perdure.data.sources import build_source
from perdure.errors import DataError, UsageError


@given(lengths=st.lists(st.integers(0, 40), max_size=30), capacity=st.integers(1, 20), open_packs=st.integers(1, 5))
def test_every_token_is_in_one_piece(lengths: list[int], capacity: int, open_packs: int) -> None:
    plan = plan_packs(lengths, capacity, open_packs=open_packs)
    tokens = sorted(
        (document, token)
        for document, start, count in zip(plan.documents, plan.starts, plan.counts, strict=True)
        for token in range(start, start + count)
    )
    assert tokens == [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    for begin, end in zip(plan.begins[:-1], plan.begins[1:], strict=True):
        assert 0 < plan.counts[begin:end].sum() <= capacity


def test_samples_hold_inputs_labels_and_marks() -> None:
    packed = Packed([[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12], []], 5, document_ids=True)
    samples = [{name: value.tolist() for name, value in packed[index].items()} for index in range(len(packed))]
    assert samples[0] == {
        "input_ids": [1, 2, 3, 4, 5],
        "labels": [2, 3, IGNORED, 5, IGNORED],
        "position_ids": [0, 1, 2, 0, 1],
        "document_ids": [0, 0, 0, 1, 1],
    }
    assert samples[1]["input_ids"] == [6, 7, 8, 9, 10]
    assert samples[1]["labels"] == [7, 8, 9, 10, 11]
    assert samples[2]["input_ids"] == [11, 12, 0, 0, 0]
    assert samples[2]["labels"] == [12, IGNORED, IGNORED, IGNORED, IGNORED]
    assert samples[2]["document_ids"] == [0, 0, -1, -1, -1]
    assert packed.whereabouts(0) == "documents 0, 1"


def test_packs_resume_exactly_by_raw_document() -> None:
    documents = [[number] * (1 + number % 5) for number in range(1, 101)]
    packed = Packed(documents, 8)
    loader = ResumableLoader(packed, global_batch_size=3, seed=2)
    whole = [batch["input_ids"].tolist() for step in loader.take(len(packed)) for batch in step]
    loader.set_init_step(17)
    assert [batch["input_ids"].tolist() for step in loader.take(10) for batch in step] == whole[17:27]
    first_epoch = [token for batch in whole for row in batch for token in row if token][: sum(map(len, documents)) * 3]
    counts = np.bincount(first_epoch, minlength=101)[1:]
    assert counts.tolist() == [3 * len(document) for document in documents]


def test_a_megatron_pair_can_be_packed(tmp_path: Path) -> None:
    tokens = np.arange(1, 13, dtype="<i4")
    (tmp_path / "d.bin").write_bytes(tokens.tobytes())
    (tmp_path / "d.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 4, 3, 4)
        + struct.pack("<iii", 3, 4, 5)
        + struct.pack("<qqq", 0, 12, 28)
        + struct.pack("<qqqq", 0, 1, 2, 3)
    )
    documents = {"type": "MegatronIndexed", "path": str(tmp_path / "d")}
    packed: Any = build_source("Packed", {"documents": documents, "seq_length": 7})
    assert [packed[index]["input_ids"].tolist() for index in range(2)] == [
        [1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 12, 0, 0],
    ]
    assert packed.identity()["fingerprint"].startswith("xxh3-128:")


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(DataError, match="no token"):
        Packed([[], []], 4)
    with pytest.raises(UsageError, match="cannot tell the lengths"):
        Packed(object(), 4)
    with pytest.raises(UsageError, match="open_packs"):
        Packed([[1]], 4, open_packs=0)
    with pytest.raises(UsageError, match="needs a `type`"):
        Packed({"path": "x"}, 4)
