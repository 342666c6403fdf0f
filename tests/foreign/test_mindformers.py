"""A run of MindSpore Transformers goes on here: its weights, moments, masters, step and samples, exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.foreign.toy import (
    ADAMW,
    FIXTURES,
    SHAPES,
    Toy,
    Words,
    adamw_by_hand,
    copied,
    equal,
    hazard,
    load,
    optimizer_of,
    truth,
)
from torch import Tensor

from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, MismatchError
from perdure.train.callbacks.base import Callback
from perdure.train.trainer import Trainer

ALL = ["single_bf16_adamw", "dist4_fsdp2_tp2", "dist4_fsdp2_tp2_dedup", "dist4_pp2_fsdp2", "dist8_fsdp4_tp2"]


def check_state(model: Toy, optimizer: Any, tensors: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert equal(parameter, tensors[name]), name
        state = optimizer.state[parameter]
        assert equal(state["exp_avg"], tensors[f"adam_m.{name}"]), name
        assert equal(state["exp_avg_sq"], tensors[f"adam_v.{name}"]), name
        assert equal(state["step"], torch.tensor(6.0)), name
        master = optimizer.main_param_of(parameter)
        assert (master is None) == (f"main_param.{name}" not in tensors)
        if master is not None:
            assert equal(master, tensors[f"main_param.{name}"]), name


@pytest.mark.parametrize("folder", ALL)
def test_everything_comes_back_from_any_layout(folder: str, tmp_path: Path) -> None:
    model = Toy()
    optimizer = optimizer_of(model)
    progress, loaded, said = load(FIXTURES / folder, model, optimizer, tmp_path)
    check_state(model, optimizer, truth("single_bf16_adamw"))
    assert (progress.global_step, progress.consumed_samples, progress.global_batch_size) == (6, 24, 4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.01]
    assert loaded.path.endswith("iteration_00000006")
    assert not said
    assert not any("no parameter here" in note for note in loaded.notes)


def test_one_iteration_is_taken_by_its_name(tmp_path: Path) -> None:
    model = Toy()
    progress, _, _ = load(FIXTURES / "single_bf16_adamw" / "iteration_00000004", model, optimizer_of(model), tmp_path)
    tensors = truth("single_bf16_adamw", "iteration_00000004")
    assert (progress.global_step, progress.consumed_samples) == (4, 16)
    assert all(equal(parameter, tensors[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("common", [True, False])
def test_weights_only_starts_at_step_0_with_fresh_masters(common: bool, tmp_path: Path) -> None:
    root = copied("single_bf16_weights_only", tmp_path)
    if not common:
        (root / "iteration_00000003" / "common.json").unlink()
    model = Toy()
    optimizer = optimizer_of(model)
    progress, loaded, _ = load(root, model, optimizer, tmp_path, no_load_optim=True)
    tensors = truth("single_bf16_weights_only", "iteration_00000003")
    assert loaded.weights_only
    assert (progress.global_step, progress.consumed_samples) == (0, 0)
    for name, parameter in model.named_parameters():
        assert equal(parameter, tensors[name])
        master = optimizer.main_param_of(parameter)
        assert master is None or equal(master, tensors[name].float())
        assert not optimizer.state.get(parameter)


def float32_root(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A float32 run's checkpoint: each weight is its own master. Values that bfloat16 cannot hold."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = truth("single_bf16_adamw")
    weights = {name: tensors.get(f"main_param.{name}", tensors[name]).clone() for name in SHAPES}
    assert not equal(weights["output_layer.weight"].bfloat16().float(), weights["output_layer.weight"])
    state = {name: t.clone() for name, t in tensors.items() if name.startswith("adam_")}
    state["global_step"] = torch.tensor([6], dtype=torch.int32)
    directory = tmp_path / "root" / "iteration_00000006"
    directory.mkdir(parents=True)
    safetensors.save_file(weights, directory / "toy-model-0000000-0000001.safetensors", {"format": "ms"})
    safetensors.save_file(state, directory / "toy-opt-0000000-0000001.safetensors", {"format": "ms"})
    shutil.copy(FIXTURES / "single_bf16_adamw" / "iteration_00000006" / "common.json", directory)
    (tmp_path / "root" / "latest_checkpointed_iteration.txt").write_text("6")
    return tmp_path / "root", weights


def test_float32_weights_fill_the_masters_of_a_bfloat16_run_exactly(tmp_path: Path) -> None:
    root, weights = float32_root(tmp_path)
    model = Toy()
    optimizer = optimizer_of(model)
    _, loaded, _ = load(root, model, optimizer, tmp_path)
    for name, parameter in model.named_parameters():
        master = optimizer.main_param_of(parameter)
        assert equal(parameter if master is None else master, weights[name]), name
        assert equal(parameter, weights[name].to(parameter.dtype)), name
        assert equal(optimizer.state[parameter]["step"], torch.tensor(6.0))
    assert not any("masters were not in the checkpoint" in note for note in loaded.notes)


def test_masters_fill_the_weights_of_a_float32_run_exactly(tmp_path: Path) -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load(FIXTURES / "dist4_fsdp2_tp2", model, optimizer, tmp_path)
    tensors = truth("single_bf16_adamw")
    for name, parameter in model.named_parameters():
        assert equal(parameter, tensors.get(f"main_param.{name}", tensors[name])), name


@pytest.mark.parametrize("folder", ["single_bf16_adamw", "dist4_fsdp2_tp2"])
def test_the_first_updates_are_those_of_their_adamw(folder: str, tmp_path: Path) -> None:
    model = Toy()
    optimizer = optimizer_of(model)
    load(FIXTURES / folder, model, optimizer, tmp_path)
    tensors = truth("single_bf16_adamw")
    held: dict[str, Any] = {}
    for name in SHAPES:
        weight = tensors.get(f"main_param.{name}", tensors[name])
        held[name] = [t.double().numpy() for t in (weight, tensors[f"adam_m.{name}"], tensors[f"adam_v.{name}"])]
    draws = torch.Generator().manual_seed(1)
    for step, lr in ((7, 0.01), (8, 0.007)):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
            parameter.grad = gradient
            decay = 0.1 if len(SHAPES[name]) > 1 else 0.0
            weight, m, v = held[name]
            held[name] = adamw_by_hand(weight, gradient.double().numpy(), m, v, step, lr=lr, decay=decay)
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            master = optimizer.main_param_of(parameter)
            full = parameter if master is None else master
            np.testing.assert_allclose(full.detach().double().numpy(), held[name][0], rtol=2e-6, atol=1e-8)
            if master is not None:
                assert equal(parameter, master.to(parameter.dtype))


class Seen(Callback):
    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float]] = []

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.steps.append((state.global_step, state.consumed_samples, state.learning_rate))


def train(tmp_path: Path, *, batch: int = 4, **checkpoint: Any) -> list[tuple[int, int, float]]:
    seen = Seen()
    config = {
        "training": {"steps": 9, "local_batch_size": 2, "global_batch_size": batch, "max_norm": 1.0},
        "optimizer": ADAMW,
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.003},
        "train_dataset": {"num_parallel_workers": 0},
        "checkpoint": {"save_interleaved_steps": 3, **checkpoint},
        "output_dir": str(tmp_path / "out"),
    }
    Trainer(config, model=Toy(), train_dataset=Words(), callbacks=[seen]).train()
    return seen.steps


def test_a_run_goes_on_and_then_resumes_from_its_own(tmp_path: Path) -> None:
    source = str(FIXTURES / "dist4_fsdp2_tp2")
    whole = train(tmp_path / "a", load_path=source)
    # The checkpoint's constant rate of 0.01 must not win over the configuration.
    assert whole == [(7, 28, 0.003), (8, 32, 0.003), (9, 36, 0.003)]
    again = train(tmp_path / "a", load_path=source, auto_resume=True)
    assert again == []


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    steps = train(tmp_path, batch=8, load_path=str(FIXTURES / "single_bf16_adamw"))
    assert [each[:2] for each in steps] == [(n, 8 * n) for n in range(4, 10)]


def test_their_root_can_be_the_save_root(tmp_path: Path) -> None:
    root = copied("single_bf16_adamw", tmp_path)
    steps = train(tmp_path, load_path=str(root), save_path=str(root), auto_resume=True)
    assert [each[0] for each in steps] == [7, 8, 9]
    assert (root / "iteration_00000006" / "toy-model-0000000-0000001.safetensors").exists()
    assert (root / "iteration_00000009" / "commit.json").exists()
    assert train(tmp_path, load_path=str(root), save_path=str(root), auto_resume=True) == []


# ---- which iteration, and what is refused


@pytest.mark.parametrize(
    ("name", "step", "warned"),
    [
        ("async_tracker_lags", 4, "higher number: iteration_00000006"),
        ("async_single_save_no_tracker", 2, "no tracker"),
        ("async_savemax1_dangling_tracker", 6, "the tracker says '4', which is not there"),
        ("async_write_failed_but_tracked", 3, "the tracker says '2', which is not complete"),
        ("tracker_went_backwards", 5, "higher number: iteration_00000006"),
    ],
)
def test_the_tracker_decides_where_it_names_a_complete_one(name: str, step: int, warned: str, tmp_path: Path) -> None:
    model = Toy()
    optimizer = optimizer_of(model)
    progress, loaded, said = load(hazard(name, tmp_path), model, optimizer, tmp_path)
    assert progress.global_step == step
    want = truth(f"hazards/{name}", f"iteration_{step:08d}")
    assert want
    for each, parameter in model.named_parameters():
        assert equal(parameter, want[each])
        assert equal(optimizer.state[parameter]["exp_avg_sq"], want[f"adam_v.{each}"])
        assert equal(optimizer.state[parameter]["step"], want["global_step"].float().reshape(()))
    assert loaded.path.endswith(f"iteration_{step:08d}")
    assert len(said) == 1
    assert warned in said[0]


@pytest.mark.parametrize("name", ["sync_save_failed_swallowed", "overwrite_failed_good_copy_gone"])
def test_a_root_without_a_complete_one_is_an_error_and_never_a_fresh_start(name: str, tmp_path: Path) -> None:
    model = Toy()
    with pytest.raises(CheckpointNotFoundError, match="iteration_00000004"):
        load(hazard(name, tmp_path), model, optimizer_of(model), tmp_path)


def test_an_iteration_named_by_the_path_is_never_replaced_by_another(tmp_path: Path) -> None:
    root = hazard("async_write_failed_but_tracked", tmp_path)
    model = Toy()
    with pytest.raises(DamagedCheckpointError, match="no model file"):
        load(root / "iteration_00000002", model, optimizer_of(model), tmp_path)


def test_a_lost_or_cut_file_makes_the_iteration_incomplete(tmp_path: Path) -> None:
    root = copied("single_bf16_adamw", tmp_path)
    (root / "iteration_00000006" / "toy-model-0000000-0000001.safetensors").unlink()
    file = root / "iteration_00000004" / "toy-opt-0000000-0000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    model = Toy()
    progress, _, said = load(root, model, optimizer_of(model), tmp_path)
    assert progress.global_step == 2
    assert "'6', which is not complete (no model file" in said[0]


def test_a_missing_file_that_metadata_names_is_told(tmp_path: Path) -> None:
    root = copied("dist4_fsdp2_tp2_dedup", tmp_path)
    (root / "iteration_00000006" / "toy-opt-0000002-0000004.safetensors").unlink()
    model = Toy()
    with pytest.raises(CheckpointNotFoundError, match=r"toy-opt-0000002-0000004\.safetensors: missing"):
        load(root, model, optimizer_of(model), tmp_path)


def test_no_metadata_for_files_of_several_ranks_is_told(tmp_path: Path) -> None:
    root = copied("dist4_fsdp2_tp2", tmp_path)
    (root / "iteration_00000006" / "metadata.json").unlink()
    model = Toy()
    with pytest.raises(CheckpointNotFoundError, match=r"one of 4 files, and there is no metadata\.json"):
        load(root, model, optimizer_of(model), tmp_path)


def test_no_optimizer_files_is_an_error_with_both_ways_out(tmp_path: Path) -> None:
    model = Toy()
    with pytest.raises(MismatchError, match="no optimizer state") as caught:
        load(FIXTURES / "single_bf16_weights_only", model, optimizer_of(model), tmp_path)
    assert caught.value.hint is not None
    assert "no_load_optim" in caught.value.hint
    assert "no_save_optim" in caught.value.hint


def test_no_common_json_is_an_error_on_a_full_resume(tmp_path: Path) -> None:
    root = copied("single_bf16_adamw", tmp_path)
    (root / "iteration_00000006" / "common.json").unlink()
    model = Toy()
    with pytest.raises(MismatchError, match=r"no common\.json"):
        load(root, model, optimizer_of(model), tmp_path)


@pytest.mark.parametrize(
    ("lost", "refused"),
    [
        (("global_batch_size", "consumed_samples"), True),
        (("consumed_samples",), False),
        (("global_batch_size",), False),
    ],
)
@pytest.mark.parametrize("how", ["missing", "null"])
def test_an_unknown_place_in_the_data_is_never_taken_for_the_first_sample(
    lost: tuple[str, ...], refused: bool, how: str, tmp_path: Path
) -> None:
    root = copied("single_bf16_adamw", tmp_path)
    file = root / "iteration_00000006" / "common.json"
    table = json.loads(file.read_text())
    table = {k: v for k, v in table.items() if k not in lost} | (dict.fromkeys(lost) if how == "null" else {})
    file.chmod(0o600)
    file.write_text(json.dumps(table))
    model = Toy()
    if refused:
        with pytest.raises(MismatchError, match=r"common\.json without batch size and samples") as caught:
            load(root, model, optimizer_of(model), tmp_path)
        assert "no_load_optim" in str(caught.value.hint)
        assert all(bool((p == 7).all()) for p in model.parameters())
        load(root, model, optimizer_of(model), tmp_path, no_load_optim=True)
        assert equal(model.get_parameter("output_layer.weight"), truth("single_bf16_adamw")["output_layer.weight"])
    else:
        progress, _, _ = load(root, model, optimizer_of(model), tmp_path)
        assert (progress.global_step, progress.consumed_samples) == (6, 24)


def test_a_tensor_lost_from_the_model_changes_nothing(tmp_path: Path) -> None:
    root = copied("dist4_fsdp2_tp2", tmp_path)
    file = root / "iteration_00000006" / "metadata.json"
    table = json.loads(file.read_text())
    del table["state_dict_metadata"]["output_layer.weight"]
    table["storage_data"] = {k: v for k, v in table["storage_data"].items() if not k.startswith("('output_layer.")}
    file.write_text(json.dumps(table))
    model = Toy()
    with pytest.raises(MismatchError, match=r"not in the checkpoint: output_layer\.weight"):
        load(root, model, optimizer_of(model), tmp_path)
    assert all(bool((p == 7).all()) for p in model.parameters())


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = Toy(torch.float32)
    with pytest.raises(MismatchError, match="AdamW"):
        load(FIXTURES / "single_bf16_adamw", model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)


def test_nothing_of_theirs_is_changed(tmp_path: Path) -> None:
    root = copied("single_bf16_adamw", tmp_path)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    model = Toy()
    load(root, model, optimizer_of(model), tmp_path)
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
