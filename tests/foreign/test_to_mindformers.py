"""Leaving for MindSpore Transformers: their names, slices and metadata; and back again, bit for bit."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.foreign.ours import SIZES, perdure, saved, trained
from tests.foreign.toy import FIXTURES, Toy, equal, load, optimizer_of, truth
from torch import Tensor, nn

from perdure import Checkpoint
from perdure.catalog.diff import diff
from perdure.catalog.fingerprint import fingerprint
from perdure.catalog.verify import verify
from perdure.cli.main import run
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.models.decoder import Decoder


def theirs(root: Path) -> dict[str, Tensor]:
    """The whole tensors of a root of theirs, put together by their own rules and nothing of ours."""
    step = int((root / "latest_checkpointed_iteration.txt").read_text())
    iteration = root / f"iteration_{step:08d}"
    if not (iteration / "metadata.json").exists():
        found: dict[str, Tensor] = {}
        for file in iteration.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        return found
    tables = json.loads((iteration / "metadata.json").read_text())
    places = {ast.literal_eval(key): value for key, value in tables["storage_data"].items()}
    whole = {}
    for name, entry in tables["state_dict_metadata"].items():
        cut = entry["axis_fragmentations"]
        parts: dict[int, Tensor] = {}
        for chunk in entry["chunk"]:
            (number,) = chunk["global_offset"]
            with safe_open(iteration / places[name, (number,)][0]["file_name"], "pt") as opened:
                parts[number] = opened.get_tensor(name)
            assert list(parts[number].shape) == chunk["local_shape"]
        assert sorted(parts) == list(range(int(np.prod(cut)) if cut else 1))
        tensor = torch.empty(entry["global_shape"], dtype=parts[0].dtype)
        for number, part in parts.items():
            index = np.unravel_index(number, cut) if cut else ()
            tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, part.shape, strict=True))] = part
        whole[name] = tensor
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("low", [False, True])
def test_out_and_back_is_the_same_checkpoint(low: bool, ranks: int, tmp_path: Path) -> None:
    model, optimizer = trained(low, tied=low)
    source = saved(tmp_path / "ours", model, optimizer)
    perdure("export", source, "--to", "mindformers", tmp_path / "out", "--ranks", ranks)
    found = theirs(tmp_path / "out")
    queries = model.get_parameter("layers.1.self_attn.q_proj.weight")
    assert equal(found["decoder.layers.1.self_attention.linear_q.weight"], queries)
    assert equal(found["global_step"], torch.tensor([2]))
    state = optimizer.state[model.get_parameter("layers.0.mlp.down_proj.weight")]
    assert equal(found["adam_v.decoder.layers.0.mlp.linear_fc2.weight"], state["exp_avg_sq"])
    assert ("main_param.embedding.word_embeddings.weight" in found) == low
    assert verify(tmp_path / "out", read_data=True).ok
    perdure(
        "import", "--from", "mindformers", tmp_path / "out", tmp_path / "back", "--rename", "mindformers-to-decoder"
    )
    assert fingerprint(tmp_path / "back") == fingerprint(source)
    assert diff(source, tmp_path / "back").progress == {}


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_from_what_was_written_for_them(ranks: int, tmp_path: Path) -> None:
    model, optimizer = trained(low=True)
    source = saved(tmp_path / "ours", model, optimizer)
    perdure("export", source, "--to", "mindformers", tmp_path / "out", "--ranks", ranks)
    torch.manual_seed(9)
    other = Decoder(**SIZES, params_dtype="bfloat16")
    fresh = optimizer_of(other)
    progress, _, _ = load(tmp_path / "out", other, fresh, tmp_path, rename=["mindformers-to-decoder"])
    assert (progress.global_step, progress.consumed_samples) == (2, 14)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert equal(a, b)
        assert equal(optimizer.main_param_of(a), fresh.main_param_of(b))
        assert all(equal(optimizer.state[a][key], fresh.state[b][key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def test_a_fixture_comes_out_as_it_went_in(tmp_path: Path) -> None:
    perdure("import", "--from", "mindformers", FIXTURES / "dist4_fsdp2_tp2_dedup", tmp_path / "ours")
    perdure("export", tmp_path / "ours", "--to", "mindformers", tmp_path / "out", "--ranks", 4)
    want, found = truth("single_bf16_adamw"), theirs(tmp_path / "out")
    assert set(found) == set(want) - {"learning_rate"}
    assert all(equal(found[name], want[name]) for name in found)
    model = Toy()
    load(tmp_path / "out", model, optimizer_of(model), tmp_path)
    assert all(equal(p, want[name]) for name, p in model.named_parameters())


def test_the_metadata_has_the_form_of_theirs(tmp_path: Path) -> None:
    """Every key that a fixture of theirs has, with values of the same kinds; nothing besides."""
    perdure("export", FIXTURES / "single_bf16_adamw", "--to", "mindformers", tmp_path / "out", "--ranks", 4)
    iteration = "iteration_00000006"
    real = FIXTURES / "dist4_fsdp2_tp2_dedup" / iteration
    mine = tmp_path / "out" / iteration
    a, b = (json.loads((each / "metadata.json").read_text()) for each in (real, mine))
    assert shape_of(b["state_dict_metadata"]["output_layer.weight"]) == shape_of(
        a["state_dict_metadata"]["embedding.word_embeddings.weight"]
    )
    assert b["state_dict_metadata"]["global_step"] == a["state_dict_metadata"]["global_step"]
    assert {shape_of(place) for places in b["storage_data"].values() for place in places} == {
        shape_of(place) for places in a["storage_data"].values() for place in places
    }
    assert set(json.loads((mine / "common.json").read_text())) == set(json.loads((real / "common.json").read_text()))
    assert {name.split("-", 1)[1] for name in os.listdir(mine) if name.endswith("safetensors")} == {
        name.split("-", 1)[1] for name in os.listdir(real) if name.endswith("safetensors")
    }
    for file in mine.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "ms"}


def shape_of(value: Any) -> Any:
    """A JSON value with its leaves replaced by their types."""
    if isinstance(value, dict):
        return tuple(sorted((key, shape_of(inner)) for key, inner in value.items()))
    if isinstance(value, list):
        return tuple(sorted({str(shape_of(inner)) for inner in value}))
    return type(value).__name__


def test_replicas_and_slices_say_who_holds_them(tmp_path: Path) -> None:
    perdure("export", saved(tmp_path / "ours", *trained()), "--to", "mindformers", tmp_path / "out", "--ranks", 3)
    tables = json.loads((tmp_path / "out" / "iteration_00000002" / "metadata.json").read_text())
    for name, entry in tables["state_dict_metadata"].items():
        divided = any(size % 3 == 0 for size in entry["global_shape"])
        assert len(entry["chunk"]) == (3 if divided else 1), name
        for chunk in entry["chunk"]:
            (place,) = tables["storage_data"][repr((name, tuple(chunk["global_offset"])))]
            assert place["rank_group"] == (chunk["global_offset"] if divided else [0, 1, 2])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "amsgrad", "uneven", "extra"])
def test_what_they_have_no_place_for_is_left_out_in_words(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Plain()
    makers: dict[str, Any] = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(model.parameters()),
        "amsgrad": lambda: torch.optim.AdamW(model.parameters(), amsgrad=True),
    }
    optimizer = makers.get(kind, lambda: torch.optim.AdamW(model.parameters()))()
    model.linear(torch.ones(4)).sum().backward()
    optimizer.step()
    if kind == "uneven":
        optimizer.state[model.linear.bias]["step"] += 1
    extra = {"ema": Ema()} if kind == "extra" else {}
    config = CheckpointConfig(save_path=str(tmp_path / "ours"))
    with Checkpointer(config, model=model, optimizer=optimizer, extra=extra, say=lambda line: None) as keeper:
        keeper.save(Progress(global_step=1, consumed_samples=1, global_batch_size=1), wait=True)
    perdure("export", tmp_path / "ours", "--to", "mindformers", tmp_path / "out")
    said = capsys.readouterr().err
    left = {"SGD": "it is SGD", "Adam": "it is Adam", "amsgrad": "it has max_exp_avg_sq", "uneven": "different steps"}
    assert left.get(kind, "they have no place for registered objects") in said
    found = theirs(tmp_path / "out")
    assert equal(found["linear.weight"], model.linear.weight)
    assert ("global_step" in found) == (kind == "extra")


class Ema:
    def state_dict(self) -> dict[str, Any]:
        return {"weight": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_heads_are_joined_on_the_way_out_and_split_on_the_way_in(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = saved(tmp_path / "ours", model, optimizer)
    join = r"{join: ['(.*)\.self_attention\.linear_q\.weight', '(.*)\.self_attention\.linear_k\.weight', '(.*)\.self_attention\.linear_v\.weight'], into: '\1.self_attention.linear_qkv.weight', rows: [16, 8, 8]}"  # noqa: E501
    split = r"{split: '(.*)\.self_attention\.linear_qkv\.weight', into: ['\1.self_attention.linear_q.weight', '\1.self_attention.linear_k.weight', '\1.self_attention.linear_v.weight'], rows: [16, 8, 8]}"  # noqa: E501
    words = ["--rename", "decoder-to-mindformers", "--rename", join, "--ranks", 2]
    perdure("export", source, "--to", "mindformers", tmp_path / "out", *words)
    fused = theirs(tmp_path / "out")["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (model.get_parameter(f"layers.0.self_attn.{n}_proj.weight") for n in "qkv")
    # Two groups of heads: each has 16 rows of queries, 8 of keys, 8 of values.
    assert equal(fused, torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]))
    words = ["--rename", split, "--rename", "mindformers-to-decoder"]
    perdure("import", "--from", "mindformers", tmp_path / "out", tmp_path / "back", *words)
    assert fingerprint(tmp_path / "back") == fingerprint(source)


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "ours", *trained())
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").touch()
    assert run(["export", str(source), "--to", "mindformers", str(tmp_path / "there")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(["export", str(source), "--to", "torch", str(tmp_path / "x.pt"), "--ranks", "2"]) == 2
    assert "`--to mindformers` only" in capsys.readouterr().err
    assert Checkpoint(tmp_path / "ours").kind == "perdure"
