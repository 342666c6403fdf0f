"""Saving: what is on disk is what was meant, failures are told, and nothing older is lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from perdure import Callback, CheckpointConfig, Checkpointer, Progress
from perdure.catalog.events import read_events
from perdure.catalog.root import Iteration, Root
from perdure.engine import checkpointer as engine
from perdure.errors import PerdureError, SaveError, TrainingError, UnsupportedStateError, UsageError
from perdure.format.digest import digest_bytes
from perdure.storage.base import FileWriter
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage


class SlowStorage(LocalStorage):
    """Takes its time to make shard files."""

    def create(self, path: str, size: int) -> FileWriter:
        time.sleep(0.15)
        return super().create(path, size)


def open_root(path: Path, model: nn.Module, optimizer: Any = None, storage: Any = None, **keys: Any) -> Checkpointer:
    settings = {"save_path": str(path), "save_interleaved_steps": 1, "auto_resume": True, **keys}
    return Checkpointer(CheckpointConfig(**settings), model=model, optimizer=optimizer, storage=storage)


def stepped(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = tiny.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def use(monkeypatch: pytest.MonkeyPatch, storage: Any) -> None:
    monkeypatch.setattr(engine, "LocalStorage", lambda **settings: storage)


# ---- the moment of the snapshot


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, background: bool) -> None:
    model, optimizer = stepped()
    before, moments = tiny.weights(model), [s["exp_avg"].clone() for s in optimizer.state.values()]
    with open_root(tmp_path, model, optimizer, SlowStorage(), async_save=background) as checkpointer:
        checkpointer.load()
        checkpointer.save(Progress(1, 4, 4))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
    other, its_optimizer = stepped(1)
    with open_root(tmp_path, other, its_optimizer) as checkpointer:
        assert checkpointer.load().global_step == 1
    assert tiny.same(tiny.weights(other), before)
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(its_optimizer.state.values(), moments, strict=True))


def test_every_directory_says_one_step_while_training_runs_ahead_of_a_slow_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SlowStorage())
    tiny.trainer(tmp_path, 9, checkpoint={"async_save": True, "save_interleaved_steps": 3, "save_max": 9}).train()
    root = Root(str(tmp_path / "checkpoint"))
    assert [i.iteration for i in root.iterations()] == [3, 6, 9]
    for iteration in root.iterations():
        assert iteration.commit.iteration == tiny.common(iteration).global_step == iteration.iteration
        model = tiny.Net()
        optimizer = torch.optim.AdamW(model.parameters())
        settings = CheckpointConfig(load_path=iteration.path, enable_save=False)
        with Checkpointer(settings, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.load()
        assert {int(state["step"]) for state in optimizer.state.values()} == {iteration.iteration}
    # The last one was waited for.
    assert root.tracker().iteration == 9


def test_saving_with_gradients_pending_stores_all_and_touches_none(tmp_path: Path) -> None:
    model, optimizer = stepped()
    model(torch.randn(3, 4)).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with open_root(tmp_path, model, optimizer) as checkpointer:
        checkpointer.load()
        tiny.save_once(checkpointer, 1)
    assert len(gradients) == 4
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))  # type: ignore[arg-type]
    assert len(tiny.state(tiny.newest(tmp_path), "optimizer")) == 4 * 2 + 1


# ---- failures


def writes_of(step: int) -> Any:
    return lambda name, path: name in ("pwrite", "create") and f"iteration_{step:08d}" in path


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_save_ends_the_run_with_step_and_cause_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, code: int
) -> None:
    use(monkeypatch, FaultStorage(LocalStorage(), at=1, action="raise", code=code, only=writes_of(10)))
    with pytest.raises(SaveError, match=f"(?s)step 10 .*{os.strerror(code)}"):
        tiny.trainer(tmp_path, 12, checkpoint={"async_save": background}).train()
    assert tiny.numbers(tmp_path / "checkpoint") == [5]
    use(monkeypatch, LocalStorage())
    tiny.trainer(tmp_path, 12).train()
    assert tiny.numbers(tmp_path / "checkpoint") == [5, 10, 12]
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 13))


@pytest.mark.parametrize("background", [False, True])
def test_the_last_save_cannot_fail_unnoticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    use(monkeypatch, FaultStorage(LocalStorage(), at=1, action="raise", only=writes_of(10)))
    with pytest.raises(SaveError, match="step 10"):
        tiny.trainer(tmp_path, 10, checkpoint={"async_save": background}).train()


@pytest.mark.parametrize("background", [False, True])
def test_with_warn_the_run_goes_on_and_says_so_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], background: bool
) -> None:
    def early(name: str, path: str) -> bool:
        return name == "create" and any(f"iteration_{n:08d}" in path for n in (2, 4))

    use(monkeypatch, FaultStorage(LocalStorage(), at=1, action="raise", only=early, sticky=True))
    keys = {"on_save_error": "warn", "save_interleaved_steps": 2, "async_save": background}
    assert tiny.trainer(tmp_path, 8, checkpoint=keys).train().global_step == 8
    told = capfd.readouterr().err
    assert told.count("the run goes on without it") == 2
    assert tiny.numbers(tmp_path / "checkpoint") == [6, 8]
    events = read_events(Root(str(tmp_path / "checkpoint")))
    assert [e["event"] for e in events].count("save_failed") == 2


def test_a_file_size_limit_is_a_failed_save_like_any_other(tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
        tiny.trainer(tmp_path, 8, model=lambda: tiny.Net(2000)).train()

    tiny.trainer(tmp_path, 3, model=lambda: tiny.Net(2000)).train()
    assert tiny.in_child(limited) == SaveError.exit_code
    assert tiny.numbers(tmp_path / "checkpoint") == [3]
    tiny.trainer(tmp_path, 8, model=lambda: tiny.Net(2000)).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 9))


def test_too_little_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    class Full(LocalStorage):
        def free_bytes(self, path: str) -> int:
            return 1000

    model, optimizer = stepped()
    with open_root(tmp_path, model, optimizer, Full()) as checkpointer:
        checkpointer.load()
        with pytest.raises(SaveError, match=r"needs \d+ bytes .* 1000 are free"):
            checkpointer.save(Progress(1, 4, 4))
    assert not [name for name in os.listdir(tmp_path) if "iteration" in name]


def test_histories_outlast_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.trainer(tmp_path / "a", 9).train()
    write, full = os.write, [False]

    def refusing(fd: int, data: bytes) -> int:
        if full[0] and b'"samples"' in data:
            if len(data) > 40:
                return write(fd, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    class Filling(tiny.Callback):
        def on_step_begin(self, trainer: Any, state: Any) -> None:
            full[0] = 2 <= state.global_step < 7

    monkeypatch.setattr(os, "write", refusing)
    keys = {"on_save_error": "warn", "save_interleaved_steps": 1}
    tiny.trainer(tmp_path / "b", 9, callbacks=(Filling(),), checkpoint=keys).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


def test_what_cannot_be_held_is_refused_by_name(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"thing": object()}]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(UnsupportedStateError, match=r"ema.*deep.*thing"):
        tiny.trainer(tmp_path / "a", 5, extra={"ema": Odd()}).train()

    class Failing(Odd):
        def state_dict(self) -> dict[str, Any]:
            raise KeyError("gone")

    with pytest.raises(
        UnsupportedStateError, match="`ema` has no state to save: its own code failed: KeyError: 'gone'"
    ):
        tiny.trainer(tmp_path / "c", 5, extra={"ema": Failing()}).train()
    with pytest.raises(UnsupportedStateError, match="'plain' of type int"):
        tiny.trainer(tmp_path / "b", 5, extra={"plain": 3}).train()
    assert tiny.numbers(tmp_path / "a" / "checkpoint") == []


def test_objects_of_other_kinds_are_told_at_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config: Any = CheckpointConfig(save_path=str(tmp_path / "out"))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (config, {"model": {"a": model}}, "model: expected a torch.nn.Module, found dict"),
        (
            config,
            {"model": model, "optimizer": [optimizer]},
            "optimizer: expected one torch.optim.Optimizer, found list",
        ),
        (config, {"model": model, "extra": [optimizer]}, "extra: expected objects by name, found list"),
        (config, {"model": model, "extra": {1: optimizer}}, "extra: 1 cannot be a registered name"),
        ({"save_path": "out"}, {"model": model}, "config: expected a CheckpointConfig, found dict"),
    ]
    for given, objects, message in wrong:
        with pytest.raises(PerdureError, match=message):
            Checkpointer(given, **objects)
    assert not (tmp_path / "out").exists()
    with Checkpointer(config, model=model, optimizer=optimizer) as closed:
        pass
    with pytest.raises(UsageError, match="is closed"):
        closed.save(Progress(1, 4, 4))


@pytest.mark.parametrize("background", [False, True])
def test_a_commit_vouches_for_the_ledger_as_it_was(tmp_path: Path, background: bool) -> None:
    keys = {"save_interleaved_steps": 2, "save_max": 9, "async_save": background}
    for stop in (3, 8):
        tiny.trainer(tmp_path, stop, checkpoint=keys).train()
    ledger = (tmp_path / "ledger.jsonl").read_bytes()
    for iteration in Root(str(tmp_path / "checkpoint")).iterations():
        vouches(iteration, ledger)


def vouches(iteration: Iteration, ledger: bytes) -> None:
    """A commit holds the digest of the ledger's beginning, up to its own step at least."""
    commit = iteration.commit
    assert digest_bytes(ledger[: commit.ledger_bytes]) == commit.ledger_digest
    steps = [json.loads(line)["step"] for line in ledger[: commit.ledger_bytes].splitlines()]
    assert max(steps) >= iteration.iteration


def test_a_background_save_that_outlives_the_run_s_error_vouches_for_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            if state.global_step == 3:
                raise ValueError("of the user's")

    use(monkeypatch, SlowStorage())
    keys = {"save_interleaved_steps": 2, "async_save": True}
    with pytest.raises(TrainingError, match="of the user's"):
        tiny.trainer(tmp_path, 8, checkpoint=keys, callbacks=(Fails(),)).train()
    iteration = tiny.newest(tmp_path / "checkpoint")
    assert iteration.iteration == 2
    vouches(iteration, (tmp_path / "ledger.jsonl").read_bytes())


def test_a_figure_outside_of_a_run_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, 3)
    trainer.train()
    before = tiny.tree(tmp_path)
    with pytest.raises(UsageError, match="no run is under way"):
        trainer.log(more=1.0)
    assert tiny.tree(tmp_path) == before


# ---- retention


def test_the_count_is_held_at_every_save(tmp_path: Path) -> None:
    counts: list[int] = []

    class Count(tiny.Callback):
        def on_save(self, trainer: Any, state: Any) -> None:
            counts.append(len(tiny.numbers(tmp_path / "checkpoint")))

    keys = {"save_interleaved_steps": 1, "save_max": 3}
    tiny.trainer(tmp_path, 6, callbacks=(Count(),), checkpoint=keys).train()
    assert counts == [1, 2, 3, 3, 3, 3]
    # Across a restart too, and down when the number is lowered.
    tiny.trainer(tmp_path, 8, callbacks=(Count(),), checkpoint={**keys, "save_max": 1}).train()
    assert counts[6:] == [1, 1]
    assert tiny.numbers(tmp_path / "checkpoint") == [8]


def test_foreign_names_stay_and_hand_removed_ones_do_not_matter(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    tiny.trainer(tmp_path, 3, checkpoint={"save_interleaved_steps": 1, "save_max": 9}).train()
    shutil.copytree(root / "iteration_00000001", root / "iteration_00000001.bak")
    (root / "iteration_best").mkdir()
    (root / "iteration_best" / "model.bin").write_bytes(b"best")
    (root / "notes.txt").write_text("mine")
    (root / "link").symlink_to(root / "iteration_00000003")
    foreign = {name: digest for name, digest in tiny.tree(root).items() if "best" in name or ".bak" in name}
    shutil.rmtree(root / "iteration_00000002")
    tiny.trainer(tmp_path, 6, checkpoint={"save_interleaved_steps": 1, "save_max": 1}).train()
    assert tiny.numbers(root) == [6]
    after = tiny.tree(root)
    assert all(after[name] == digest for name, digest in foreign.items())
    assert (root / "notes.txt").read_text() == "mine"
    assert (root / "link").is_symlink()


def test_what_cannot_be_deleted_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def removal_of_one(name: str, path: str) -> bool:
        return name == "rename" and "iteration_00000001.removed" in path

    use(monkeypatch, FaultStorage(LocalStorage(), at=1, action="raise", code=errno.EACCES, only=removal_of_one))
    tiny.trainer(tmp_path, 3, checkpoint={"save_interleaved_steps": 1, "save_max": 1}).train()
    assert "iteration_00000001 could not be removed now" in capfd.readouterr().err
    assert tiny.numbers(tmp_path / "checkpoint") == [3]


# ---- whose root it is


def test_a_fresh_start_into_another_run_is_refused_with_the_ways_on(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    before = tiny.tree(tmp_path, but=("lock", "events.jsonl"))
    with pytest.raises(UsageError, match=r"(?s)already holds.*auto_resume.*load_path.*save_path") as caught:
        tiny.trainer(tmp_path, 8, checkpoint={"auto_resume": False}).train()
    assert caught.value.exit_code == 2
    assert tiny.tree(tmp_path, but=("lock", "events.jsonl")) == before


def test_two_runs_with_one_output_dir_are_refused_also_with_different_roots(tmp_path: Path) -> None:
    from perdure.errors import RootLockedError

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with pytest.raises(RootLockedError, match="by this process itself"):
            tiny.trainer(tmp_path, 5, checkpoint={"save_path": str(tmp_path / "other")}).train()
        return tiny.loss_of(model, batch)

    tiny.trainer(tmp_path, 1, loss=loss).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == [1]


def test_a_link_to_a_root_is_that_root(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "link").symlink_to("scratch", target_is_directory=True)
    for step in (1, 2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = CheckpointConfig(save_path=str(tmp_path / "link"), auto_resume=True)
        with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as checkpointer:
            assert checkpointer.load().global_step == step - 1
            checkpointer.save(Progress(step, 4 * step, 4))
    assert [i.iteration for i in Root(tmp_path / "scratch").iterations()] == [1, 2]


@pytest.mark.parametrize("make", ["mkdir", "symlink"])
def test_a_lock_that_is_no_plain_file_is_told(tmp_path: Path, make: str) -> None:
    if make == "mkdir":
        (tmp_path / "lock").mkdir()
    else:
        (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(UsageError, match=r"lock is no plain file \("):
        Checkpointer(CheckpointConfig(save_path=str(tmp_path)), model=nn.Linear(2, 1))


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_history_that_can_never_be_written_is_told_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=rf"output_dir: .*/{name} cannot be written: Is a directory"):
        tiny.trainer(tmp_path, 2).train()


def test_a_relative_output_dir_stays_where_it_is_whatever_a_callback_enters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enter(Callback):
        def on_train_begin(self, trainer: Any, state: Any) -> None:
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tiny.trainer(Path("out"), 3, callbacks=(Enter(),)).train()
    assert [row[0] for row in tiny.trace(tmp_path / "out")] == [1, 2, 3]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_save_root_that_is_the_output_dir_works(tmp_path: Path) -> None:
    for stop in (3, 6):
        tiny.trainer(tmp_path, stop, checkpoint={"save_path": str(tmp_path)}).train()
    assert tiny.numbers(tmp_path) == [3, 5, 6]


def test_without_saving_nothing_is_made_below_the_root_and_loading_works(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 5).train()
    before = tiny.tree(tmp_path / "a")
    keys = {"enable_save": False, "save_path": str(tmp_path / "c"), "load_path": str(tmp_path / "a" / "checkpoint")}
    reached = tiny.trainer(tmp_path / "b", 20, checkpoint={**keys, "auto_resume": False}).train()
    assert reached.global_step == 20
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "b" / "checkpoint").exists()
    assert tiny.tree(tmp_path / "a") == before
