"""Pipelines of stages: the same losses as one process, exact through any interruption, and into any other layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perdure import Callback, Trainer
from perdure.config.load import load_config_mapping
from perdure.errors import UsageError
from perdure.train.history import read_lines, superseded

from . import forked

pytestmark = pytest.mark.timeout(400)

TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel": 2}
CHUNKS = {"pipeline_parallel": 2, "pipeline_parallel_interleave_num": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1f1b": (2, PIPELINE),
    "gpipe": (2, {**PIPELINE, "pipeline_parallel_schedule": "gpipe"}),
    "chunks": (2, CHUNKS),
    "three uneven stages": (3, {"pipeline_parallel": 3, "pipeline_parallel_layers_per_stage": ["0", "1-2", "3"]}),
    "pipeline x shard": (4, PIPELINE),
    "pipeline x shard, gathered anew": (4, {**PIPELINE, "reshard_after_forward_policy": "always"}),
    "chunks x shard, averaged": (4, {**CHUNKS, "disable_gradient_division": False}),
    "one chunk": (2, {**PIPELINE, "pipeline_parallel_schedule": "interleaved_1f1b"}),
    "pipeline x replicate": (4, {**PIPELINE, "data_parallel_replicate": 2}),
    "pipeline x tensor": (4, {**PIPELINE, **TENSOR}),
    "chunks x tensor": (4, {**CHUNKS, **TENSOR}),
}

FIRST = {"gpipe", "chunks x tensor", "chunks x shard, averaged"}
"""Those that a plain run tries; the others are for the slow one."""


def configuration(output: Path, steps: int = 4, dropout: float = 0.0, **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "training": {"steps": steps, "local_batch_size": 1, "global_batch_size": 12, "seed": 42, "max_norm": 0.7},
        "model": {
            "type": "decoder",
            "hidden_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 40,
            "dropout": dropout,
        },
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": {
            "num_parallel_workers": 0,
            "dataloader": {"type": "Text", "path": "python-docs", "seq_length": 16, "shuffle": True},
        },
        "checkpoint": {"auto_resume": True, "save_interleaved_steps": 2},
        "output_dir": str(output),
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return base


def run(folder: Path, ranks: int, configured: dict[str, Any], **given: Any) -> None:
    """Trains as configured on so many ranks."""
    codes = forked.job(folder, ranks, lambda rank: _train(configured, given))
    assert codes == [0] * ranks, forked.told(folder)


def _train(configured: dict[str, Any], given: dict[str, Any]) -> None:
    Trainer(load_config_mapping(configured), **given).train()


def metrics(output: Path, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(line[k] for k in keys) for line in superseded(read_lines(str(output / "metrics.jsonl")))]


def ids(output: Path) -> list[str]:
    return [line["ids"] for line in superseded(read_lines(str(output / "ledger.jsonl")))]


def agrees(output: Path, straight: Path) -> None:
    """The same samples, and losses and norms within what the order of sums makes."""
    assert ids(output) == ids(straight)
    assert metrics(output, "samples") == metrics(straight, "samples")
    here, there = metrics(output, "loss", "grad_norm"), metrics(straight, "loss", "grad_norm")
    assert len(here) == len(there)
    for (loss, norm), (wanted, wanted_norm) in zip(here, there, strict=True):
        assert loss == pytest.approx(wanted, abs=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


def evaluations(output: Path) -> list[float]:
    return [line["eval_loss"] for line in read_lines(str(output / "metrics.jsonl")) if "eval_loss" in line]


@pytest.mark.parametrize("names", [FIRST, pytest.param(set(LAYOUTS) - FIRST, marks=pytest.mark.slow)], ids=["", "more"])
def test_every_layout_gives_the_losses_of_one_process(tmp_path: Path, names: set[str]) -> None:
    (tmp_path / "some.txt").write_text("what is learned here is told there\n" * 12)
    sections: dict[str, Any] = {
        "training": {"eval_interleaved_steps": 2},
        "eval_dataset": {
            "num_parallel_workers": 0,
            "use_distribute_dataset": True,
            "dataloader": {"type": "Text", "path": str(tmp_path / "some.txt"), "seq_length": 16, "shuffle": True},
        },
        "checkpoint": {"enable_save": False},
    }
    run(tmp_path, 1, configuration(tmp_path / "one", **sections))
    assert len(evaluations(tmp_path / "one")) == 2
    for name in names:
        ranks, layout = LAYOUTS[name]
        run(tmp_path, ranks, configuration(tmp_path / name, parallelism=layout, **sections))
        agrees(tmp_path / name, tmp_path / "one")
        assert evaluations(tmp_path / name) == pytest.approx(evaluations(tmp_path / "one"), abs=1e-6)


def test_embeddings_tied_across_stages_get_the_gradients_of_both(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"model": {"tie_word_embeddings": True}, "checkpoint": {"enable_save": False}}
    run(tmp_path, 1, configuration(tmp_path / "one", **sections))
    for name in ("three uneven stages", "pipeline x tensor"):
        ranks, layout = LAYOUTS[name]
        run(tmp_path, ranks, configuration(tmp_path / name, parallelism=layout, **sections))
        agrees(tmp_path / name, tmp_path / "one")


@pytest.mark.parametrize("low", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "masters"])
def test_a_run_goes_through_layouts_and_back(tmp_path: Path, low: bool) -> None:
    """Each layout loads what the one before has saved; all as if there had been one process only."""
    model = {"tie_word_embeddings": True, "params_dtype": "bfloat16" if low else "float32"}
    chain: list[tuple[int, dict[str, Any]]] = [
        (2, PIPELINE),
        (1, {}),
        (2, CHUNKS),
        LAYOUTS["three uneven stages"],
        (4, {**PIPELINE, **TENSOR}),
        (1, {}),
    ]
    moved = tmp_path / "moved"
    run(tmp_path, 1, configuration(tmp_path / "one", len(chain), model=model))
    for number, (ranks, layout) in enumerate(chain):
        section = {"save_interleaved_steps": 1, "save_max": 20}
        run(tmp_path, ranks, configuration(moved, number + 1, model=model, parallelism=layout, checkpoint=section))
        assert number == 0 or "resumed from" in forked.told(tmp_path)
        assert "fresh optimizer state" not in forked.told(tmp_path)
        assert "have no parameter here" not in forked.told(tmp_path)
    if low:
        assert metrics(moved, "samples") == metrics(tmp_path / "one", "samples")
        losses = zip(metrics(moved, "loss"), metrics(tmp_path / "one", "loss"), strict=True)
        assert all(here[0] == pytest.approx(there[0], abs=2e-2) for here, there in losses)
    else:
        agrees(moved, tmp_path / "one")
    checked = subprocess.run(
        [sys.executable, "-m", "perdure", "verify", "--read-data", str(moved / "checkpoint")],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    described = [iteration(moved, number + 1) for number in range(len(chain))]
    assert [set(each["model"]) for each in described] == [set(described[1]["model"])] * len(chain)
    assert [set(each["optimizer"]) for each in described] == [set(described[1]["optimizer"])] * len(chain)
    assert described[4]["training"]["mesh"] == {"pipeline": 2, "tensor": 2}
    assert [each["training"]["ranks"] for each in described] == [2, 1, 2, 3, 4, 1]
    for each in described:
        assert sorted(map(settings, each["training"]["optimizer"]["groups"])) == sorted(
            map(settings, described[1]["training"]["optimizer"]["groups"])
        )


def iteration(output: Path, step: int, root: str = "checkpoint") -> dict[str, Any]:
    """What metadata.json says."""
    path = output / root / f"iteration_{step:08d}" / "metadata.json"
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def settings(group: dict[str, Any]) -> tuple[str, list[str]]:
    return json.dumps(group["settings"], sort_keys=True), sorted(group["params"])


class Killer(Callback):
    """Kills one rank when a step begins."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_begin(self, trainer: Any, state: Any) -> None:
        if state.global_step == self.step and trainer.ranks.rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("chunks", "pipeline x shard", "chunks x tensor")),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, name: str) -> None:
    """Dropout included: each stage's draws follow from the position of the micro-batch."""
    ranks, layout = LAYOUTS[name]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(tmp_path, ranks, configuration(straight, 6, dropout=0.2, parallelism=layout))
    configured = configuration(killed, 6, dropout=0.2, parallelism=layout)
    for victim, step in ((ranks - 1, 3), (0, 5)):
        kill = [Killer(victim, step)]
        codes = forked.job(tmp_path, ranks, lambda rank: _train(configured, {"callbacks": kill}))  # noqa: B023
        assert codes[victim] == -signal.SIGKILL
        assert 0 not in codes
    run(tmp_path, ranks, configured)
    keys = ("step", "loss", "learning_rate", "grad_norm", "samples", "consumed_samples")
    assert metrics(killed, *keys) == metrics(straight, *keys)
    assert ids(killed) == ids(straight)
    here, there = iteration(killed, 6), iteration(straight, 6)
    assert here["model"] == there["model"]
    assert here["optimizer"] == there["optimizer"]


class Tower(nn.Module):
    """Layers in a ModuleList, further arguments, a buffer: a model of one's own with a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 1)
        self.register_buffer("gain", torch.tensor(0.5))

    def pipeline_plan(self) -> tuple[list[str], list[str], list[str]]:
        return ["widen"], [f"layers.{number}" for number in range(4)], ["out"]

    def forward(self, x: Tensor, shift: Tensor, *, scale: float) -> Tensor:
        x = x if self.widen is None else self.widen(x)
        for layer in self.layers:
            x = layer(x) * scale + shift * self.gain
        return x if self.out is None else self.out(x)


def test_stages_whose_optimizers_have_stepped_differently(tmp_path: Path) -> None:
    """The first half is trained later: its state is fresh on the one rank and old on the other."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"train_dataset": squares(), "compute_loss_func": tower_loss}
    whole, half = Tower(), frozen()
    half.load_state_dict(whole.state_dict())
    sections: dict[str, Any] = {"training": {"local_batch_size": 2}}
    for name, ranks, layout in (("one", 1, {}), ("1f1b", 2, PIPELINE)):
        output = tmp_path / name
        run(tmp_path, 1, configuration(output, 2, **sections), model=half, **given)
        run(tmp_path, ranks, configuration(output, 4, parallelism=layout, **sections), model=whole, **given)
        assert "fresh optimizer state" in forked.told(tmp_path)
        run(tmp_path, ranks, configuration(output, 6, parallelism=layout, **sections), model=whole, **given)
        run(tmp_path, 1, configuration(output, 8, **sections), model=whole, **given)
        assert "fresh optimizer state" not in forked.told(tmp_path)
        agrees(output, tmp_path / "one")
        steps = [name for name in iteration(output, 4)["optimizer"] if name.startswith("adam_step")]
        assert len(steps) == 12


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        (5, 4, "9 tensors of the checkpoint are not in the model: layers.4.input_layernorm.weight"),
        (4, 5, "9 tensors of the model are not in the checkpoint: layers.4.input_layernorm.weight"),
    ],
)
def test_another_number_of_layers_is_told_as_without_a_pipeline(
    tmp_path: Path, saved: int, loaded: int, words: str
) -> None:
    run(tmp_path, 1, configuration(tmp_path / "run", 2, model={"num_hidden_layers": saved}))
    placed = {**PIPELINE, "pipeline_parallel_layers_per_stage": ["0-1", f"2-{loaded - 1}"]}
    configured = configuration(tmp_path / "run", 4, model={"num_hidden_layers": loaded}, parallelism=placed)
    codes = forked.job(tmp_path, 2, lambda rank: _train(configured, {}))
    assert 0 not in codes
    assert words in forked.told(tmp_path)


def test_batches_that_grow_and_change_between_runs(tmp_path: Path) -> None:
    """The number of micro-batches changes within a run, and with another global batch size between two."""
    torch.manual_seed(3)
    given: dict[str, Any] = {"model": Tower(), "train_dataset": squares(), "compute_loss_func": tower_loss}
    ramp: dict[str, Any] = {"local_batch_size": 2, "rampup_batch_size": [4, 4, 16], "global_batch_size": 12}
    for name, ranks, layout in (("one", 1, {}), ("chunks", 2, CHUNKS), ("1f1b", 2, PIPELINE)):
        output = tmp_path / name
        run(tmp_path, ranks, configuration(output, 4, training=ramp, parallelism=layout), **given)
        after = {"local_batch_size": 2, "global_batch_size": 8}
        run(tmp_path, ranks, configuration(output, 10, training=after, parallelism=layout), **given)
        agrees(output, tmp_path / "one")


def test_a_step_whose_gradients_are_not_finite_is_left_out_on_all_stages(tmp_path: Path) -> None:
    torch.manual_seed(3)
    data = squares()
    data[19] = (data[19][0], torch.tensor([float("nan")]))
    given: dict[str, Any] = {"model": Tower(), "train_dataset": data, "compute_loss_func": tower_loss}
    sections: dict[str, Any] = {"training": {"local_batch_size": 2, "use_skip_step_on_nan": True}}
    run(tmp_path, 1, configuration(tmp_path / "one", **sections), **given)
    for name in ("1f1b", "pipeline x shard"):
        ranks, layout = LAYOUTS[name]
        run(tmp_path, ranks, configuration(tmp_path / name, parallelism=layout, **sections), **given)
        here, there = metrics(tmp_path / name, "loss"), metrics(tmp_path / "one", "loss")
        finite = [isinstance(loss, float) and loss == loss for (loss,) in there]
        assert sum(finite) == 3
        assert [isinstance(loss, float) and loss == loss for (loss,) in here] == finite
        for (loss,), (wanted,), compared in zip(here, there, finite, strict=True):
            assert not compared or loss == pytest.approx(wanted, abs=1e-6)


def frozen() -> Tower:
    """A model whose first half is not trained."""
    model = Tower()
    for part in (model.widen, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    return model


def squares(length: int = 48) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    return [(torch.randn(4, generator=made), torch.randn(1, generator=made)) for _ in range(length)]


def tower_loss(model: Any, batch: Any) -> Tensor:
    """Noise is drawn before the model is called: the first and the last stage have to see the same."""
    x, y = batch
    noisy = x + 0.1 * torch.randn_like(x)
    return nn.functional.mse_loss(model(noisy, torch.ones(1), scale=0.9), y + noisy.sum(1, keepdim=True))


def twice(model: Any, batch: Any) -> Tensor:
    return tower_loss(model, batch) + tower_loss(model, batch)


def never(model: Any, batch: Any) -> Tensor:
    return torch.zeros((), requires_grad=True)


def test_a_model_of_ones_own_with_a_plan(tmp_path: Path) -> None:
    torch.manual_seed(3)
    given: dict[str, Any] = {"model": Tower(), "train_dataset": squares(), "compute_loss_func": tower_loss}
    sections: dict[str, Any] = {"training": {"local_batch_size": 2}}
    run(tmp_path, 1, configuration(tmp_path / "one", **sections), **given)
    for name in ("1f1b", "chunks", "pipeline x shard"):
        ranks, layout = LAYOUTS[name]
        run(tmp_path, ranks, configuration(tmp_path / name, parallelism=layout, **sections), **given)
        agrees(tmp_path / name, tmp_path / "one")
        assert set(iteration(tmp_path / name, 4)["model"]) == set(iteration(tmp_path / "one", 4)["model"])
    # Hidden states travel in the dtype that sharded stages compute in.
    low: dict[str, Any] = {**sections, "model": {"type": None, "compute_dtype": "bfloat16"}}
    run(tmp_path, 4, configuration(tmp_path / "low", parallelism=PIPELINE, **low), **given)
    for here, there in zip(metrics(tmp_path / "low", "loss"), metrics(tmp_path / "one", "loss"), strict=True):
        assert here[0] == pytest.approx(there[0], rel=2e-2)
        assert here != there


@pytest.mark.parametrize(
    ("changed", "layout", "words"),
    [
        ({"compute_loss_func": twice}, {}, "the loss function calls the model more than once"),
        ({"compute_loss_func": never}, {}, "the loss function calls the model not at all"),
        ({"model": nn.Linear(4, 1)}, {}, "parallelism.pipeline_parallel: Linear has no plan for it"),
        ({}, {"pipeline_parallel_layers_per_stage": ["0", "1-2"]}, "expected all 4 layers, found 3"),
        ({}, {"pipeline_parallel_interleave_num": 3}, "expected at least 6 layers for 6 stages, found 4"),
        ({"model": frozen()}, {}, "one has frozen parameters only"),
        ({"optimizer": torch.optim.SGD(Tower().parameters())}, {}, "describe it in the optimizer section"),
    ],
)
def test_what_a_pipeline_cannot_do_is_said_in_words(
    tmp_path: Path, changed: dict[str, Any], layout: dict[str, Any], words: str
) -> None:
    given = {"model": Tower(), "train_dataset": squares(), "compute_loss_func": tower_loss, **changed}
    configured = configuration(tmp_path / "out", parallelism={**PIPELINE, **layout})

    def work(rank: int) -> None:
        try:
            _train(configured, given)
        except UsageError as error:
            print(error.message, error.hint)
            os._exit(3)

    codes = forked.job(tmp_path, 2, work)
    assert 3 in codes
    assert 0 not in codes
    assert words in forked.told(tmp_path)
