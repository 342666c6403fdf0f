"""What a save keeps of the one before stands only while the layout does: each change in between is saved as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from perdure import CheckpointConfig, Checkpointer, Progress


class Run:
    """A model and its optimizer, which a test changes between saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train()

    def train(self) -> None:
        self.model(torch.randn(5, 4)).float().square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def spoil(self) -> None:
        """Training goes on."""
        for tensor in [*self.model.state_dict().values(), *(s["exp_avg"] for s in self.optimizer.state.values())]:
            tensor.add_(1)

    def follow(self) -> None:
        """Lets the optimizer have the parameters that the model has now."""
        parameters = list(self.model.parameters())
        self.optimizer.param_groups[0]["params"] = parameters
        for gone in set(self.optimizer.state).difference(parameters):
            del self.optimizer.state[gone]

    def expected(self) -> dict[str, Tensor]:
        """What the files of a save must hold, by the names that they have there."""
        parameters = list(self.model.named_parameters())
        found = {name: value.clone() for name, value in [*parameters, *self.model.named_buffers()]}
        for name, parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            found |= {
                f"{label}.{name}": state[key].clone()
                for key, label in (("exp_avg", "adam_m"), ("exp_avg_sq", "adam_v"))
                if key in state
            }
        return found


def nothing(run: Run) -> None:
    pass


def replace_a_parameter(run: Run) -> None:
    run.model[0].weight = nn.Parameter(torch.randn(6, 4))


def swap_its_memory(run: Run) -> None:
    run.model[0].weight.data = torch.randn(6, 4)


def turn_its_memory(run: Run) -> None:
    run.model[0].weight.data = torch.randn(4, 6).t()


def add_a_parameter(run: Run) -> None:
    run.model[2].register_parameter("gain", nn.Parameter(torch.randn(3)))


def remove_a_parameter(run: Run) -> None:
    run.model[2].bias = None


def change_its_shape(run: Run) -> None:
    run.model[2] = nn.Linear(6, 7)


def change_its_dtype(run: Run) -> None:
    run.model[2].to(torch.bfloat16)


def move_a_module(run: Run) -> None:
    run.model.append(nn.Linear(3, 3))
    run.model[2], run.model[3] = run.model[3], run.model[2]


def freeze_and_link(run: Run) -> None:
    run.model[0].requires_grad_(False)


def unfreeze(run: Run) -> None:
    run.model[0].requires_grad_(True)


def tie(run: Run) -> None:
    run.model.append(nn.Linear(6, 3))
    run.model[3].weight = run.model[2].weight


def drop_a_state(run: Run) -> None:
    del run.optimizer.state[run.model[0].weight]


def reset_the_optimizer(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"]), torch.ones_like(state["exp_avg_sq"])


def load_another_state(run: Run) -> None:
    other = Run()
    other.train()
    run.model.load_state_dict(other.model.state_dict())
    run.optimizer.load_state_dict(other.optimizer.state_dict())


CHANGES: list[list[Callable[[Run], None]]] = [
    [nothing, replace_a_parameter],
    [swap_its_memory, turn_its_memory, nothing],
    [add_a_parameter, remove_a_parameter],
    [change_its_shape],
    [change_its_dtype, nothing],
    [move_a_module],
    [freeze_and_link, unfreeze, nothing],
    [tie, nothing],
    [drop_a_state, reset_the_optimizer],
    [load_another_state, nothing],
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(change.__name__ for change in changes))
def test_every_change_is_saved_as_it_is(tmp_path: Path, changes: list[Callable[[Run], None]], background: bool) -> None:
    run, progress = Run(), Progress()
    config = CheckpointConfig(save_path=str(tmp_path), save_max=9, async_save=background)
    with Checkpointer(config, model=run.model, optimizer=run.optimizer) as checkpointer:
        for change in (nothing, *changes):
            change(run)
            run.follow()
            progress.advance(1)
            expected = run.expected()
            checkpointer.save(progress)
            run.spoil()
            checkpointer.wait()
            assert saved(tmp_path, progress.global_step) == {k: (v.dtype, v.tolist()) for k, v in expected.items()}


def saved(root: Path, step: int) -> dict[str, tuple[torch.dtype, Any]]:
    files = (root / f"iteration_{step:08}").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: (t.dtype, t.tolist()) for name, t in tensors.items() if not name.startswith("adam_step")}
