"""What callbacks and loss functions do to a run, and may not do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn

from perdure import Callback, Trainer
from perdure.errors import ConfigError, UsageError
from perdure.train.history import read_lines

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


class Counter(Callback):
    """Counts steps by so many, and keeps the count."""

    def __init__(self, by: int) -> None:
        self.by, self.count = by, 0

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.count += self.by

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_callbacks_of_one_class_keep_their_states_apart(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 3, callbacks=(Counter(1), Counter(10), Counter(100))).train()
    again = Counter(1), Counter(10), Counter(100)
    tiny.trainer(tmp_path, 4, callbacks=again).train()
    assert [counter.count for counter in again] == [4, 40, 400]


class OnlyTells(Callback):
    def state_dict(self) -> dict[str, int]:
        return {}


class Best(Callback):
    """The best evaluation, how many there were, and what each step found them to be."""

    def __init__(self) -> None:
        self.best, self.seen, self.found = float("inf"), 0, 0.0

    def on_evaluate(self, trainer: Any, state: Any) -> None:
        self.best, self.seen = min(self.best, state.eval_loss), self.seen + 1

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.found += self.seen

    def state_dict(self) -> dict[str, float]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


@pytest.mark.parametrize("stops", [(3,), (2, 3, 7), (4, 11), (8, 9)], ids=str)
def test_a_stop_where_a_step_would_be_evaluated_loses_no_evaluation(tmp_path: Path, stops: tuple[int, ...]) -> None:
    def evaluated(output: Path, best: Best, *others: Callback) -> Trainer:
        made = tiny.trainer(output, STEPS, callbacks=(best, *others), training={"eval_interleaved_steps": 4})
        made.eval_dataset = tiny.Noisy(9)
        return made

    straight, resumed = Best(), Best()
    evaluated(tmp_path / "a", straight).train()
    for step in stops:
        evaluated(tmp_path / "b", Best(), tiny.SignalAt(step, signal.SIGTERM)).train()
    evaluated(tmp_path / "b", resumed).train()
    if stops[-1] < STEPS - 1:
        assert vars(resumed) == vars(straight)
    rows = [read_lines(str(tmp_path / name / "metrics.jsonl")) for name in "ab"]
    one, other = ([(row["step"], row["eval_loss"]) for row in each if "eval_loss" in row] for each in rows)
    assert one == other
    assert [step for step, _ in one] == [4, 8, 12]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"callbacks": (OnlyTells(),)}, r"callback OnlyTells has state_dict\(\) but no load_state_dict\(\)"),
        ({"callbacks": (Counter,)}, r"callbacks\[0\]: expected an object .* found the class Counter"),
        ({"callbacks": (object(),)}, r"callbacks\[0\]: expected an object .* found a object"),
        ({"callbacks": (Counter(1),), "extra": {"callback.Counter": Counter(1)}}, "'callback.Counter' is what the run"),
        ({"given_optimizer": lambda model: torch.optim.SGD}, "optimizer: expected an optimizer .* found the class SGD"),
        (
            {"given_optimizer": lambda model: torch.optim.LBFGS(model.parameters())},
            "LBFGS evaluates the loss several times",
        ),
    ],
    ids=["half", "class", "object", "taken", "optimizer", "closure"],
)
def test_what_cannot_serve_is_refused_before_anything_is_trained(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        tiny.trainer(tmp_path, 2, **given).train()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_class_for_a_model_and_an_optimizer_that_wants_a_closure_are_refused(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, 2) | {"optimizer": {"type": "LBFGS"}}
    with pytest.raises(UsageError, match=r"model: expected an nn\.Module, found the class Net"):
        Trainer(config, model=tiny.Net)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"optimizer\.type: LBFGS evaluates the loss several times"):
        Trainer(config, model=tiny.Net(), train_dataset=tiny.Noisy(), compute_loss_func=tiny.loss_of).train()


def test_a_run_within_autocast_is_refused_and_a_loss_within_it_is_not(tmp_path: Path) -> None:
    def cast(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tiny.loss_of(model, batch)

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match=r"within torch\.autocast"):
        tiny.trainer(tmp_path / "refused", 2).train()
    tiny.trainer(tmp_path / "straight", 5, loss=cast).train()
    for steps in (2, 5):
        tiny.trainer(tmp_path / "resumed", steps, loss=cast).train()
    assert tiny.trace(tmp_path / "straight") == tiny.trace(tmp_path / "resumed")


def test_losses_weighted_by_fractions_do_not_depend_on_accumulation(tmp_path: Path) -> None:
    def weighted(model: nn.Module, batch: Any) -> Any:
        weights = 0.125 + 0.25 * (batch[0] % 2)
        return ((model(batch[1]) - batch[2]).square().squeeze(1) * weights).sum(), weights.sum()

    losses = []
    for size in (2, 4):
        # Without dropout, whose draws depend on the micro-batch.
        tiny.trainer(
            tmp_path / str(size), 3, model=lambda: nn.Linear(4, 1), loss=weighted, training={"local_batch_size": size}
        ).train()
        losses.append([row[1] for row in tiny.trace(tmp_path / str(size))])
    assert losses[0] == pytest.approx(losses[1])
    with pytest.raises(UsageError, match="counted -8 tokens"):
        tiny.trainer(tmp_path / "less", 3, loss=lambda model, batch: (tiny.loss_of(model, batch), -4)).train()


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
