"""What a commit replaces, what it never touches, and how errors leave the root."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.checkpoints import build_checkpoint, small_state, write_shards

from perdure.catalog.choose import choose
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import discard, publish, recover, stage
from perdure.catalog.retention import keep, remove
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import SaveError
from perdure.format.common import CommonInfo
from perdure.format.metadata import CheckpointMetadata
from perdure.format.names import TRACKER
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage


def snapshot(path: str) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(Path(path).rglob("*")) if p.is_file()}


def finish(staging, metadata: CheckpointMetadata, said: list[str] | None = None, lock: RootLock | None = None) -> None:  # type: ignore[no-untyped-def]
    publish(
        staging,
        metadata,
        CommonInfo(global_step=staging.iteration),
        lineage="a1b2c3d4",
        parent=0,
        attempt=staging.attempt,
        ranks=1,
        writer="test",
        lock=lock,
        warn=(said if said is not None else []).append,
    )


def test_a_save_leaves_exactly_its_files(tmp_path: Path) -> None:
    root = Root(tmp_path)
    staging = stage(root, 5, "ab", 1)
    metadata = write_shards(staging, "a1b2c3d4-1", small_state(5))
    Path(staging.path, "part-0000001.json").write_text("{}")
    finish(staging, metadata)
    assert sorted(os.listdir(root.join("iteration_00000005"))) == [
        "checkpoint-model-0000000-0000001.safetensors",
        "checkpoint-opt-0000000-0000001.safetensors",
        "commit.json",
        "common.json",
        "metadata.json",
    ]
    assert root.tracker().text == "5"
    assert verify(tmp_path, read_data=True).ok


def test_a_missing_shard_file_is_never_published(tmp_path: Path) -> None:
    root = Root(tmp_path)
    staging = stage(root, 5, "ab", 1)
    metadata = write_shards(staging, "a1b2c3d4-1", small_state(5))
    os.unlink(f"{staging.path}/{metadata.files[0].name}")
    with pytest.raises(SaveError, match="not there"):
        finish(staging, metadata)
    assert root.iterations() == []


def test_what_has_the_name_but_is_no_checkpoint_is_set_aside_and_told(tmp_path: Path) -> None:
    root, said = Root(tmp_path), []
    (tmp_path / "iteration_00000005").mkdir()
    (tmp_path / "iteration_00000005" / "model.bin").write_text("theirs")
    staging = stage(root, 5, "ab", 1)
    finish(staging, write_shards(staging, "a1b2c3d4-1", small_state(5)), said)
    assert (tmp_path / "iteration_00000005.set-aside-ab-1" / "model.bin").read_text() == "theirs"
    assert len(said) == 1
    assert choose(root).iteration.iteration == 5


def test_another_runs_iteration_is_never_replaced(tmp_path: Path) -> None:
    root = Root(tmp_path)
    build_checkpoint(root, 5, lineage="other")
    before = snapshot(root.join("iteration_00000005"))
    staging = stage(root, 5, "ab", 1)
    with pytest.raises(SaveError, match="another run"):
        finish(staging, write_shards(staging, "a1b2c3d4-1", small_state(6)))
    discard(staging)
    assert snapshot(root.join("iteration_00000005")) == before
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".")]


def test_a_damaged_iteration_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    root = Root(tmp_path)
    build_checkpoint(root, 5)
    Path(root.join("iteration_00000005"), "commit.json").write_bytes(b"rubbish")
    build_checkpoint(root, 5, sequence=2)
    assert verify(tmp_path, read_data=True).ok
    assert sorted(os.listdir(tmp_path)) == ["iteration_00000005", TRACKER]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_at_any_operation_leaves_the_earlier_ones_and_the_next_save_works(tmp_path: Path, code: int) -> None:
    number = 0
    while True:
        number += 1
        path = tmp_path / str(number)
        path.mkdir()
        build_checkpoint(Root(path), 5, sequence=1)
        storage = FaultStorage(LocalStorage(), at=number, action="raise", code=code)
        root = Root(path, storage)
        staging = None
        try:
            staging = stage(root, 5, "ab", 2)
            finish(staging, write_shards(staging, "a1b2c3d4-2", small_state(7)))
        except (SaveError, OSError):
            if staging is not None:
                discard(staging)
        if len(storage.log) < number:
            break
        assert choose(Root(path)).iteration.iteration == 5
        assert verify(root.join("iteration_00000005"), read_data=True).ok
        assert [line for line in recover(Root(path)) if line.startswith("warning")] == []
        build_checkpoint(Root(path), 6, sequence=3)
        assert sorted(n for n in os.listdir(path) if n.startswith(".")) == []
        assert verify(path, read_data=True).ok
    assert number > 10


def test_a_failed_tracker_is_reported_as_such_with_the_iteration_committed(tmp_path: Path) -> None:
    build_checkpoint(Root(tmp_path), 5, sequence=1)
    storage = FaultStorage(
        LocalStorage(), at=1, action="raise", sticky=True, only=lambda name, path: TRACKER in path and name == "write"
    )
    root = Root(tmp_path, storage)
    staging = stage(root, 6, "ab", 2)
    with pytest.raises(SaveError, match="tracker") as caught:
        finish(staging, write_shards(staging, "a1b2c3d4-2", small_state(6)))
    assert "committed" in caught.value.message
    assert isinstance(caught.value.__cause__, OSError)
    choice = choose(Root(tmp_path))
    assert choice.iteration.iteration == 5
    assert "iteration_00000006" in choice.warnings[0]


def test_a_holder_that_wakes_up_after_a_takeover_cannot_publish(tmp_path: Path) -> None:
    root = Root(tmp_path)
    lock = RootLock.acquire(str(tmp_path), attempt="ab")
    staging = stage(root, 5, "ab", 1)
    metadata = write_shards(staging, "a1b2c3d4-1", small_state(5))
    os.unlink(lock.path)
    other = RootLock.acquire(str(tmp_path), attempt="cd")
    with pytest.raises(SaveError, match="taken this root over"):
        finish(staging, metadata, lock=lock)
    recover(root, "cd")
    with pytest.raises((SaveError, OSError)):
        finish(staging, metadata)
    assert root.iterations() == []
    other.release()
    lock.release()


def test_a_holder_that_wakes_up_between_commit_and_tracker_leaves_the_tracker_alone(tmp_path: Path) -> None:
    """The paused one has renamed its directory; its heir goes on from there, saves, and moves the tracker."""
    heirs: list[RootLock] = []

    class Paused(LocalStorage):
        def rename(self, source: str, target: str) -> None:
            super().rename(source, target)
            if target.endswith("iteration_00000005"):
                os.unlink(lock.path)
                heirs.append(RootLock.acquire(str(tmp_path), attempt="cd"))
                recover(Root(tmp_path), "cd")
                build_checkpoint(Root(tmp_path), 6, sequence=2, attempt="cd")

    root = Root(tmp_path, Paused())
    lock = RootLock.acquire(str(tmp_path), attempt="ab")
    staging = stage(root, 5, "ab", 1)
    with pytest.raises(SaveError, match=r"taken this root over.*iteration 5 was committed.*tracker is left"):
        finish(staging, write_shards(staging, "a1b2c3d4-1", small_state(5)), lock=lock)
    assert root.tracker().text == "6"
    assert [i.iteration for i in root.iterations()] == [5, 6]
    for held in (lock, *heirs):
        held.release()


def test_recover_touches_nothing_that_is_not_ours(tmp_path: Path) -> None:
    root = Root(tmp_path)
    build_checkpoint(root, 5)
    for name in (".iteration_5.partial-ab-1", ".iteration_00000005.partial-xyz-1", ".hidden", "iteration_00000005.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("keep")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("keep")
    os.symlink(tmp_path / "outside", tmp_path / ".iteration_00000006.partial-ab-2")
    before = snapshot(str(tmp_path))
    recover(root)
    assert snapshot(str(tmp_path)) == before


def test_writing_does_not_follow_links_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "precious").write_text("keep")
    root = Root(tmp_path / "root")
    for name in (f".{TRACKER}.tmp", "events.jsonl"):
        os.symlink(tmp_path / "precious", root.join(name))
    with pytest.raises((SaveError, OSError)):
        build_checkpoint(root, 5)
    with pytest.raises(OSError, match="events"):
        root.storage.append(root.join("events.jsonl"), b"x\n", False)
    assert (tmp_path / "precious").read_text() == "keep"


def test_removal_leaves_directories_with_other_peoples_files_and_survives_races(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for sequence in (1, 2, 3):
        build_checkpoint(root, sequence, sequence=sequence)
    (tmp_path / "iteration_00000001" / "notes.txt").write_text("mine")
    first, second, _ = root.iterations()
    (warning,) = remove(root, first)
    assert "notes.txt" in warning
    assert (tmp_path / "iteration_00000001" / "notes.txt").exists()
    assert remove(root, second) == []
    assert remove(root, second) == []
    assert sorted(i.iteration for i in root.iterations()) == [1, 3]


def test_an_undeletable_iteration_is_a_warning_and_cleaned_later(tmp_path: Path) -> None:
    for sequence in (1, 2):
        build_checkpoint(Root(tmp_path), sequence, sequence=sequence)
    storage = FaultStorage(
        LocalStorage(), at=1, action="raise", code=errno.EBUSY, sticky=True, only=lambda name, path: name == "unlink"
    )
    root = Root(tmp_path, storage)
    (warning,) = remove(root, root.iterations()[0])
    assert "tried again" in warning
    assert [i.iteration for i in root.iterations()] == [2]
    assert recover(Root(tmp_path)) == []
    assert sorted(os.listdir(tmp_path)) == ["iteration_00000002", TRACKER]


def test_save_max_one_keeps_exactly_the_newest(tmp_path: Path) -> None:
    root = Root(tmp_path)
    for sequence, iteration in enumerate((99999998, 100000000, 8, 11, 9), start=1):
        build_checkpoint(root, iteration, sequence=sequence)
        verdicts = keep(root.iterations(), 1, lineage="a1b2c3d4", pinned={sequence: "just saved"})
        assert [w for i, v in verdicts.items() if v.remove for w in remove(root, i)] == []
        assert [i.iteration for i in root.iterations()] == [iteration]
