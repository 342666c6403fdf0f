"""Ways of sharding and of saving memory: each trains as one process does, under the names of the bare model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure import CheckpointConfig, Checkpointer, Progress

from . import forked
from .test_pipeline import CHUNKS, TENSOR, agrees, configuration, evaluations, iteration, metrics, run, squares

pytestmark = pytest.mark.timeout(400)

FULL = {"mode": "full", "full_recompute_layer": ["0-2"]}
SELECT = {"mode": "select", "select_module": {"mlp": ["0-3"], "self_attn": ["1"]}}
WAYS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "replicas": (2, {"data_parallel_replicate": 2}, {}),
    "weights kept whole": (2, {"reshard_after_forward_policy": "never"}, {}),
    "weights never kept whole": (2, {"reshard_after_forward_policy": "always"}, {}),
    "gradients and moments only": (2, {"data_parallel_shard_strategy": "optim_grads"}, {}),
    "in host memory": (2, {"cpu_offload": True}, {}),
    "averaged": (2, {"disable_gradient_division": False}, {}),
    "shards of 2 among 4": (4, {"dense_fsdp_shard_size": 2}, {}),
    "recomputed": (2, {}, FULL),
    "recomputed in chunks": (2, CHUNKS, SELECT),
    "recomputed by tensors": (2, TENSOR, FULL),
}


FIRST = {"in host memory", "shards of 2 among 4", "recomputed in chunks"}
"""Those that a plain run tries; the others are for the slow one."""


@pytest.mark.parametrize("ways", [FIRST, pytest.param(set(WAYS) - FIRST, marks=pytest.mark.slow)], ids=["", "more"])
def test_every_way_gives_the_losses_of_one_process(tmp_path: Path, ways: set[str]) -> None:
    run(tmp_path, 1, configuration(tmp_path / "one"))
    names = iteration(tmp_path / "one", 4)
    for name in ways:
        ranks, layout, recompute = WAYS[name]
        output = tmp_path / name
        run(tmp_path, ranks, configuration(output, parallelism=layout, recompute=recompute))
        agrees(output, tmp_path / "one")
        saved = iteration(output, 4)
        assert (set(saved["model"]), set(saved["optimizer"])) == (set(names["model"]), set(names["optimizer"]))


@pytest.mark.parametrize(
    "layout", [CHUNKS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in ({}, TENSOR))], ids=repr
)
def test_recomputation_changes_no_bit(tmp_path: Path, layout: dict[str, Any]) -> None:
    """With dropout, whose draws the second forward has to repeat."""
    for how, recompute in (("kept", {}), ("full", FULL), ("select", SELECT)):
        sections = {"parallelism": layout, "recompute": recompute}
        run(tmp_path, 2, configuration(tmp_path / how, 2, dropout=0.2, **sections))
    keys = ("step", "loss", "grad_norm", "samples")
    for how in ("full", "select"):
        assert metrics(tmp_path / how, *keys) == metrics(tmp_path / "kept", *keys)
        assert iteration(tmp_path / how, 2)["model"] == iteration(tmp_path / "kept", 2)["model"]


class Normed(nn.Module):
    """Counts what it sees into a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.inner(x)))
        return out


def normed_loss(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("layout", [{"data_parallel_replicate": 2}, {}], ids=["replicas", "shards"])
def test_buffers_of_ranks_are_one_and_go_through_a_resume(tmp_path: Path, layout: dict[str, Any]) -> None:
    torch.manual_seed(3)
    given: dict[str, Any] = {"model": Normed(), "train_dataset": squares(), "compute_loss_func": normed_loss}
    given["eval_dataset"] = squares(24)
    sections: dict[str, Any] = {
        "training": {"local_batch_size": 3, "eval_interleaved_steps": 1},
        "eval_dataset": {"num_parallel_workers": 0, "dataloader": {"type": "Text"}},
        "parallelism": layout,
    }
    run(tmp_path, 2, configuration(tmp_path / "straight", 6, **sections), **given)
    for steps in (2, 4, 6):
        run(tmp_path, 2, configuration(tmp_path / "stopped", steps, **sections), **given)
    straight, stopped = iteration(tmp_path / "straight", 6), iteration(tmp_path / "stopped", 6)
    assert "norm.running_var" in straight["model"]
    assert stopped["model"] == straight["model"]
    assert stopped["optimizer"] == straight["optimizer"]
    # Each rank evaluates its share with the buffers that it has.
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "straight")


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def own_loop(folder: Path, rank: int, steps: int, wrap: Any) -> list[float]:
    """A loop of one's own over a wrapped model; the losses of what was left to do."""
    model, optimizer = small()
    losses = []
    with Checkpointer(
        CheckpointConfig(save_path=str(folder), auto_resume=True), model=wrap(model), optimizer=optimizer
    ) as checkpointer:
        progress, wrapped = checkpointer.load(), wrap(model)
        rows = squares(16)
        while progress.global_step < steps:
            first = progress.consumed_samples
            halves = [[rows[(first + 2 * rank + n) % 16] for n in range(2)] for rank in range(2)]
            mine = halves[rank] if isinstance(wrapped, DistributedDataParallel) else halves[0] + halves[1]
            x, y = (torch.stack(column) for column in zip(*mine, strict=True))
            loss = nn.functional.mse_loss(wrapped(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            progress.advance(global_batch_size=4)
        checkpointer.save(progress, wait=True)
    return losses


def test_a_loop_over_replicas_by_torch_goes_on_bare_and_back(tmp_path: Path) -> None:
    """The names in the files are the bare model's, so each kind of wrapping loads what another has saved."""
    kinds: list[tuple[int, Any]] = [
        (1, lambda model: model),
        (2, DistributedDataParallel),
        (2, lambda model: DistributedDataParallel(torch.compile(model, backend="eager"))),
        (1, lambda model: torch.compile(model, backend="eager")),
        (2, DistributedDataParallel),
        (1, lambda model: model),
    ]
    for number, (ranks, wrap) in enumerate(kinds):
        steps = 2 * (number + 1)
        codes = forked.job(tmp_path / "told", ranks, lambda rank: _looped(tmp_path / "moved", rank, steps, wrap))  # noqa: B023
        assert codes == [0] * ranks, forked.told(tmp_path / "told")
    forked.job(tmp_path / "told", 1, lambda rank: _looped(tmp_path / "straight", rank, 12, lambda model: model))
    names = {f"{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")}
    assert set(metadata(tmp_path / "moved", 4)["model"]) == set(metadata(tmp_path / "moved", 8)["model"]) == names
    model, _ = small()
    other, _ = small()
    for folder, into in ((tmp_path / "moved", model), (tmp_path / "straight", other)):
        config = CheckpointConfig(load_path=str(folder), no_load_optim=True, enable_save=False)
        with Checkpointer(config, model=into) as checkpointer:
            checkpointer.load()
    for here, there in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def _looped(folder: Path, rank: int, steps: int, wrap: Any) -> None:
    assert len(own_loop(folder, rank, steps, wrap)) in (2, steps)


def metadata(root: Path, step: int) -> dict[str, Any]:
    """What metadata.json below a root says."""
    return iteration(root.parent, step, root.name)


def test_replicas_hold_the_same_after_a_load_and_count_samples_once(tmp_path: Path) -> None:
    """2 and 2 x 2 replicas: the cursor is that of one process; three ranks with an uneven end of the data too."""
    data = squares(10)
    given: dict[str, Any] = {"model": small()[0], "train_dataset": data, "compute_loss_func": normed_loss}
    run(tmp_path, 1, configuration(tmp_path / "one", 6, training={"local_batch_size": 2}), **given)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"data_parallel_replicate": 2}),
        (4, {"data_parallel_replicate": 2}),
        (3, {}),
    ]
    for ranks, layout in layouts:
        output, size = tmp_path / f"{ranks}", {"local_batch_size": 1 if ranks == 4 else 2}
        for steps in (2, 6):
            run(tmp_path, ranks, configuration(output, steps, training=size, parallelism=layout), **given)
        agrees(output, tmp_path / "one")
        keys = ("step", "consumed_samples")
        assert metrics(output, *keys) == metrics(tmp_path / "one", *keys)

    def same(rank: int) -> None:
        model, optimizer = small()
        config = CheckpointConfig(load_path=str(tmp_path / "2" / "checkpoint"), enable_save=False)
        with Checkpointer(config, model=model, optimizer=optimizer) as checkpointer:
            checkpointer.load()
        held = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
        flat = torch.cat([value.detach().reshape(-1) for value in held])
        every = [torch.zeros_like(flat) for _ in range(2)]
        torch.distributed.all_gather(every, flat)
        assert torch.equal(every[0], every[1])
        assert isinstance(checkpointer.loaded and checkpointer.loaded.progress, Progress)

    assert forked.job(tmp_path, 2, same) == [0, 0], forked.told(tmp_path)
