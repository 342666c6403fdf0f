"""Out and back again: every tensor the same bit for bit, nothing half-written, nothing of a file's own run."""

from __future__ import annotations

import argparse
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.foreign.ours import SIZES, perdure, saved, trained
from tests.foreign.toy import FIXTURES, Toy, equal, load, optimizer_of, truth
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from perdure.catalog.diff import diff
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.cli.main import run
from perdure.models.decoder import Decoder

# What torch says of any save by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

YAML = """
training: {steps: 4, global_batch_size: 2}
model: {type: decoder, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, %s}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 0.001}
"""


@pytest.fixture(params=["float32", "bfloat16, tied"])
def ours(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Decoder, Any]:
    low = request.param != "float32"
    model, optimizer = trained(low, tied=low)
    return saved(tmp_path / "ours", model, optimizer), model, optimizer


def test_out_to_dcp_and_back_is_the_same_checkpoint(ours: tuple[Path, Decoder, Any], tmp_path: Path) -> None:
    iteration, _, _ = ours
    perdure("export", iteration, "--to", "torch-dcp", tmp_path / "dcp")
    perdure("import", "--from", "torch-dcp", tmp_path / "dcp", tmp_path / "back")
    report = diff(iteration, tmp_path / "back", read_data=True)
    assert report.tensors == []
    assert report.progress == {}
    assert verify(tmp_path / "back", read_data=True).ok
    assert os.listdir(tmp_path / "dcp") != []
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_dcp_load_finds_what_it_expects(tmp_path: Path) -> None:
    model, optimizer = trained()
    perdure("export", saved(tmp_path / "ours", model, optimizer), "--to", "torch-dcp", tmp_path / "dcp")
    torch.manual_seed(9)
    other = Decoder(**SIZES)
    theirs = torch.optim.AdamW(
        [
            {"params": [p for p in other.parameters() if p.dim() > 1]},
            {"params": [p for p in other.parameters() if p.dim() < 2]},
        ]
    )
    weights, states = get_state_dict(other, theirs)
    tree: dict[str, Any] = {"model": weights, "optimizer": states}
    dcp.load(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, theirs, model_state_dict=tree["model"], optim_state_dict=tree["optimizer"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(a, b)
        for key, value in optimizer.state[a].items():
            assert equal(value, theirs.state[b][key])


def test_a_dcp_that_others_wrote_resumes_here(tmp_path: Path) -> None:
    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    perdure("import", "--from", "torch-dcp", tmp_path / "dcp", tmp_path / "root", "--step", 2, "--global-batch-size", 7)
    torch.manual_seed(9)
    other = Decoder(**SIZES)
    fresh = optimizer_of(other)
    progress, _, _ = load(tmp_path / "root", other, fresh, tmp_path)
    assert (progress.global_step, progress.consumed_samples) == (2, 14)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(a, b)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert equal(optimizer.state[a][key], fresh.state[b][key])


def test_a_file_of_torch_save_is_what_the_model_loads(ours: tuple[Path, Decoder, Any], tmp_path: Path) -> None:
    iteration, model, _ = ours
    perdure("export", iteration, "--to", "torch", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    want = model.state_dict()
    assert set(found) == set(want)
    assert all(equal(found[name], want[name]) for name in want)
    assert len({t.data_ptr() for t in found.values()}) == len({t.data_ptr() for t in want.values()})
    perdure("import", "--from", "torch", tmp_path / "model.pt", tmp_path / "back")
    assert diff(iteration, tmp_path / "back", section="model", read_data=True).tensors == []


def test_a_training_dictionary_of_torch_save_comes_in_with_a_named_optimizer(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.02)
    model(torch.arange(6).reshape(1, 6)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "all.pt")
    perdure("import", "--from", "torch", tmp_path / "all.pt", tmp_path / "root")
    other = Decoder(**SIZES)
    fresh = optimizer_of(other)
    progress, _, _ = load(tmp_path / "root", other, fresh, tmp_path)
    assert progress.global_step == 1
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(optimizer.state[a]["exp_avg_sq"], fresh.state[b]["exp_avg_sq"])


def test_a_numbered_optimizer_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6).reshape(1, 6)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    perdure("import", "--from", "torch", tmp_path / "all.pt", tmp_path / "root")
    assert "numbered, not named" in capsys.readouterr().err
    (iteration,) = Root(tmp_path / "root").iterations()
    assert iteration.iteration == 0


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_hugging_face_and_back(ours: tuple[Path, Decoder, Any], size: str, tmp_path: Path) -> None:
    iteration, model, _ = ours
    words = ["export", iteration, "--to", "huggingface", tmp_path / "hf", "--max-shard-size", size]
    perdure(*words)
    names = set(os.listdir(tmp_path / "hf"))
    assert ("model.safetensors" in names) == (size == "5GB")
    found: dict[str, Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            found.update(load_file(tmp_path / "hf" / name))
    if size != "5GB":
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(found)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    want = {(n if n.startswith("lm_head") else f"model.{n}"): p for n, p in model.named_parameters()}
    assert set(found) == set(want)
    assert all(equal(found[name], want[name]) for name in want)
    perdure("import", "--from", "huggingface", tmp_path / "hf", tmp_path / "back", "--rename", "huggingface-to-decoder")
    differing = diff(iteration, tmp_path / "back", section="model", read_data=True).tensors
    assert [each.what for each in differing] in ([], ["aliases"])


def test_config_json_is_that_of_a_llama_and_the_dtype_is_as_asked(tmp_path: Path) -> None:
    model, optimizer = trained()
    iteration = saved(tmp_path / "ours", model, optimizer)
    (tmp_path / "run.yaml").write_text(YAML % "rope_theta: 500.0")
    target = tmp_path / "hf"
    perdure(
        "export", iteration, "--to", "huggingface", target, "--config", tmp_path / "run.yaml", "--dtype", "bfloat16"
    )
    config = json.loads((target / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"], config["vocab_size"]) == ("llama", "bfloat16", 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["num_hidden_layers"], config["rope_theta"]) == (2, 500.0)
    found = load_file(target / "model.safetensors")
    assert equal(found["model.embed_tokens.weight"], model.get_parameter("embed_tokens.weight").bfloat16())


def test_a_checkpoint_of_mindformers_is_exported_and_imported(tmp_path: Path) -> None:
    source = FIXTURES / "dist4_fsdp2_tp2"
    perdure("export", source, "--to", "torch", tmp_path / "model.pt")
    tensors = truth("single_bf16_adamw")
    assert all(equal(t, tensors[n]) for n, t in torch.load(tmp_path / "model.pt", weights_only=True).items())
    perdure("import", "--from", "mindformers", source, tmp_path / "root")
    model = Toy()
    optimizer = optimizer_of(model)
    progress, _, _ = load(tmp_path / "root", model, optimizer, tmp_path)
    assert (progress.global_step, progress.consumed_samples) == (6, 24)
    for name, parameter in model.named_parameters():
        assert equal(parameter, tensors[name])
        assert equal(optimizer.state[parameter]["exp_avg"], tensors[f"adam_m.{name}"])


# ---- what is refused


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PERDURE_TEST_TRAP"],)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERDURE_TEST_TRAP", str(tmp_path / "trap"))
    return tmp_path / "trap"


def test_code_in_a_pickle_is_never_run(trap: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / "evil.pt")
    assert run(["import", "--from", "torch", str(tmp_path / "evil.pt"), str(tmp_path / "root")]) == 2
    assert "without running code" in capsys.readouterr().err
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert run(["import", "--from", "torch-dcp", str(tmp_path / "dcp"), str(tmp_path / "root")]) == 2
    assert "never needs" in capsys.readouterr().err
    dcp.save({"model": {"w": torch.ones(2)}, "x": Evil()}, checkpoint_id=tmp_path / "dcp2", no_dist=True)
    assert run(["import", "--from", "torch-dcp", str(tmp_path / "dcp2"), str(tmp_path / "root")]) == 2
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["huggingface", "torch", "torch-dcp"])
def test_nothing_is_written_over_and_nothing_half_stays(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    iteration = saved(tmp_path / "ours", *trained())
    (tmp_path / "there").write_text("mine")
    (tmp_path / "empty").mkdir()
    if kind == "torch":
        assert run(["export", str(iteration), "--to", kind, str(tmp_path / "empty")]) == 2
    assert run(["export", str(iteration), "--to", kind, str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "mine"
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    before = sorted(os.listdir(tmp_path))
    assert run(["export", str(iteration), "--to", kind, str(tmp_path / "new")]) == 1
    assert sorted(os.listdir(tmp_path)) == before


def test_a_root_that_holds_a_run_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    saved(tmp_path / "ours", model, optimizer)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert run(["import", "--from", "torch", str(tmp_path / "model.pt"), str(tmp_path / "ours")]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "code"), [("torch", 10), ("torch-dcp", 10), ("huggingface", 10)])
def test_a_source_that_is_not_there(kind: str, code: int, tmp_path: Path) -> None:
    assert run(["import", "--from", kind, str(tmp_path / "none"), str(tmp_path / "root")]) == code


def test_what_another_program_made_and_what_is_no_file_of_torch_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    saved(tmp_path / "ours", model, optimizer)
    assert run(["export", str(tmp_path / "ours"), "--to", "huggingface", str(tmp_path / "hf")]) == 0
    torch.save({"weights": torch.ones(2), "args": argparse.Namespace(rate=1)}, tmp_path / "args.pt")
    (tmp_path / "empty.pt").touch()
    for kind, source, code, told in (
        ("mindformers", "hf", 10, "hf is no checkpoint of MindSpore Transformers\n\nhint: say what it is: --from hugg"),
        ("huggingface", "ours", 10, "ours is no checkpoint of Hugging Face\n\nhint: name the directory"),
        ("torch", "args.pt", 2, "args.pt holds an object of argparse.Namespace, which cannot be read without running"),
        ("torch", "empty.pt", 2, "empty.pt is damaged, or no file that torch.save wrote\n"),
    ):
        capsys.readouterr()
        assert run(["import", "--from", kind, str(tmp_path / source), str(tmp_path / "root")]) == code
        assert told in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_a_lost_data_file_of_a_dcp_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    assert run(["import", "--from", "torch-dcp", str(tmp_path / "dcp"), str(tmp_path / "root")]) == 1
    assert "__0_0.distcp: missing" in capsys.readouterr().err
    assert Root(tmp_path / "root").iterations() == []


def test_an_adapter_alone_is_no_model_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.checkpoints import build_checkpoint, floats

    import perdure.convert.state as conversion

    root = Root(tmp_path / "root")
    os.mkdir(root.path)
    build_checkpoint(root, 3, state={"model": {"layers.0.lora_a": floats(1.0)}})
    opened = conversion.open_iteration

    def adapter(*given: Any, **named: Any) -> Any:
        state = opened(*given, **named)
        state.training["base"] = {"path": "elsewhere", "tensors": 7}
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "open_iteration", adapter)
        for kind in ("huggingface", "mindformers"):
            assert run(["export", root.path, "--to", kind, str(tmp_path / "out")]) == 1
            assert "without the weights below it, which are in elsewhere" in capsys.readouterr().err
            assert not (tmp_path / "out").exists()
        assert run(["export", root.path, "--to", "torch", str(tmp_path / "out")]) == 0
        assert "without the weights below it" in capsys.readouterr().err


def test_what_lies_beside_the_model_is_told_and_its_step_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = torch.nn.Linear(2, 2)
    whole = {"state_dict": module.state_dict(), "optimizer_states": [{}], "lr_schedulers": [], "iter_num": 7}
    torch.save(whole, tmp_path / "last.ckpt")
    perdure("import", "--from", "torch", tmp_path / "last.ckpt", tmp_path / "root")
    assert "2 entries beside the model were left out: optimizer_states, lr_schedulers" in capsys.readouterr().err
    assert Root(tmp_path / "root").iterations()[0].iteration == 7


def test_a_target_that_cannot_be_written_is_told_by_the_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", *trained())
    assert run(["export", str(tmp_path / "run"), "--to", "torch", "/proc/weights.pt"]) == 1
    told = capsys.readouterr().err
    assert "No such file or directory" in told
    assert "unexpected" not in told
