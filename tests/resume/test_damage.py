"""Damage is found wherever it is, set aside for good, and what it descends from is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from perdure import CheckpointConfig, Checkpointer
from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.cli.main import run
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, UsageError


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a byte of the model": lambda d: flip(next(d.glob("*-model-*")), -1),
    "a byte of the optimizer": lambda d: flip(next(d.glob("*-opt-*")), -1),
    "a byte of a header": lambda d: flip(next(d.glob("*-model-*")), 12),
    "a byte cut off": lambda d: os.truncate(next(d.glob("*-model-*")), next(d.glob("*-model-*")).stat().st_size - 1),
    "an empty shard": lambda d: os.truncate(next(d.glob("*-opt-*")), 0),
    "a missing shard": lambda d: os.unlink(next(d.glob("*-opt-*"))),
    "no metadata": lambda d: os.unlink(d / "metadata.json"),
    "half of common.json": lambda d: os.truncate(d / "common.json", (d / "common.json").stat().st_size // 2),
    "a shard of another step": lambda d: next(d.glob("*-model-*")).write_bytes(
        next((d.parent / "iteration_00000005").glob("*-model-*")).read_bytes()
    ),
    "a broken commit": lambda d: flip(d / "commit.json", 40),
}


@pytest.mark.parametrize("verify", ["inline", "first"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_parent_taken_once_and_for_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str, verify: str
) -> None:
    keys = {"verify_on_load": verify, "save_max": 9}
    tiny.trainer(tmp_path, 10, checkpoint=keys).train()
    ten = tmp_path / "checkpoint" / "iteration_00000010"
    DAMAGE[damage](ten)
    named = {**keys, "auto_resume": False, "load_path": str(ten), "save_path": str(tmp_path / "other")}
    with pytest.raises((DamagedCheckpointError, CheckpointNotFoundError), match="iteration_00000010"):
        tiny.trainer(tmp_path / "x", 11, checkpoint=named).train()
    capfd.readouterr()
    reached = tiny.trainer(tmp_path, 7, checkpoint=keys).train()
    assert reached.global_step == 7
    assert "iteration_00000010" in capfd.readouterr().err
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 8))
    marks = [e["event"] for e in read_events(Root(str(tmp_path / "checkpoint")))].count("damage")
    assert marks == (0 if damage == "a broken commit" else 1)
    # The next start goes by the newest save and does not try the damaged one again.
    tiny.trainer(tmp_path, 9, checkpoint=keys).train()
    assert [e["event"] for e in read_events(Root(str(tmp_path / "checkpoint")))].count("damage") == marks


def test_a_restart_before_the_next_save_does_not_try_the_damaged_one_again(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 10).train()
    flip(next((tmp_path / "checkpoint" / "iteration_00000010").glob("*-model-*")), -1)

    def crash(model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            tiny.trainer(tmp_path, 12, loss=crash).train()
    events = [e["event"] for e in read_events(Root(str(tmp_path / "checkpoint")))]
    assert events.count("damage") == 1


def test_a_damaged_root_that_is_only_read_stays_as_it_is(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 10).train()
    flip(next((tmp_path / "a" / "checkpoint" / "iteration_00000010").glob("*-opt-*")), -1)
    before = tiny.tree(tmp_path / "a")
    source = {"auto_resume": False, "load_path": str(tmp_path / "a" / "checkpoint")}
    tiny.trainer(tmp_path / "b", 8, checkpoint=source).train()
    assert [row[0] for row in tiny.trace(tmp_path / "b")] == [6, 7, 8]
    assert tiny.tree(tmp_path / "a") == before
    assert [e["event"] for e in read_events(Root(str(tmp_path / "b" / "checkpoint")))].count("damage") == 1


def test_with_error_or_without_a_sound_parent_damage_stops_with_the_command_to_look(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    flip(next((tmp_path / "checkpoint" / "iteration_00000005").glob("*-opt-*")), -1)
    with pytest.raises(DamagedCheckpointError, match=r"(?s)-opt-.*perdure verify --read-data"):
        tiny.trainer(tmp_path, 8, checkpoint={"on_corrupt": "error"}).train()
    for _ in range(2):
        with pytest.raises(DamagedCheckpointError, match=r"(?s)perdure verify --read-data"):
            tiny.trainer(tmp_path, 8).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == [1, 2, 3, 4, 5]


def test_fallback_passes_over_a_parent_that_retention_removed(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 8, checkpoint={"save_interleaved_steps": 2, "save_max": 9}).train()
    root = Root(str(tmp_path / "checkpoint"))
    for gone in (4, 6):
        found = root.find(gone)
        assert found is not None
        for name in os.listdir(found.path):
            os.unlink(os.path.join(found.path, name))
        os.rmdir(found.path)
    flip(next((tmp_path / "checkpoint" / "iteration_00000008").glob("*-model-*")), -1)
    tiny.trainer(tmp_path, 9).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 10))


def test_a_repaired_iteration_is_taken_again_once_somebody_has_pointed_at_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "checkpoint"
    tiny.trainer(tmp_path, 10, checkpoint={"save_max": 9}).train()
    shard = next((root / "iteration_00000010").glob("*-opt-*"))
    whole = shard.read_bytes()

    def loaded() -> int:
        model = tiny.Net()
        config = CheckpointConfig(save_path=str(root), auto_resume=True)
        with Checkpointer(config, model=model, optimizer=torch.optim.AdamW(model.parameters())) as checkpointer:
            return checkpointer.load().global_step

    flip(shard, -1)
    assert loaded() == 5
    shard.write_bytes(whole)
    capfd.readouterr()
    assert loaded() == 5
    assert f"once repaired: perdure rewind {root} --to 10" in capfd.readouterr().err
    assert run(["rewind", str(root), "--to", "10"]) == 0
    assert loaded() == 10
    # One that was not repaired is found out again.
    flip(shard, -1)
    assert run(["rewind", str(root), "--to", "10"]) == 0
    assert loaded() == 5
    assert loaded() == 5


@pytest.mark.parametrize("name", ["events.jsonl", "latest_checkpointed_iteration.txt"])
def test_what_could_never_be_written_is_told_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name} is a directory, where a file is to be written"):
        Checkpointer(CheckpointConfig(save_path=str(tmp_path)), model=nn.Linear(2, 1))


def test_a_save_path_that_is_no_directory_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match=f"{name} cannot be made: it is no directory"):
            Checkpointer(CheckpointConfig(save_path=str(tmp_path / name)), model=nn.Linear(2, 1))
