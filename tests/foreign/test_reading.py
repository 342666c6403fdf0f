"""ls, inspect, verify, diff and `Checkpoint` on what other programs made: as well explained as our own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.foreign.toy import FIXTURES, SHAPES, copied, hazard

from perdure import Checkpoint, verify
from perdure.catalog.diff import diff
from perdure.catalog.fingerprint import fingerprint
from perdure.cli.main import run

EVERY = sorted(p.name.removesuffix(".expected.json") for p in FIXTURES.glob("*.expected.json"))
WHOLE = FIXTURES / "single_bf16_adamw"


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """A command's JSON; it must end well."""
    assert run([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A directory in Hugging Face's layout."""
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(4)}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    return tmp_path / "hf"


@pytest.mark.parametrize("folder", EVERY)
def test_a_handle_tells_what_the_fixture_says(folder: str) -> None:
    truth = json.loads((FIXTURES / f"{folder}.expected.json").read_text())
    for each in sorted((FIXTURES / folder).glob("iteration_*")):
        want = truth["iterations"][each.name] if "iterations" in truth else truth
        found = Checkpoint(each)
        assert (found.kind, found.commit, found.writer) == ("mindformers", None, "MindSpore Transformers")
        assert found.common is not None
        assert (found.iteration, found.common.consumed_samples) == (
            want["common"]["global_step"],
            want["common"]["consumed_samples"],
        )
        assert found.ranks == (int(folder[4]) if folder.startswith("dist") else 1)
        assert found.size == sum(p.stat().st_size for p in each.glob("*.safetensors"))
        for name, tensor in want["tensors"].items():
            section: Any = {"model": "model", "opt": "optimizer"}[tensor["side"]]
            record = found.tensor_record("adam_step" if name == "global_step" else name, section)
            assert (record.dtype, list(record.shape)) == (tensor["dtype"], tensor["shape"])
        assert found.verify(read_data=True).ok


def test_a_handle_of_a_root_takes_what_a_resume_would(tmp_path: Path) -> None:
    found = Checkpoint(hazard("async_tracker_lags", tmp_path))
    assert found.iteration == 4
    assert "higher number: iteration_00000006" in found.warnings[0]


def test_ls_lists_them_and_marks_the_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "ls", WHOLE)
    assert (found["kind"], found["tracker"]["iteration"]) == ("mindformers", 6)
    rows = [(i["iteration"], i["consumed_samples"], i["optimizer"], i["tracker"]) for i in found["iterations"]]
    assert rows == [(2, 8, True, False), (4, 16, True, False), (6, 24, True, True)]
    assert run(["ls", str(WHOLE)]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()][-1] == ["*", "iteration_00000006"]
    assert "made by MindSpore Transformers" in err


@pytest.mark.parametrize(
    ("name", "listed", "left_out", "said"),
    [
        ("async_tracker_lags", [2, 4, 6], [], ""),
        ("async_single_save_no_tracker", [2], [], "there is no tracker"),
        ("async_savemax1_dangling_tracker", [6], [], "'4', which is not a complete iteration"),
        ("async_write_failed_but_tracked", [3], ["iteration_00000002"], "'2', which is not a complete iteration"),
        ("tracker_went_backwards", [4, 5, 6], [], ""),
    ],
)
def test_hazards_are_listed_as_they_are(
    name: str, listed: list[int], left_out: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = hazard(name, tmp_path)
    found = told(capsys, "ls", root)
    assert [i["iteration"] for i in found["iterations"]] == listed
    assert [u["name"] for u in found["uncommitted"]] == left_out
    run(["ls", str(root)])
    if listed != [6]:
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sync_save_failed_swallowed", "overwrite_failed_good_copy_gone"])
@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_empty_iterations_are_told_and_are_no_checkpoint(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, str(hazard(name, tmp_path))]) in (1, 10)
    out, err = capsys.readouterr()
    assert "iteration_00000004" in out + err


def test_inspect_shows_maker_progress_and_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(FIXTURES / "dist4_fsdp2_tp2")]) == 0
    out = capsys.readouterr().out
    for text in (
        "made by     MindSpore Transformers on 4 ranks",
        "24, 4 per step",
        "adam_m.output_layer.weight",
        "F32",
    ):
        assert text in out
    found = told(capsys, "inspect", FIXTURES / "dist4_fsdp2_tp2")
    assert (found["commit"], found["common"]["global_step"], found["ranks"]) == (None, 6, 4)
    assert {name: tuple(t["shape"]) for name, t in found["model"].items()} == SHAPES


def test_a_directory_of_weights_is_listed_inspected_and_verified(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = told(capsys, "ls", weights)["iterations"]
    assert (row["iteration"], row["tensors"], row["optimizer"]) == (None, 2, False)
    found = told(capsys, "inspect", weights)
    assert (found["kind"], found["iteration"], set(found["model"])) == ("huggingface", None, {"a", "b"})
    assert run(["inspect", str(weights)]) == 0
    assert "made by  Hugging Face" in capsys.readouterr().out
    report = verify(weights, read_data=True)
    assert (report.ok, report.bytes_read) == (True, 40)
    assert any("no digests" in note for note in report.notes)


# ---- verify


def test_a_lost_cut_or_unreadable_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = copied("dist4_fsdp2_tp2_dedup", tmp_path)
    file = root / "iteration_00000006" / "toy-opt-0000002-0000004.safetensors"
    data = file.read_bytes()
    for spoilt in (data[:-1], b"", None):
        file.unlink()
        if spoilt is not None:
            file.write_bytes(spoilt)
        assert run(["verify", str(root)]) == 1
        assert "toy-opt-0000002-0000004.safetensors" in capsys.readouterr().out
    assert not verify(root).ok


def test_copies_of_a_piece_that_differ_are_found(tmp_path: Path) -> None:
    root = copied("dist4_fsdp2_tp2", tmp_path)
    file = root / "iteration_00000006" / "toy-model-0000003-0000004.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])["decoder.layers.0.input_layernorm.weight"]
    data[8 + length + entry["data_offsets"][0]] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    assert verify(root).ok
    (problem,) = verify(root, read_data=True).problems
    assert (problem.file, problem.tensor) == (file.name, "decoder.layers.0.input_layernorm.weight")


def test_a_tracker_that_names_nothing_is_a_problem(tmp_path: Path) -> None:
    (problem,) = verify(hazard("async_savemax1_dangling_tracker", tmp_path)).problems
    assert (problem.expected, problem.found) == ("one of 6", "'4'")


def test_what_a_full_resume_would_refuse_is_told(tmp_path: Path) -> None:
    root = copied("dist4_fsdp2_tp2", tmp_path)
    (root / "iteration_00000006" / "common.json").unlink()
    report = verify(root)
    assert report.ok
    assert any("no common.json" in note for note in report.notes)
    file = root / "iteration_00000006" / "metadata.json"
    table = json.loads(file.read_text())
    del table["state_dict_metadata"]["adam_v.output_layer.weight"]
    table["storage_data"] = {k: v for k, v in table["storage_data"].items() if "adam_v.output_layer" not in k}
    file.write_text(json.dumps(table))
    (problem,) = verify(root).problems
    assert problem.tensor == "adam_v.output_layer.weight"


# ---- diff


def test_however_they_were_cut_the_tensors_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    want = {n: v for n, v in fingerprint(WHOLE).items() if "learning_rate" not in n}
    for folder in EVERY:
        if folder.startswith("dist"):
            found = {n: v for n, v in fingerprint(FIXTURES / folder).items() if "learning_rate" not in n}
            assert found == want, folder
            report = diff(WHOLE, FIXTURES / folder)
            assert report.progress == {}
            assert {(t.name, t.what) for t in report.tensors} <= {("learning_rate", "only in b")}
    assert run(["diff", str(FIXTURES / "dist4_fsdp2_tp2"), str(FIXTURES / "dist4_fsdp2_tp2_dedup")]) == 0
    assert "settings are not compared" in capsys.readouterr().err


def test_steps_differ_in_values_and_progress() -> None:
    report = diff(WHOLE / "iteration_00000004", WHOLE / "iteration_00000006")
    assert report.progress == {"global_step": (4, 6), "consumed_samples": (16, 24)}
    assert {t.what for t in report.tensors} == {"values"}


def test_theirs_and_its_import_are_the_same(tmp_path: Path) -> None:
    assert run(["import", "--from", "mindformers", str(WHOLE), str(tmp_path / "root")]) == 0
    report = diff(WHOLE, tmp_path / "root", read_data=True)
    assert report.progress == {}
    assert [t.name for t in report.tensors if t.section == "model"] == []


def test_the_readers_load_neither_torch_nor_numpy(weights: Path) -> None:
    theirs, copy = str(FIXTURES / "dist4_fsdp2_tp2"), str(FIXTURES / "dist4_fsdp2_tp2_dedup")
    code = (
        f"import sys; from perdure.cli.main import run; a, b, w = {theirs!r}, {copy!r}, {str(weights)!r}; "
        "words = [[c, p, '--json'] for c in ('ls', 'inspect', 'verify') for p in (a, w)] + [['diff', a, b]]; "
        "assert [run(each) for each in words] == [0] * 7; "
        "from perdure import Checkpoint; Checkpoint(a).verify(read_data=True); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_root_of_ours_with_one_of_theirs_in_it_is_ours(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run(["import", "--from", "mindformers", str(WHOLE / "iteration_00000004"), str(root)]) == 0
    shutil.copytree(WHOLE / "iteration_00000006", root / "iteration_00000006")
    assert Checkpoint(root).kind == "perdure"
