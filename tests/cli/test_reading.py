"""ls, inspect, verify and diff: what they print, their exit codes, and that they need neither torch nor numpy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.checkpoints import build_checkpoint, floats

from perdure.catalog.root import Root
from perdure.cli.main import run
from perdure.format.names import TRACKER


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = Root(tmp_path / "checkpoint")
    os.mkdir(place.path)
    build_checkpoint(place, 10, sequence=1)
    build_checkpoint(place, 20, sequence=2, healthy=False)
    return Path(place.path)


def spoil(root: Path) -> None:
    (file,) = (root / "iteration_00000020").glob("*-model-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_ls_shows_iterations_marks_the_tracker_and_notes_leftovers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / ".iteration_00000030.partial-ab-3").mkdir()
    assert run(["ls", str(root)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "iteration_00000010" in lines[1]
    assert lines[2].startswith("*")
    assert "no" in lines[2].split()
    assert ".iteration_00000030.partial-ab-3" in err


def test_ls_as_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(root), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(i["iteration"], i["sequence"], i["tracker"]) for i in told["iterations"]] == [
        (10, 1, False),
        (20, 2, True),
    ]


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_no_such_root_is_exit_10(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "no", tmp_path):
        assert run([command, str(path)]) == 10
        assert str(path) in capsys.readouterr().err


def test_what_is_done_to_a_whole_root_is_not_done_when_one_iteration_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["ls"], ["prune"], ["rewind", "--to", "10"]):
        assert run([*words, f"{root}/iteration_00000010/"]) == 2
        assert f"hint: name {root};" in capsys.readouterr().err
    assert len(Root(root).iterations()) == 2
    assert Root(root).tracker().iteration == 20
    (shard,) = (root / "iteration_00000020").glob("*-model-*")
    assert run(["inspect", str(shard)]) == 10
    assert f"hint: name the directory that it is a part of: {shard.parent}" in capsys.readouterr().err


def test_inspect_shows_progress_and_tensors(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(root / "iteration_00000010")]) == 0
    out = capsys.readouterr().out
    for text in ("layer.weight", "F32", "[2, 3]", "adam_step", "40, 4 per step", "save 1"):
        assert text in out


def test_inspect_as_json_lists_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"layer.{i}" for i in range(50)]
    build_checkpoint(Root(tmp_path), 3, state={"model": {n: floats(1.0) for n in names}})
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["model"]) == names
    assert run(["inspect", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "layer.49" not in out
    assert "30 more" in err
    assert run(["inspect", str(tmp_path), "--all"]) == 0
    assert "layer.49" in capsys.readouterr().out


def test_verify_is_0_for_sound_and_1_for_damage_which_it_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(root), "--read-data"]) == 0
    spoil(root)
    assert run(["verify", str(root)]) == 0
    capsys.readouterr()
    assert run(["verify", str(root), "--read-data"]) == 1
    out = capsys.readouterr().out
    assert "iteration_00000020" in out
    assert "layer." in out
    assert run(["verify", str(root), "--read-data", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["problems"][0]["file"].startswith("checkpoint-model-")


def test_diff_is_0_for_equal_and_1_for_different(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    assert run(["diff", str(root), str(copy)]) == 0
    assert "equal" in capsys.readouterr().out
    assert run(["diff", str(root), str(root / "iteration_00000010")]) == 1
    out = capsys.readouterr().out
    assert "layer.bias" in out
    assert "at most by 10" in out
    assert run(["diff", str(root), str(root / "iteration_00000010"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False


def test_fingerprints_of_what_is_sound(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    assert run(["verify", str(root), "--fingerprint", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["fingerprints"]
    assert list(told) == ["iteration_00000010", "iteration_00000020"]
    assert set(told["iteration_00000010"]) == {"all", "model", "optimizer"}
    assert told["iteration_00000010"]["all"] != told["iteration_00000020"]["all"]
    assert run(["verify", str(copy / "iteration_00000010"), "--fingerprint"]) == 0
    assert f"iteration_00000010: fingerprint {told['iteration_00000010']['all']}" in capsys.readouterr().out
    assert run(["diff", str(root), str(copy), "--fingerprint", "--section", "model"]) == 0
    assert capsys.readouterr().out.count(told["iteration_00000020"]["model"]) == 2
    # What is damaged has none.
    spoil(root)
    assert run(["verify", str(root), "--fingerprint", "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["fingerprints"]) == ["iteration_00000010"]


def test_a_newer_format_is_exit_11(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from perdure.format.digest import digest_bytes

    file = root / "iteration_00000020" / "commit.json"
    head = file.read_bytes().replace(b'"version":1', b'"version":9')[: -len(',"digest":"xxh3-128:') - 34]
    file.write_bytes(head + b',"digest":"' + digest_bytes(head).encode() + b'"}')
    assert run(["inspect", str(root)]) == 11
    assert run(["verify", str(root / "iteration_00000020")]) == 11
    assert "9" in capsys.readouterr().err


def test_a_tracker_that_lags_is_warned_about(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / TRACKER).write_text("10")
    assert run(["inspect", str(root)]) == 0
    out, err = capsys.readouterr()
    assert "iteration_00000010" in out
    assert "iteration_00000020" in err


def test_reading_commands_load_neither_torch_nor_numpy(root: Path) -> None:
    code = (
        "import sys; from perdure.cli.main import run; "
        f"root = {str(root)!r}; "
        "assert [run(a) for a in (['ls', root, '--json'], ['inspect', root, '--json'], ['verify', root, '--read-data'],"
        " ['diff', root, root])] == [0, 0, 0, 0]; "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
