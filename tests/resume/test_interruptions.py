"""Every way of being interrupted, at every place: what is left goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny

from perdure.catalog.root import Root
from perdure.engine import checkpointer as engine
from perdure.errors import SaveError
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage

STEPS = 12


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("straight")
    tiny.trainer(output, STEPS).train()
    return output


def finish_and_compare(output: Path, straight: Path) -> None:
    assert tiny.trainer(output, STEPS).train().global_step == STEPS
    assert tiny.trace(output) == tiny.trace(straight)
    assert tiny.state(tiny.newest(output / "checkpoint")) == tiny.state(tiny.newest(straight / "checkpoint"))
    assert [name for name in os.listdir(output / "checkpoint") if name.startswith(".")] == []


def dying(monkeypatch: pytest.MonkeyPatch, **fault: Any) -> None:
    """From here on, whoever opens a root gets a storage that fails or dies."""
    monkeypatch.setattr(engine, "LocalStorage", lambda **settings: FaultStorage(LocalStorage(), **fault))


@pytest.mark.parametrize("step", range(STEPS - 1))
def test_a_signal_in_any_step_saves_that_step(straight: Path, tmp_path: Path, step: int) -> None:
    number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[step % 3]
    sections = {"checkpoint": {"async_save": step % 2 == 0}}
    reached = tiny.trainer(tmp_path, STEPS, callbacks=(tiny.SignalAt(step, number),), **sections).train()
    # Sent while step number `step + 1` runs: that step is finished, saved, and the last.
    assert (reached.global_step, reached.stop_signal) == (step + 1, number)
    assert tiny.newest(tmp_path / "checkpoint").iteration == step + 1
    finish_and_compare(tmp_path, straight)


@pytest.mark.parametrize("background", [False, True])
def test_killed_at_any_operation_of_any_save(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    counting = FaultStorage(LocalStorage())
    monkeypatch.setattr(engine, "LocalStorage", lambda **settings: counting)
    tiny.trainer(tmp_path / "counted", STEPS).train()
    total, rng = len(counting.log), random.Random(5 + background)
    kills = 0
    for number, at in enumerate(sorted(rng.sample(range(1, total + 1), 14))):
        output = tmp_path / str(number)
        action = ("kill-before", "kill-after")[number % 2]
        dying(monkeypatch, at=at, action=action)
        more = {"checkpoint": {"async_save": background}}
        status = tiny.in_child(lambda output=output, more=more: tiny.trainer(output, STEPS, **more).train())
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        monkeypatch.setattr(engine, "LocalStorage", LocalStorage)
        finish_and_compare(output, straight)
    assert kills >= 10


def test_a_chain_of_stops_and_kills(straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, statuses = random.Random(11), []
    for _ in range(8):
        if rng.random() < 0.5:
            dying(monkeypatch, at=rng.randint(1, 40), action="kill-after")
        else:
            monkeypatch.setattr(engine, "LocalStorage", LocalStorage)
        at = rng.randint(0, STEPS - 2)
        callbacks = (tiny.SignalAt(at, rng.choice([signal.SIGKILL, signal.SIGTERM])),)
        more = {"checkpoint": {"async_save": rng.random() < 0.5, "save_interleaved_steps": rng.randint(1, 5)}}
        run = tiny.trainer(tmp_path, STEPS, callbacks=callbacks, **more)
        statuses.append(tiny.in_child(lambda run=run: (run.train(), None)[1]))
    assert set(statuses) <= {0, -signal.SIGKILL}
    assert -signal.SIGKILL in statuses
    monkeypatch.setattr(engine, "LocalStorage", LocalStorage)
    finish_and_compare(tmp_path, straight)


@pytest.mark.parametrize("where", ["loss", "save"])
def test_a_signal_in_the_middle_of_a_step_ends_with_that_step(straight: Path, tmp_path: Path, where: str) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        # The third step's second micro-batch.
        calls.append(1)
        if where == "loss" and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return tiny.loss_of(model, batch)

    class InSave(tiny.Callback):
        def on_save(self, trainer: Any, state: Any) -> None:
            if where == "save" and state.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    calls: list[int] = []
    reached = tiny.trainer(tmp_path, STEPS, loss=loss, callbacks=(InSave(),)).train()
    assert reached.stop_signal == signal.SIGTERM
    assert reached.global_step == (3 if where == "loss" else 6)
    finish_and_compare(tmp_path, straight)


def test_killed_between_shards_and_commit_the_step_is_saved_anew(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def metadata_of_ten(name: str, path: str) -> bool:
        return name == "write" and "00000010" in path and path.endswith("common.json")

    dying(monkeypatch, at=1, action="kill-before", only=metadata_of_ten)
    assert tiny.in_child(lambda: (tiny.trainer(tmp_path, STEPS).train(), None)[1]) == -signal.SIGKILL
    names = os.listdir(tmp_path / "checkpoint")
    assert any(n.startswith(".iteration_00000010.partial-") for n in names)
    assert tiny.numbers(tmp_path / "checkpoint") == [5]
    # What looks like an iteration but was never committed is left alone and never read.
    monkeypatch.setattr(engine, "LocalStorage", LocalStorage)
    finish_and_compare(tmp_path, straight)
    assert tiny.numbers(tmp_path / "checkpoint") == [5, 10, 12]


def test_a_tracker_that_cannot_be_written_fails_the_save_and_the_step_stays(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tracker_of_ten(name: str, path: str) -> bool:
        return name == "rename" and path.endswith("latest_checkpointed_iteration.txt")

    dying(monkeypatch, at=2, action="raise", only=tracker_of_ten)
    with pytest.raises(SaveError, match="tracker"):
        tiny.trainer(tmp_path, STEPS).train()
    root = Root(str(tmp_path / "checkpoint"))
    assert root.tracker().iteration == 5
    monkeypatch.setattr(engine, "LocalStorage", LocalStorage)
    finish_and_compare(tmp_path, straight)
    sequences = [i.commit.sequence for i in root.iterations()]
    assert sorted(set(sequences)) == sorted(sequences)


def test_with_warn_a_failed_tracker_never_gives_two_saves_one_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(
        monkeypatch, at=2, action="raise", only=lambda name, path: name == "rename" and path.endswith("iteration.txt")
    )
    tiny.trainer(
        tmp_path, STEPS, checkpoint={"on_save_error": "warn", "save_interleaved_steps": 2, "save_max": 9}
    ).train()
    sequences = [i.commit.sequence for i in Root(str(tmp_path / "checkpoint")).iterations()]
    assert len(set(sequences)) == len(sequences)
    assert Root(str(tmp_path / "checkpoint")).tracker().iteration == STEPS


def test_an_iteration_directory_without_a_commit_is_never_loaded_nor_in_the_way(straight: Path, tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    half = tmp_path / "checkpoint" / "iteration_00000010"
    half.mkdir()
    (half / "checkpoint-model-0000000-0000001.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("10")
    tiny.trainer(tmp_path, 8).train()
    assert tiny.trace(tmp_path) == tiny.trace(straight)[:8]
