"""The average of weights as a callback: against float64, exact through a resume, evaluated and exported on wish."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from torch import Tensor, nn

from perdure.errors import ConfigError
from perdure.train.callbacks.ema import EMA
from perdure.train.history import read_lines

DECAY = 0.75


class Keeper(tiny.Callback):
    """All weights, in float64, from before the first step on."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def _keep(self, trainer: Any) -> None:
        held = trainer.optimizer.main_params() if hasattr(trainer.optimizer, "main_params") else {}
        self.seen.append({n: held.get(p, p).detach().double().clone() for n, p in trainer.model.named_parameters()})

    def on_train_begin(self, trainer: Any, state: Any) -> None:
        self._keep(trainer)

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self._keep(trainer)

    def average(self, every: int = 1) -> dict[str, Tensor]:
        found = self.seen[0]
        for weights in self.seen[every::every]:
            found = {name: DECAY * found[name] + (1 - DECAY) * weights[name] for name in found}
        return found


def half() -> nn.Module:
    return tiny.Net().bfloat16()


@pytest.mark.parametrize("model", [tiny.Net, half])
@pytest.mark.parametrize("every", [1, 3])
def test_it_is_the_average_of_what_the_optimizer_updates(tmp_path: Path, model: Any, every: int) -> None:
    average, keeper = EMA(DECAY, every=every), Keeper()
    tiny.trainer(tmp_path, 9, model=model, callbacks=(average, keeper)).train()
    expected = keeper.average(every)
    assert average.updates == 9 // every
    for name, value in average.weights.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(value.double(), keeper.seen[-1][name])


@pytest.mark.parametrize("model", [tiny.Net, half])
def test_it_resumes_in_every_bit(tmp_path: Path, model: Any) -> None:
    straight = EMA(DECAY)
    tiny.trainer(tmp_path / "a", 12, model=model, callbacks=(straight,)).train()
    for stop in (1, 4, 7, 12):
        parts = EMA(DECAY)
        tiny.trainer(tmp_path / "b", stop, model=model, callbacks=(parts,)).train()
    assert tiny.same(straight.weights, parts.weights)
    assert straight.updates == parts.updates == 12
    a, b = (tiny.newest(tmp_path / name / "checkpoint") for name in "ab")
    assert tiny.state(a) == tiny.state(b)


def test_added_later_it_starts_from_the_weights_that_were_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.trainer(tmp_path, 5).train()
    average, keeper = EMA(DECAY), Keeper()
    tiny.trainer(tmp_path, 7, callbacks=(average, keeper)).train()
    assert "`callback.EMA` is not in the checkpoint" in capfd.readouterr().err
    for name, value in average.weights.items():
        torch.testing.assert_close(value.double(), keeper.average()[name], rtol=1e-6, atol=1e-7)


EVALUATING: dict[str, Any] = {
    "training": {"eval_interleaved_steps": 4},
    "eval_dataset": {"num_parallel_workers": 0, "dataloader": {"type": "tests.tiny:Noisy"}},
}


def test_evaluated_it_leaves_training_as_it_was(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 9, **EVALUATING).train()
    average = EMA(0.0, evaluate=True)
    tiny.trainer(tmp_path / "b", 9, callbacks=(average,), **EVALUATING).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    rows = read_lines(str(tmp_path / "b" / "metrics.jsonl"))
    own = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    # An average that forgets at once is the model itself.
    assert [(row["step"], row["ema_eval_loss"]) for row in rows if "ema_eval_loss" in row] == own
    assert [step for step, _ in own] == [4, 8]


def test_stopped_where_it_is_evaluated_it_is_once_the_step_is_saved(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = tiny.SignalAt(3, signal.SIGTERM)
    tiny.trainer(tmp_path, 9, callbacks=(EMA(DECAY, evaluate=True), stop), **EVALUATING).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, 9, callbacks=(EMA(0.5, evaluate=True),), **EVALUATING).train()
    assert f"EMA decay: {DECAY:g} -> 0.5" in capfd.readouterr().err
    rows = read_lines(str(tmp_path / "metrics.jsonl"))
    for figure in ("eval_loss", "ema_eval_loss"):
        assert [row["step"] for row in rows if figure in row] == [4, 8]


def test_exported_it_is_a_model_to_start_from(tmp_path: Path) -> None:
    average = EMA(DECAY, export=str(tmp_path / "averaged"))
    (tmp_path / "averaged").mkdir()
    (tmp_path / "averaged" / "model.safetensors.partial").write_bytes(b"of a run that was killed while it wrote")
    tiny.trainer(tmp_path / "a", 6, callbacks=(average,)).train()
    assert [path.name for path in (tmp_path / "averaged").iterdir()] == ["model.safetensors"]
    assert tiny.same(load_file(tmp_path / "averaged" / "model.safetensors"), average.weights)
    given = {"load_path": str(tmp_path / "averaged"), "no_load_optim": True}
    still = {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": 0.0}
    made = tiny.trainer(tmp_path / "b", 1, checkpoint=given, lr_scheduler=still)
    made.train()
    assert made.model is not None
    assert tiny.same(tiny.weights(made.model), average.weights)


def test_the_configuration_names_it(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, 3)
    made.config = type(made.config)(
        **{**tiny.config(tmp_path, 3), "callbacks": [{"type": "EMA", "decay": 0.5, "every": 2}]}
    )
    made.train()
    assert any(
        name.startswith("extra:callback.EMA.weights.") for name in tiny.state(tiny.newest(tmp_path / "checkpoint"))
    )
    for wrong in ({"decay": 1.5}, {"deacy": 0.5}):
        made = tiny.trainer(tmp_path, 3)
        made.config = type(made.config)(**{**tiny.config(tmp_path, 3), "callbacks": [{"type": "EMA", **wrong}]})
        with pytest.raises(ConfigError, match=r"callbacks\[0\]"):
            made.train()
