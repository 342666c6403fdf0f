"""Damage is found and named exactly: by verify, and by the reader before anything is used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.checkpoints import Tensor, build_checkpoint, floats

from perdure.catalog.checkpoint import Checkpoint
from perdure.catalog.read import open_shards, read_iteration
from perdure.catalog.root import Root
from perdure.catalog.verify import check_data, verify
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, FormatTooNewError
from perdure.format.box import Box
from perdure.format.digest import BLOCK
from perdure.format.names import TRACKER

MODEL0 = "checkpoint-model-0000000-0000002.safetensors"
MODEL1 = "checkpoint-model-0000001-0000002.safetensors"
STATE = {
    "model": {"w": floats(*map(float, range(8)), shape=(4, 2), cuts=(Box((0, 0), (2, 2)), Box((2, 0), (2, 2))))},
    "optimizer": {"adam_step": Tensor(b"\7\0\0\0\0\0\0\0", (), "I64")},
}


@pytest.fixture
def root(tmp_path: Path) -> Root:
    place = Root(tmp_path)
    build_checkpoint(place, 10, sequence=1, state=STATE)  # type: ignore[arg-type]
    build_checkpoint(place, 20, sequence=2, state=STATE)  # type: ignore[arg-type]
    return place


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap(path: Path) -> None:
    other = path.with_name(MODEL1)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def of_another_step(path: Path) -> None:
    shutil.copy(path.parent.with_name("iteration_00000010") / path.name, path)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


FAULTS: list[tuple[str, Callable[[Path], object], str, bool]] = [
    (MODEL0, cut, "bytes on disk", False),
    (MODEL0, lambda p: p.write_bytes(b""), "0 bytes on disk", False),
    (MODEL0, os.unlink, "missing", False),
    (MODEL0, swap, f"written as {MODEL1}", False),
    (MODEL0, of_another_step, "belongs to save a1b2c3d4-1", False),
    (MODEL0, link, "symbolic link", False),
    (MODEL0, flip_last, "not what was written", True),
    ("metadata.json", os.unlink, "missing", False),
    ("metadata.json", cut, "not what was written", False),
    ("common.json", cut, "not what was written", False),
    ("common.json", of_another_step, "not what was written", False),
    ("commit.json", cut, "digest does not hold", False),
    ("extra.bin", lambda p: p.write_bytes(b"x"), "not a file of this checkpoint", False),
]


@pytest.mark.parametrize(("name", "damage", "said", "in_data"), FAULTS)
def test_each_kind_of_damage_is_named(
    root: Root, name: str, damage: Callable[[Path], object], said: str, in_data: bool
) -> None:
    path = Path(root.join("iteration_00000020"))
    assert verify(path, read_data=True).ok
    damage(path / name)
    report = verify(path, read_data=in_data)
    assert not report.ok
    assert (report.problems[0].file, said in report.problems[0].what) == (name, True), report.problems
    assert str(path / name) in report.problems[0].what
    assert verify(root.path, read_data=True).problems
    assert verify(root.join("iteration_00000010"), read_data=True).ok
    if in_data:
        assert verify(path).ok
        assert report.problems[0].tensor == "w"


@pytest.mark.parametrize(("name", "damage", "said", "in_data"), [f for f in FAULTS if f[0] != "extra.bin"])
def test_the_reader_refuses_the_same_damage_before_use(
    root: Root, name: str, damage: Callable[[Path], object], said: str, in_data: bool
) -> None:
    path = Path(root.join("iteration_00000020"))
    damage(path / name)
    with root.storage.open_directory(str(path)) as directory:
        if in_data:
            content = read_iteration(directory)
            with open_shards(directory, content) as files:
                files.check()
                assert [p.file for p in check_data(files, content, range(len(content.metadata.files)))] == [name]
            return
        with (
            pytest.raises(DamagedCheckpointError) as caught,
            open_shards(directory, read_iteration(directory)) as files,
        ):
            files.check()
    assert caught.value.file == str(path / name)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(where=st.integers(0, 1 << 30), bit=st.integers(0, 7), which=st.integers(0, 5))
def test_any_flipped_bit_of_any_file_is_found(root: Root, where: int, bit: int, which: int) -> None:
    path = Path(root.join("iteration_00000020"))
    names = sorted(os.listdir(path))
    file = path / names[which % len(names)]
    before = file.read_bytes()
    data = bytearray(before)
    data[where % len(data)] ^= 1 << bit
    file.write_bytes(data)
    try:
        report = verify(path, read_data=True)
    except FormatTooNewError:
        pytest.fail("a flipped bit was believed to be a newer version")
    finally:
        file.write_bytes(before)
    assert [p.file for p in report.problems][:1] == [file.name]


def test_verify_changes_nothing(root: Root) -> None:
    flip_last(Path(root.join("iteration_00000020"), MODEL0))
    os.mkdir(root.join(".iteration_00000030.partial-ab-3"))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in Path(root.path).rglob("*")}
    report = verify(root.path, read_data=True)
    assert len(report.problems) == 1
    assert "partial" in report.notes[0]
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in Path(root.path).rglob("*")} == before


def test_a_large_tensor_is_checked_block_by_block(tmp_path: Path) -> None:
    size = 2 * BLOCK + 5
    root = Root(tmp_path)
    build_checkpoint(root, 1, state={"model": {"w": Tensor(bytes(range(256)) * (size // 256 + 1), (size,), "U8")}})
    seen: list[tuple[int, int]] = []
    assert verify(tmp_path, read_data=True, progress=lambda done, total: seen.append((done, total))).ok
    assert seen[-1][0] == size
    (file,) = Path(root.join("iteration_00000001")).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-10] ^= 4
    file.write_bytes(data)
    report = verify(tmp_path, read_data=True)
    assert [
        (p.tensor, f"bytes {2 * BLOCK} to" in p.what or f"bytes {BLOCK} to" in p.what) for p in report.problems
    ] == [("w", True)]


def test_a_root_whose_tracker_names_nothing_committed_is_a_problem(root: Root) -> None:
    Path(root.join(TRACKER)).write_text("77")
    (problem,) = verify(root.path).problems
    assert (problem.file, problem.found) == (TRACKER, "'77'")


def test_verify_of_nothing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "no")


def test_the_handle_reads_without_a_model(root: Root) -> None:
    checkpoint = Checkpoint(root.path)
    assert (checkpoint.iteration, checkpoint.common.consumed_samples) == (20, 80)
    assert checkpoint.names() == ["w"]
    assert checkpoint.names("optimizer") == ["adam_step"]
    assert checkpoint.tensor_record("w").shape == (4, 2)
    assert checkpoint.verify(read_data=True).ok
    assert Checkpoint(root.join("iteration_00000010")).iteration == 10


def test_a_shard_is_found_at_its_offset(root: Root) -> None:
    with root.open(root.iterations()[1]) as directory:
        content = read_iteration(directory)
        with open_shards(directory, content) as files:
            record = content.metadata.model["w"]
            for shard in record.shards:
                reader, offset = files.locate("model", "w", shard)
                data = bytearray(16)
                reader.pread_into(memoryview(data), offset)
                assert bytes(data) == STATE["model"]["w"].piece(shard.box)  # type: ignore[attr-defined]
                assert files.file_name(shard).endswith(f"-000000{shard.file}-0000002.safetensors")
