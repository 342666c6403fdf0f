"""A Checkpointer in hands that use it in unusual ways: exact, or refused in a sentence before anything is lost."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests import tiny
from torch import nn
from torch.optim import ASGD, LBFGS, AdamW, Optimizer, RMSprop

from perdure import Checkpoint, CheckpointConfig, Checkpointer, PerdureError, Progress, RandomState, Trainer, verify
from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.errors import UnsupportedStateError, UsageError
from perdure.storage.local import LocalStorage


def opened(path: Path, model: nn.Module, optimizer: Any = None, extra: Any = None, **keys: Any) -> Checkpointer:
    """A checkpointer that goes on with what is there."""
    settings: dict[str, Any] = {"save_path": str(path), "auto_resume": True, "save_interleaved_steps": 1, **keys}
    return Checkpointer(CheckpointConfig(**settings), model=model, optimizer=optimizer, extra=extra)


def trained(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        torch.manual_seed(number)
        loss: Any = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_steps(path: Path, steps: int = 2, **keys: Any) -> tuple[nn.Module, AdamW]:
    """A root with an iteration for each step."""
    model = tiny.Net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with opened(path, model, optimizer, **keys) as checkpointer:
        progress = checkpointer.load()
        for _ in range(steps):
            trained(model, optimizer)
            progress.advance(global_batch_size=2)
            checkpointer.step(progress)
    return model, optimizer


@pytest.mark.parametrize("kind", [TypeError, AttributeError, KeyError, ValueError])
def test_a_mistake_of_code_that_restores_is_never_told_as_damage(tmp_path: Path, kind: type[Exception]) -> None:
    save_steps(tmp_path)
    model = tiny.Net()
    optimizer = AdamW(model.parameters(), lr=0.1)

    class Failing(dict[Any, Any]):
        def get(self, *_: Any) -> Any:
            raise kind("a mistake of its own")

    optimizer.state = Failing()  # type: ignore[assignment]
    before = tiny.weights(model)
    with opened(tmp_path, model, optimizer, enable_save=False) as reader, pytest.raises(kind, match="of its own"):
        reader.load()
    assert tiny.same(before, tiny.weights(model))
    checkpointer = opened(tmp_path, model, optimizer)
    with pytest.raises(kind, match="of its own"):
        checkpointer.load()
    checkpointer.close()
    assert not [event for event in read_events(Root(str(tmp_path))) if event.get("event") in ("damage", "fallback")]


@pytest.mark.parametrize(
    "own",
    [
        {"best": float("inf"), "worst": -float("inf"), "range": (1, 2), "by_size": {3: "a"}, "big": 1 << 70},
        {"numpy": numpy.float32(0.1), "set": {1, 2}, "$tuple": [1], "text": "é"},
        {},
    ],
)
def test_what_a_program_keeps_beside_comes_back_in_value_and_kind(tmp_path: Path, own: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    config = CheckpointConfig(save_path=str(tmp_path), auto_resume=True)
    with Checkpointer(config, model=model, optimizer=optimizer, training=lambda: own) as checkpointer:
        checkpointer.save(Progress(1, 1, 1))
    with Checkpointer(config, model=model, optimizer=optimizer, training=lambda: own) as checkpointer:
        checkpointer.load()
        loaded = checkpointer.loaded
    assert loaded is not None
    assert {key: repr(loaded.training[key]) for key in own} == {key: repr(value) for key, value in own.items()}


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (5, "expected a dictionary by names, found int"),
        ({1: 2}, "expected a dictionary by names"),
        *[({key: {}}, f"{key!r} is what a save keeps itself") for key in ("base", "extra", "optimizer", "ranks")],
        ({"a": {"b": torch.ones(2)}}, "training: a.b: a tensor cannot be saved here"),
        ({"a": numpy.arange(3)}, "training: a: a tensor cannot be saved here"),
        ({"a": object()}, "training: a: an object of type builtins.object cannot be saved"),
    ],
)
def test_what_a_program_cannot_keep_beside_is_refused_before_anything_is_written(
    tmp_path: Path, own: Any, what: str
) -> None:
    model = nn.Linear(2, 2)
    config = CheckpointConfig(save_path=str(tmp_path), auto_resume=True)
    with (
        Checkpointer(config, model=model, training=lambda: own) as checkpointer,
        pytest.raises(PerdureError, match=re.escape(what)),
    ):
        checkpointer.save(Progress(1, 1, 1))
    assert not list(tmp_path.glob("*iteration*"))


def test_arguments_of_another_kind_are_told(tmp_path: Path) -> None:
    model, optimizer = save_steps(tmp_path)
    other: Any = 5
    for call in (Trainer, Checkpoint, verify):
        with pytest.raises(UsageError, match="expected a path, found int"):
            call(other)
        with pytest.raises(UsageError, match="without NUL characters"):
            call("a\0b")
    nope: Any = "nope"
    with pytest.raises(UsageError, match="section: expected one of model, optimizer, extra, found 'nope'"):
        Checkpoint(tmp_path).names(nope)
    with opened(tmp_path, model, optimizer) as checkpointer:
        with pytest.raises(UsageError, match="checkpoint_path: expected a path, found int"):
            checkpointer.load(other)
        for use in (checkpointer.step, checkpointer.save):
            with pytest.raises(UsageError, match="progress: expected a Progress, as load"):
                use(other)
        checkpointer.load()
    with pytest.raises(UsageError, match="is closed"):
        checkpointer.load()


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def optimizers(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [
        AdamW(parameters, lr=torch.tensor(0.1)),
        RMSprop(parameters, momentum=0.9),
        ASGD(parameters),
        LBFGS(parameters),
    ]


@pytest.mark.parametrize("number", range(4))
def test_memory_is_asked_for_where_it_belongs_whatever_the_default_device(tmp_path: Path, number: int) -> None:
    model = tiny.Net()
    optimizer = optimizers(model)[number]
    for seed in range(2):
        closed(model, optimizer, seed)
    other = tiny.Net()
    restored = optimizers(other)[number]
    # Nothing is ever computed there.
    with default_device("meta"):
        with opened(tmp_path, model, optimizer, {"random": RandomState()}) as checkpointer:
            checkpointer.save(Progress(1, 2, 2))
        with opened(tmp_path, other, restored, {"random": RandomState()}, verify_on_load="first") as checkpointer:
            checkpointer.load()
    closed(model, optimizer, 2)
    closed(other, restored, 2)
    assert tiny.same(tiny.weights(model), tiny.weights(other))


def closed(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    """A step of any optimizer."""

    def loss() -> Any:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        value: Any = model(torch.randn(2, 4)).square().mean()
        value.backward()
        return value

    optimizer.step(loss)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_was_loaded_where_nothing_is_trained_can_be_trained(tmp_path: Path, mode: Any) -> None:
    model, optimizer = save_steps(tmp_path)
    other = tiny.Net()
    restored = AdamW(other.parameters(), lr=0.1)
    with mode(), opened(tmp_path, other, restored) as checkpointer:
        checkpointer.load()
    trained(model, optimizer)
    trained(other, restored)
    assert tiny.same(tiny.weights(model), tiny.weights(other))
    with torch.inference_mode():
        frozen = tiny.Net()
        with opened(tmp_path, frozen, AdamW(frozen.parameters(), lr=0.1)) as checkpointer:
            checkpointer.load()
    assert tiny.same(tiny.weights(frozen), saved_weights(tmp_path))


def saved_weights(root: Path) -> dict[str, torch.Tensor]:
    model = tiny.Net()
    with opened(root, model, AdamW(model.parameters()), enable_save=False) as checkpointer:
        checkpointer.load()
    return tiny.weights(model)


def test_what_a_load_found_is_told_to_a_loop_of_ones_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path)
    told = capfd.readouterr().err
    assert not told
    model = tiny.Net()
    optimizer = AdamW(model.first.parameters(), lr=0.1)
    with opened(tmp_path, model, optimizer, {"ema": tiny.Recorder()}) as checkpointer:
        checkpointer.load()
    told = capfd.readouterr().err
    assert f"resumed from {tmp_path}/iteration_00000002: step 2, sample 4" in told
    assert "2 parameters are frozen; their optimizer state is kept: last.weight, last.bias" in told
    assert "`ema` is not in the checkpoint" in told
    keys = {"auto_resume": False, "load_path": str(tmp_path), "no_load_optim": True, "enable_save": False}
    with opened(tmp_path, model, optimizer, **keys) as checkpointer:
        checkpointer.load()
    assert "iteration_00000002: step 0, sample 0; weights only: step 0" in capfd.readouterr().err


def test_a_load_waits_for_the_save_under_way(tmp_path: Path) -> None:
    model, optimizer = save_steps(tmp_path)
    with opened(tmp_path, model, optimizer, async_save=True) as checkpointer:
        progress = checkpointer.load()
        trained(model, optimizer)
        progress.advance(global_batch_size=2)
        before = tiny.weights(model)
        checkpointer.save(progress)
        assert checkpointer.load() == progress
        assert tiny.same(before, tiny.weights(model))
        trained(model, optimizer)
        progress.advance()
        checkpointer.step(progress)
    assert tiny.numbers(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", [numpy.int64, torch.tensor, bool])
def test_numbers_of_any_integer_type_say_where_a_run_is(tmp_path: Path, kind: Any) -> None:
    model = tiny.Net()
    optimizer = AdamW(model.parameters())
    with opened(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(Progress(kind(1), kind(1), kind(1)))
    with opened(tmp_path, model, optimizer) as checkpointer:
        assert checkpointer.load() == Progress(1, 1, 1)
    assert verify(tmp_path, read_data=True).ok


def test_weights_without_memory_are_told_with_the_way_on(tmp_path: Path) -> None:
    save_steps(tmp_path)
    with torch.device("meta"):
        empty = tiny.Net()
    lazy = nn.Sequential(nn.LazyLinear(3))
    for model, hint in ((empty, "to_empty"), (lazy, "call the model once on an example")):
        with (
            opened(tmp_path, model, AdamW(model.parameters())) as checkpointer,
            pytest.raises(UnsupportedStateError, match=hint),
        ):
            checkpointer.load()


class Interrupting(LocalStorage):
    """Is stopped by the keyboard at its n-th new file."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def create(self, path: str, size: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().create(path, size)


@pytest.mark.parametrize("number", [1, 2])
def test_a_save_after_one_that_was_interrupted_is_made(tmp_path: Path, number: int) -> None:
    model, optimizer = save_steps(tmp_path, 1)
    config = CheckpointConfig(save_path=str(tmp_path), auto_resume=True)
    storage = Interrupting(number)
    with Checkpointer(config, model=model, optimizer=optimizer, storage=storage) as checkpointer:
        progress = checkpointer.load()
        progress.advance()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(progress, wait=True)
        assert checkpointer.save(progress, wait=True)
    assert tiny.numbers(tmp_path) == [1, 2]
    assert verify(tmp_path, read_data=True).ok


UNCLOSED = """
import errno, sys, time, torch
from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.storage.local import LocalStorage

class Slow(LocalStorage):
    def create(self, path, size):
        time.sleep(0.3)
        return super().create(path, size)

class Full(LocalStorage):
    def create(self, path, size):
        raise OSError(errno.ENOSPC, "No space left on device", path)

model = torch.nn.Linear(2, 2)
kept = []
for name, storage in (("slow", Slow()), ("full", Full())):
    config = CheckpointConfig(save_path=f"{sys.argv[1]}/{name}", async_save=True)
    kept.append(Checkpointer(config, model=model, storage=storage))
    kept[-1].save(Progress(1, 1, 1))
"""


def test_a_program_that_ends_without_closing_has_its_last_save_or_is_told(tmp_path: Path) -> None:
    words = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "src"}, timeout=100)
    assert done.returncode == 0
    assert tiny.numbers(tmp_path / "slow") == [1]
    assert verify(tmp_path / "slow", read_data=True).ok
    assert done.stderr.startswith("error: step 1 could not be saved below")
    assert "No space left" in done.stderr


def test_without_anybody_to_tell_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = save_steps(tmp_path)
    with open(os.devnull, "w", encoding="utf-8") as gone:
        pass
    for stream in (None, gone):
        monkeypatch.setattr(sys, "stderr", stream)
        with opened(tmp_path, model, optimizer) as checkpointer:
            assert checkpointer.load().global_step == 2


def test_a_class_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="extra: 'metric' is the class Linear, which has no state"):
        opened(tmp_path, tiny.Net(), extra={"metric": nn.Linear})
