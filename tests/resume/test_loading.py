"""Loading: what a path may be, what is found there, and what does not fit and is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from perdure import CheckpointConfig, Checkpointer
from perdure.errors import CheckpointNotFoundError, MismatchError, UsageError


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def opened(path: Path, model: nn.Module, optimizer: Any = None, **keys: Any) -> Checkpointer:
    return Checkpointer(CheckpointConfig(save_path=str(path), **keys), model=model, optimizer=optimizer)


def saved(path: Path, model: nn.Module, optimizer: Any = None, step: int = 1, **keys: Any) -> None:
    """Saves a model after one optimizer step."""
    if optimizer is not None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    with opened(path, model, optimizer, auto_resume=True, **keys) as checkpointer:
        checkpointer.load()
        tiny.save_once(checkpointer, step)


def loaded(path: Path, model: nn.Module, optimizer: Any = None, **keys: Any) -> Checkpointer:
    settings = {"load_path": str(path), "enable_save": False, **keys}
    with Checkpointer(CheckpointConfig(**settings), model=model, optimizer=optimizer) as checkpointer:
        checkpointer.load()
    return checkpointer


# ---- what a path may be


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, ["does not exist", "expected a save root"]),
        (lambda p: p.write_text("x"), ["is a file", "expected a save root"]),
        (lambda p: p.mkdir(), ["is empty", "expected a save root"]),
        (lambda p: (p.mkdir(), (p / "notes.txt").write_text("x")), ["holds no checkpoint", "expected a save root"]),
        (lambda p: (p / "iteration_00000003").mkdir(parents=True), ["no committed iteration", "iteration_00000003"]),
    ],
)
def test_a_path_that_holds_nothing_is_an_error_that_says_what_was_expected(
    tmp_path: Path, make: Callable[[Path], Any], words: list[str]
) -> None:
    make(tmp_path / "there")
    with pytest.raises(CheckpointNotFoundError) as caught:
        tiny.trainer(tmp_path / "run", checkpoint={"auto_resume": False, "load_path": str(tmp_path / "there")}).train()
    assert str(tmp_path / "there") in caught.value.message
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.exit_code == 10
    assert caught.value.hint
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_iteration_itself_may_be_named_and_the_argument_wins(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 10).train()
    five = tmp_path / "a" / "checkpoint" / "iteration_00000005"
    wrong = {"auto_resume": False, "load_path": str(tmp_path / "wrong")}
    run = tiny.trainer(tmp_path / "b", 10, checkpoint=wrong)
    run.train(checkpoint_path=str(five) + "/")
    assert [row[0] for row in tiny.trace(tmp_path / "b")] == [6, 7, 8, 9, 10]
    assert tiny.trace(tmp_path / "b") == tiny.trace(tmp_path / "a")[5:]


def test_auto_resume_serves_first_start_restart_and_fine_tuning_with_one_command(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "given", 5).train()
    command = {"load_path": str(tmp_path / "given" / "checkpoint"), "no_load_optim": True}
    tiny.trainer(tmp_path / "run", 3, checkpoint=command).train()
    tiny.trainer(tmp_path / "run", 8, checkpoint=command).train()
    assert [row[0] for row in tiny.trace(tmp_path / "run")] == list(range(1, 9))
    lineages = {tiny.newest(tmp_path / name / "checkpoint").commit.lineage for name in ("given", "run")}
    assert len(lineages) == 2
    # A path equal to the save root, or below it and not there yet, is satisfied by a fresh start.
    own = tmp_path / "new" / "checkpoint"
    tiny.trainer(tmp_path / "new", 2, checkpoint={"load_path": str(own)}).train()
    tiny.trainer(tmp_path / "new2", 2, checkpoint={"load_path": str(tmp_path / "new2" / "checkpoint" / "x")}).train()
    with pytest.raises(UsageError, match=r"(?s)iteration.*rewind"):
        tiny.trainer(tmp_path / "new", 4, checkpoint={"load_path": str(own / "iteration_00000002")}).train()


@pytest.mark.parametrize("form", ["{0}/", "{0}/x/../y", "{0}/a b", "{0}/überß 模型", "{0}/" + "long" * 50])
def test_a_path_may_have_any_form(tmp_path: Path, form: str) -> None:
    path = form.format(tmp_path / "root")
    (tmp_path / "root" / "x").mkdir(parents=True)
    for stop in (3, 6):
        tiny.trainer(tmp_path / "run", stop, checkpoint={"save_path": path, "load_path": path}).train()
    assert tiny.numbers(Path(path)) == [3, 5, 6]


def test_continuing_elsewhere_keeps_the_lineage_and_leaves_the_source_alone(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 5).train()
    before = tiny.tree(tmp_path / "a")
    source = {"auto_resume": False, "load_path": str(tmp_path / "a" / "checkpoint")}
    tiny.trainer(tmp_path / "b", 10, checkpoint=source).train()
    assert tiny.tree(tmp_path / "a") == before
    first, second = (tiny.newest(tmp_path / name / "checkpoint").commit for name in "ab")
    assert first.lineage == second.lineage
    assert second.parent == first.sequence < second.sequence


def test_the_tracker_decides_and_what_it_says_is_quoted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(tmp_path, 10).train()
    tracker = tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    tiny.trainer(tmp_path, 6).train()
    assert "iteration_00000010" in capfd.readouterr().err
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 7))
    tracker.write_text("tomorrow")
    tiny.trainer(tmp_path, 12).train()
    assert "tomorrow" in capfd.readouterr().err
    # The branch that was left is older by sequence, whatever its number.
    assert tiny.numbers(tmp_path / "checkpoint")[-1] == 12
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 13))


# ---- what does not fit


def deep(layers: int, prefix: str = "layer", width: int = 2) -> nn.Module:
    model = nn.Module()
    for number in range(layers):
        model.add_module(f"{prefix}{number}", nn.Linear(2, width))
    return model


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: deep(300, "block"), ["600 tensors of the model", "600 tensors of the checkpoint", "block0.bias"]),
        (lambda: deep(301), ["2 tensors of the model are not in the checkpoint", "layer300.bias"]),
        (lambda: deep(299), ["2 tensors of the checkpoint are not in the model", "layer299.weight"]),
        (lambda: deep(300, width=3), ["[2, 2] in the checkpoint", "[3, 2] in the model", "595 more"]),
    ],
)
def test_a_mismatch_is_short_complete_and_changes_nothing(
    tmp_path: Path, other: Callable[[], nn.Module], words: list[str]
) -> None:
    saved(tmp_path, deep(300))
    model = other()
    before = tiny.weights(model)
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            loaded(tmp_path, model, no_load_optim=True)
        told = str(caught.value)
        assert all(word in told for word in words), told
        assert len(told.splitlines()) < 40
        assert len(told) < 2000
        assert caught.value.hint
        assert tiny.same(tiny.weights(model), before)


def test_a_renamed_prefix_is_named_as_the_likely_cause(tmp_path: Path) -> None:
    saved(tmp_path, deep(1))
    with pytest.raises(MismatchError) as caught:
        loaded(tmp_path, deep(1, "block"), no_load_optim=True)
    assert "prefix" in str(caught.value.hint)


def test_another_optimizer_is_named_with_the_way_on(tmp_path: Path) -> None:
    model = tiny.Net()
    saved(tmp_path, model, adam(model))
    other = tiny.Net()
    before = tiny.weights(other)
    with pytest.raises(MismatchError, match=r"(?s)AdamW.*SGD.*no_load_optim"):
        loaded(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    assert tiny.same(tiny.weights(other), before)


def test_no_optimizer_on_either_side_is_an_error_before_training(tmp_path: Path) -> None:
    tiny.trainer(tmp_path / "a", 5, checkpoint={"no_save_optim": True, "auto_resume": False}).train()
    with pytest.raises(MismatchError, match=r"(?s)iteration_00000005.*no_load_optim.*no_save_optim"):
        tiny.trainer(tmp_path / "a", 8).train()
    assert [row[0] for row in tiny.trace(tmp_path / "a")] == [1, 2, 3, 4, 5]
    model = tiny.Net()
    saved(tmp_path / "b", model, adam(model))
    bare = tiny.Net()
    before = tiny.weights(bare)
    with pytest.raises(MismatchError, match=r"(?s)no optimizer.*no_load_optim"):
        loaded(tmp_path / "b", bare)
    assert tiny.same(tiny.weights(bare), before)


# ---- parameter groups


def grouped(model: tiny.Net, swapped: bool = False) -> torch.optim.Optimizer:
    one, two = list(model.first.parameters()), list(model.last.parameters())
    if swapped:
        one, two = [one[0]], [one[1], *two]
    groups = [
        {"params": one, "lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2, "amsgrad": True, "initial_lr": 0.3},
        {"params": two, "lr": torch.tensor(0.2), "betas": (0.7, 0.9), "weight_decay": 0.0, "maximize": True},
    ]
    return torch.optim.AdamW(groups, foreach=False)


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def test_settings_and_counters_of_groups_come_back_in_value_and_kind(tmp_path: Path) -> None:
    model = tiny.Net()
    optimizer = grouped(model)
    saved(tmp_path, model, optimizer)
    other = tiny.Net()
    plain = torch.optim.AdamW([{"params": other.first.parameters()}, {"params": other.last.parameters()}])
    loaded(tmp_path, other, plain)
    for mine, theirs in zip(settings(plain), settings(optimizer), strict=True):
        for key, value in theirs.items():
            assert mine[key] == value, key
            assert type(mine[key]) is type(value), key
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        state, its = optimizer.state[a], plain.state[b]
        assert list(state) == list(its)
        assert all(torch.equal(state[k], its[k]) and state[k].dtype == its[k].dtype for k in state)


def test_state_follows_the_name_when_a_parameter_moves_between_groups(tmp_path: Path) -> None:
    model = tiny.Net()
    optimizer = grouped(model)
    with torch.no_grad():
        model.first.bias.add_(1.0)
    saved(tmp_path, model, optimizer)
    other = tiny.Net()
    moved = grouped(other, swapped=True)
    checkpointer = loaded(tmp_path, other, moved)
    assert torch.equal(moved.state[other.first.bias]["exp_avg"], optimizer.state[model.first.bias]["exp_avg"])
    assert checkpointer.loaded is not None
    assert any("first.bias" in note for note in checkpointer.loaded.notes)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("stepped", [False, True])
def test_optimizers_with_little_or_no_state(tmp_path: Path, momentum: float, stepped: bool) -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    model = tiny.Net()
    optimizer = sgd(model)
    if stepped:
        saved(tmp_path, model, optimizer)
    else:
        with opened(tmp_path, model, optimizer, auto_resume=True) as checkpointer:
            checkpointer.load()
            tiny.save_once(checkpointer, 1)
    other = tiny.Net()
    its = sgd(other)
    loaded(tmp_path, other, its)
    assert len(its.state) == len(optimizer.state)
    a, b = optimizer.state_dict(), its.state_dict()
    assert a["param_groups"] == b["param_groups"]
    for number, held in a["state"].items():
        assert torch.equal(held["momentum_buffer"], b["state"][number]["momentum_buffer"])


# ---- modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("built", torch.full((2,), 7.0), persistent=False)


def test_tied_weights_are_one_and_only_persistent_buffers_are_stored(tmp_path: Path) -> None:
    model = Tied()
    with torch.no_grad():
        model.get_buffer("kept").fill_(3.0)
        model.get_buffer("built").fill_(9.0)
    saved(tmp_path, model, adam(model))
    names = tiny.state(tiny.newest(tmp_path), "model")
    assert len(names) == 2
    other = Tied()
    loaded(tmp_path, other, adam(other))
    assert other.head.weight is other.embed.weight
    assert torch.equal(other.embed.weight, model.embed.weight)
    assert other.get_buffer("kept").tolist() == [3.0, 3.0]
    assert other.get_buffer("built").tolist() == [7.0, 7.0]


def test_a_compiled_model_and_a_bare_one_share_their_checkpoints(tmp_path: Path) -> None:
    model = tiny.Net()
    saved(tmp_path / "bare", model)
    wrapped: Any = torch.compile(tiny.Net(), backend="eager")
    loaded(tmp_path / "bare", wrapped, no_load_optim=True)
    assert torch.equal(wrapped.first.weight, model.first.weight)
    saved(tmp_path / "wrapped", wrapped)
    assert not any("_orig_mod" in name for name in tiny.state(tiny.newest(tmp_path / "wrapped")))
    bare = tiny.Net()
    loaded(tmp_path / "wrapped", bare, no_load_optim=True)
    assert torch.equal(bare.first.weight, model.first.weight)


# ---- weights only


def test_masters_take_the_loaded_weights(tmp_path: Path) -> None:
    def low() -> nn.Module:
        return tiny.Net().to(torch.bfloat16)

    tiny.trainer(tmp_path / "given", 5, model=low).train()
    given = tiny.state(tiny.newest(tmp_path / "given" / "checkpoint"), "model")
    command = {"load_path": str(tmp_path / "given" / "checkpoint"), "no_load_optim": True}
    still = {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": 0.0}
    run = tiny.trainer(tmp_path / "run", 1, model=low, checkpoint=command, lr_scheduler=still)
    run.train()
    assert tiny.state(tiny.newest(tmp_path / "run" / "checkpoint"), "model") == given
    for parameter, master in run.optimizer.main_params().items():
        assert torch.equal(master, parameter.float())


def test_the_first_update_after_weights_only_starts_from_the_loaded_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    given = tiny.Net().to(torch.bfloat16)
    saved(tmp_path / "given", given)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        # Whatever the samples, every gradient is one half.
        return torch.stack([p.float().sum() for p in net.parameters()]).sum() * 0.5

    keys: dict[str, dict[str, Any]] = {
        "training": {"max_norm": float("inf")},
        "optimizer": {"type": "SGD", "weight_decay": 0.0},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "warmup_steps": 0, "total_steps": None, "learning_rate": 0.25},
        "checkpoint": {"load_path": str(tmp_path / "given"), "no_load_optim": True},
    }
    run = tiny.trainer(tmp_path / "run", 1, model=lambda: tiny.Net().to(torch.bfloat16), loss=loss, **keys)
    run.train()
    assert run.model is not None
    for name, value in given.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], (value.float() - 0.125).to(torch.bfloat16)), name
