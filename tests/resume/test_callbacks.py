"""What callbacks and loss functions do to a run, and may not do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn

from perdure import Callback, Trainer
from perdure.errors import UsageError

HOOKS = ("on_train_begin", "on_step_begin", "on_step_end", "on_save", "on_train_end")
STEPS = 12


def at(hook: str, work: Callable[[Any, Any], Any]) -> Callback:
    """A callback that does something in one hook."""
    return type("At", (Callback,), {hook: lambda self, trainer, state: work(trainer, state)})()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    output = tmp_path_factory.mktemp("straight")
    tiny.trainer(output, STEPS).train()
    return tiny.trace(output)


def draw(trainer: Any, state: Any) -> None:
    torch.rand(7)


def switch_off(trainer: Any, state: Any) -> None:
    trainer.model.drop.eval()


def save(trainer: Any, state: Any) -> None:
    trainer.checkpointer.save(state)


def log(trainer: Any, state: Any) -> None:
    trainer.log(mine=torch.tensor(0.5))


def evaluate(trainer: Any, state: Any) -> None:
    trainer.evaluate()


@pytest.mark.parametrize("work", [draw, switch_off, save, log, evaluate])
def test_the_run_stays_the_same_whatever_hooks_do_beside_it(
    straight: list[Any], tmp_path: Path, work: Callable[[Any, Any], Any]
) -> None:
    def trainer(steps: int) -> Trainer:
        callbacks = tuple(at(hook, work) for hook in HOOKS)
        keys = {"save_max": 20, "async_save": True}
        made = tiny.trainer(
            tmp_path, steps, callbacks=callbacks, checkpoint=keys, training={"eval_interleaved_steps": 4}
        )
        made.eval_dataset = tiny.Noisy(9)
        return made

    trainer(7).train()
    trainer(STEPS).train()
    assert tiny.trace(tmp_path) == straight


def test_a_callback_may_move_the_target(straight: list[Any], tmp_path: Path) -> None:
    def further(trainer: Any, state: Any) -> None:
        state.steps = STEPS

    def here(trainer: Any, state: Any) -> None:
        if state.global_step == 6:
            state.steps = 6

    assert tiny.trainer(tmp_path, STEPS, callbacks=(at("on_step_end", here),)).train().global_step == 6
    assert tiny.numbers(tmp_path / "checkpoint") == [5, 6]
    assert tiny.trainer(tmp_path, 8, callbacks=(at("on_step_end", further),)).train().global_step == STEPS
    assert tiny.trace(tmp_path) == straight


@pytest.mark.parametrize("name", ["step", "samples", "loss", "resumed"])
def test_a_figure_by_a_name_that_readers_go_by_is_refused(tmp_path: Path, name: str) -> None:
    callbacks = (at("on_step_end", lambda trainer, state: trainer.log(**{name: 1.0})),)
    with pytest.raises(UsageError, match=f"a figure of one's own cannot be called {name}"):
        tiny.trainer(tmp_path, 2, callbacks=callbacks).train()


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, 2)
    trainer.train()
    with pytest.raises(UsageError, match="this Trainer has trained already"):
        trainer.train()


def test_a_loss_without_a_gradient_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not depend on any parameter"):
        tiny.trainer(tmp_path, 2, loss=lambda model, batch: tiny.loss_of(model, batch).detach()).train()


def test_sparse_gradients_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gradients of the model are sparse"):
        tiny.trainer(tmp_path, 2, model=lambda: nn.Embedding(37, 1, sparse=True)).train()
