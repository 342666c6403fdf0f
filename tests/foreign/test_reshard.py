"""Cut for other ranks, and merged: the same save of the same run, bit for bit."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoints import Tensor, build_checkpoint
from tests.foreign.ours import SIZES, perdure, saved, trained
from tests.foreign.toy import FIXTURES, equal, load, optimizer_of

from perdure import Checkpoint
from perdure.catalog.diff import diff
from perdure.catalog.fingerprint import fingerprint
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.cli.main import run
from perdure.convert.evenly import cut
from perdure.format.box import Box, cover_fault
from perdure.models.decoder import Decoder


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 12))
def test_a_cut_covers_and_is_even(shape: tuple[int, ...], parts: int) -> None:
    boxes = cut(shape, parts)
    assert len(boxes) <= parts
    assert cover_fault(boxes, shape) is None
    assert sum(box.numel for box in boxes) == prod(shape)
    if len(boxes) > 1:
        sizes = [box.numel for box in boxes]
        assert len(set(sizes[:-1])) == 1
        assert sizes[-1] <= sizes[0]


def test_the_cut_is_that_of_fsdp() -> None:
    for rows in range(3, 12):
        chunks = torch.empty(rows, 2).chunk(3)
        assert [box.shape for box in cut((rows, 2), 3)] == [tuple(chunk.shape) for chunk in chunks]


@pytest.mark.parametrize("low", [False, True])
def test_there_and_back_is_the_same_save(low: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained(low, tied=low)
    source = saved(tmp_path / "ours", model, optimizer)
    perdure("reshard", source, "--ranks", 3, "--to", tmp_path / "three")
    perdure("reshard", tmp_path / "three", "--ranks", 1)
    merged = tmp_path / "three-1-rank"
    assert {root: len(list((root / source.name).glob("*.safetensors"))) for root in (tmp_path / "three", merged)} == {
        tmp_path / "three": 6,
        merged: 2,
    }
    want, commit = fingerprint(source), Checkpoint(source).commit
    assert commit is not None
    for root, ranks in ((tmp_path / "three", 3), (merged, 1)):
        report = diff(source, root, read_data=True)
        assert (report.tensors, report.progress) == ([], {})
        assert set(report.training) <= {"ranks"}
        assert fingerprint(root) == want
        assert verify(root, read_data=True).ok
        found = Checkpoint(root).commit
        assert found is not None
        assert found.ranks == ranks
        assert (found.lineage, found.sequence, found.parent) == (commit.lineage, commit.sequence, commit.parent)
    torch.manual_seed(9)
    other = Decoder(**SIZES, tie_word_embeddings=low, params_dtype="bfloat16" if low else "float32")
    fresh = optimizer_of(other)
    progress, loaded, _ = load(tmp_path / "three", other, fresh, tmp_path)
    assert (progress.global_step, progress.consumed_samples, loaded.lineage) == (2, 14, commit.lineage)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(a, b)
        assert all(equal(optimizer.state[a][key], fresh.state[b][key]) for key in optimizer.state[a])


def test_more_ranks_than_rows_and_odd_shapes(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"a": (), "b": (1,), "c": (2, 40), "d": (0, 3), "e": (7, 1), "f": (5, 5, 5)}
    state: Any = {"model": {n: Tensor(os.urandom(4 * prod(s)), s) for n, s in shapes.items()}}
    root = Root(tmp_path / "root")
    os.mkdir(root.path)
    build_checkpoint(root, 3, state=state)
    for ranks in (2, 5, 8):
        perdure("reshard", root.path, "--ranks", ranks)
        target = Path(f"{root.path}-{ranks}-ranks")
        assert fingerprint(target) == fingerprint(root.path)
        assert verify(target, read_data=True).ok


def test_what_was_cut_in_two_directions_is_cut_anew(tmp_path: Path) -> None:
    quarters = tuple(Box((r, c), (3, 4)) for r in (0, 3) for c in (0, 4))
    root = Root(tmp_path / "root")
    os.mkdir(root.path)
    build_checkpoint(root, 3, state={"model": {"w": Tensor(os.urandom(6 * 8 * 4), (6, 8), "F32", quarters)}})
    perdure("reshard", root.path, "--ranks", 3, "--to", tmp_path / "three")
    assert fingerprint(tmp_path / "three") == fingerprint(root.path)
    record = Checkpoint(tmp_path / "three").tensor_record("w")
    assert [shard.box for shard in record.shards] == [Box((r, 0), (2, 8)) for r in (0, 2, 4)]


def test_the_json_says_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "ours", *trained())
    perdure("reshard", tmp_path / "ours", "--ranks", 2, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["root"] == str(tmp_path / "ours-2-ranks")
    assert (said["from"], said["iteration"], said["ranks_before"], said["ranks"]) == (str(source), 2, 1, 2)


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "ours", *trained())
    assert run(["reshard", str(tmp_path / "ours"), "--ranks", "2", "--to", str(tmp_path / "ours")]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run(["reshard", str(FIXTURES / "single_bf16_adamw"), "--ranks", "2"]) == 2
    assert "perdure import" in capsys.readouterr().err
    assert run(["reshard", str(tmp_path / "none"), "--ranks", "2"]) == 10


def test_damage_is_found_and_nothing_becomes_visible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "ours", *trained())
    (file,) = source.glob("*-opt-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run(["reshard", str(source), "--ranks", "2"]) == 1
    assert "is not what was written" in capsys.readouterr().err
    listing = Root(tmp_path / "ours-2-ranks").listing()
    assert (listing.iterations, listing.uncommitted) == ([], [])
