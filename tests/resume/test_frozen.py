"""Frozen weights are written once and linked from then on; every iteration stays whole, and removable on its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn

from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import DamagedCheckpointError
from perdure.storage.local import LocalStorage

NAME = "checkpoint-frozen-model-0000000-0000001.safetensors"


def frozen() -> nn.Module:
    net = tiny.Net()
    net.first.requires_grad_(False)
    return net


def run(output: Path, steps: int, **keys: Any) -> Any:
    checkpoint = {"save_interleaved_steps": 2, "save_max": 4, **keys.pop("checkpoint", {})}
    made = tiny.trainer(output, steps, model=keys.pop("model", frozen), checkpoint=checkpoint, **keys)
    made.train()
    return made


def files(output: Path) -> dict[int, Path]:
    """The file of frozen weights of every iteration."""
    iterations = Root(str(output / "checkpoint")).iterations()
    return {i.iteration: Path(i.path) / NAME for i in iterations}


def sound(output: Path) -> bool:
    return not verify(str(output / "checkpoint"), read_data=True).problems


@pytest.mark.parametrize("background", [False, True])
def test_one_file_serves_all_iterations_and_restarts(tmp_path: Path, background: bool) -> None:
    for stop in (5, 8):
        run(tmp_path, stop, checkpoint={"async_save": background})
    held = files(tmp_path)
    assert len(held) == 4
    assert len({file.stat().st_ino for file in held.values()}) == 1
    assert sound(tmp_path)
    marks = set()
    for iteration, file in held.items():
        metadata = json.loads((file.parent / "metadata.json").read_text())
        (record,) = [each for each in metadata["files"] if each["name"] == NAME]
        marks.add(record.get("save"))
        names = {n for n, r in metadata["model"].items() if metadata["files"][r["shards"][0][0]]["name"] == NAME}
        assert names == {"first.weight", "first.bias"}, iteration
    # The mark stays that of the first writing, which retention has removed long since.
    assert len(marks) == 1
    assert str(marks.pop()).endswith("-1")


def test_the_run_is_that_of_one_that_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "linked", 8)

    def refuse(self: Any, source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)

    monkeypatch.setattr(LocalStorage, "link", refuse)
    run(tmp_path / "written", 8)
    assert tiny.trace(tmp_path / "linked") == tiny.trace(tmp_path / "written")
    a, b = (tiny.newest(tmp_path / name / "checkpoint") for name in ("linked", "written"))
    assert tiny.state(a) == tiny.state(b)
    assert sound(tmp_path / "written")
    assert len({file.stat().st_ino for file in files(tmp_path / "written").values()}) == 4


def test_each_iteration_is_removable_and_whole_on_its_own(tmp_path: Path) -> None:
    made = run(tmp_path, 8)
    held = files(tmp_path)
    for iteration in (2, 4, 6):
        shutil.rmtree(held[iteration].parent)
    assert sound(tmp_path)
    again = run(tmp_path, 10)
    assert torch.equal(tiny.weights(made.model)["first.weight"], tiny.weights(again.model)["first.weight"])
    copied = tmp_path / "elsewhere" / "checkpoint"
    shutil.copytree(tmp_path / "checkpoint", copied)
    assert sound(tmp_path / "elsewhere")
    run(tmp_path / "elsewhere", 12)


class Touch(tiny.Callback):
    """Changes a frozen weight behind the optimizer's back, without a version counter noticing."""

    def on_step_end(self, trainer: Any, state: Any) -> None:
        if state.global_step == 5:
            trainer.model.first.weight.data[0, 0] += 1.0


@pytest.mark.parametrize("background", [False, True])
def test_what_changed_is_written_whatever_requires_grad_says(tmp_path: Path, background: bool) -> None:
    made = run(tmp_path, 8, callbacks=(Touch(),), checkpoint={"async_save": background})
    inodes = {iteration: file.stat().st_ino for iteration, file in files(tmp_path).items()}
    assert inodes[2] == inodes[4] != inodes[6] == inodes[8]
    assert sound(tmp_path)
    look = run(tmp_path, 9)
    assert torch.equal(tiny.weights(made.model)["first.weight"], tiny.weights(look.model)["first.weight"])


def test_another_set_of_frozen_weights_is_another_file(tmp_path: Path) -> None:
    run(tmp_path, 4)
    run(tmp_path, 6, model=tiny.Net)
    assert not files(tmp_path)[6].exists()

    def more() -> nn.Module:
        net = frozen()
        net.get_parameter("last.weight").requires_grad_(False)
        return net

    run(tmp_path, 8, model=more)
    held = files(tmp_path)
    assert held[2].stat().st_ino == held[4].stat().st_ino != held[8].stat().st_ino
    assert sound(tmp_path)


def test_damage_to_a_shared_file_is_told_of_each_that_shares_it(tmp_path: Path) -> None:
    run(tmp_path, 8)
    file = files(tmp_path)[6]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    with file.open("r+b") as target:
        target.write(data)
    problems = verify(str(tmp_path / "checkpoint"), read_data=True).problems
    assert {Path(problem.path).name for problem in problems} == {f"iteration_{n:08d}" for n in (2, 4, 6, 8)}
    assert {problem.file for problem in problems} == {NAME}
    assert all("first." in str(problem.tensor) for problem in problems)
    with pytest.raises(DamagedCheckpointError, match="no sound earlier iteration"):
        run(tmp_path, 10)


def test_room_is_asked_for_what_is_written_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> nn.Module:
        net = tiny.Net(300_000)
        net.requires_grad_(False)
        net.last.bias.requires_grad_(True)
        return net

    run(tmp_path, 2, model=large)
    size = files(tmp_path)[2].stat().st_size
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda self, path: size // 2)
    run(tmp_path, 4, model=large)
    assert sorted(files(tmp_path)) == [2, 4]


@pytest.mark.parametrize("after", [False, True])
def test_killed_around_the_link_nothing_is_lost(tmp_path: Path, after: bool) -> None:
    def work() -> None:
        link = LocalStorage.link

        def deadly(self: LocalStorage, source: str, target: str) -> None:
            if after:
                link(self, source, target)
            tiny.kill_self()

        LocalStorage.link = deadly  # type: ignore[method-assign]
        run(tmp_path, 8)

    run(tmp_path, 4)
    assert tiny.in_child(work) == -9
    run(tmp_path, 8)
    assert sound(tmp_path)
    assert len({file.stat().st_ino for file in files(tmp_path).values()}) == 1
    assert not [p for p in (tmp_path / "checkpoint").iterdir() if p.name.startswith(".")]
