"""Every flipped bit is found and named; nothing that was damaged, swapped or taken from elsewhere is ever loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import build_checkpoint, floats
from tests.crash.engine_run import Run, train
from tests.crash.flips import flipped, places, sweep

from perdure import CheckpointConfig, Checkpointer
from perdure.catalog.choose import choose
from perdure.catalog.events import damage_marks, read_events
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import CheckpointNotFoundError, DamagedCheckpointError, PerdureError
from perdure.format.box import Box

FULL = os.environ.get("PERDURE_CRASH_SWEEP") == "full"


@pytest.mark.timeout(3600 if FULL else 120)
def test_every_flipped_bit_is_found_and_its_file_and_tensor_are_named() -> None:
    result = sweep(1 if FULL else 97)
    assert result["missed"] == []
    assert result["tried"] == result["found"]
    assert set(result["tried"]) == {"header", "tensor data", "commit.json", "metadata.json", "common.json"}  # type: ignore[call-overload]


# ---- files that are another's, or not whole


def cut_in_two(salt: float) -> dict[str, Any]:
    halves = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))
    values = [salt + n for n in range(12)]
    return {
        "model": {"w": floats(*values, shape=(4, 3), cuts=halves), "b": floats(salt)},
        "optimizer": {"adam_m.w": floats(*values, shape=(4, 3), cuts=halves)},
    }


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """Two iterations of one run on two ranks, another run's of the same shapes, and one writing of step 20 earlier."""
    place = Root(tmp_path / "root")
    os.mkdir(place.path)
    build_checkpoint(place, 20, sequence=1, state=cut_in_two(7.0))
    shutil.copytree(place.join("iteration_00000020"), tmp_path / "earlier")
    build_checkpoint(place, 10, sequence=2, state=cut_in_two(1.0))
    build_checkpoint(place, 20, sequence=3, state=cut_in_two(2.0))
    other = Root(tmp_path / "other")
    os.mkdir(other.path)
    build_checkpoint(other, 20, sequence=3, lineage="ffff", state=cut_in_two(2.0))
    assert verify(place.path, read_data=True).ok
    return place


FILES = [
    *(f"checkpoint-{kind}-{rank:07d}-0000002.safetensors" for kind in ("model", "opt") for rank in (0, 1)),
    "metadata.json",
    "common.json",
    "commit.json",
]
SHARDS = FILES[:4]


def taken_from(where: str) -> Callable[[Path, str], object]:
    """Another directory's file of the same name."""
    return lambda d, name: (d / name).write_bytes((d / where / name).read_bytes())


HARM: dict[str, Callable[[Path, str], object]] = {
    "removed": lambda d, name: (d / name).unlink(),
    "emptied": lambda d, name: (d / name).write_bytes(b""),
    "cut by one byte": lambda d, name: os.truncate(d / name, (d / name).stat().st_size - 1),
    "cut in half": lambda d, name: os.truncate(d / name, (d / name).stat().st_size // 2),
    "grown by one byte": lambda d, name: (d / name).write_bytes((d / name).read_bytes() + b"\0"),
    "another iteration's": taken_from("../iteration_00000010"),
    "an earlier writing's of the step": taken_from("../../earlier"),
    "another run's": taken_from("../../other/iteration_00000020"),
    "a directory": lambda d, name: ((d / name).unlink(), (d / name).mkdir()),
    "a link": lambda d, name: ((d / name).rename(d.parent / "away"), (d / name).symlink_to(d.parent / "away")),
    "a fifo": lambda d, name: ((d / name).unlink(), os.mkfifo(d / name)),
    "zeros": lambda d, name: (d / name).write_bytes(bytes((d / name).stat().st_size)),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.timeout(60)
def test_a_file_that_is_not_itself_is_named_by_verify_and_by_whoever_opens_it(root: Root, harm: str) -> None:
    directory, kept = Path(root.join("iteration_00000020")), Path(root.path, "kept")
    shutil.copytree(directory, kept)
    for name in FILES:
        before = (directory / name).read_bytes()
        HARM[harm](directory, name)
        now = directory / name
        if now.is_file() and not now.is_symlink() and now.read_bytes() == before:
            continue
        problems = verify(directory, read_data=True).problems
        # Another sound commit.json is contradicted by everything else.
        named = (p.file == name and name in p.what for p in problems)
        assert any(named) or (problems and "'s" in harm and name == "commit.json"), (name, problems)
        problems = verify(root.path, read_data=True).problems
        assert any("iteration_00000020" in p.path + p.what for p in problems), name
        shutil.rmtree(directory)
        shutil.copytree(kept, directory)
    assert verify(directory, read_data=True).ok


@pytest.mark.parametrize("gone", [("commit.json",), ("commit.json", "metadata.json"), ("commit.json", "common.json")])
def test_without_its_commit_ours_is_never_taken_for_another_programs(root: Root, gone: tuple[str, ...]) -> None:
    """There are no digests then: a flipped bit would be believed."""
    directory = Path(root.join("iteration_00000020"))
    for name in gone:
        (directory / name).unlink()
    (problem, *_) = verify(directory, read_data=True).problems
    assert problem.file == "commit.json"
    assert choose(root).iteration.iteration == 10
    shutil.rmtree(root.join("iteration_00000010"))
    for path in (directory, Path(root.path)):
        keys = {"auto_resume": False, "load_path": str(path), "no_load_optim": True, "enable_save": False}
        with pytest.raises((CheckpointNotFoundError, DamagedCheckpointError), match=r"commit\.json"):
            load(Path(root.path, "none"), **keys)


@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 3), (0, 2), (1, 2)])
def test_two_shards_that_changed_places_are_both_named(root: Root, a: int, b: int) -> None:
    directory = Path(root.join("iteration_00000020"))
    one, other = directory / SHARDS[a], directory / SHARDS[b]
    one.rename(directory / "aside")
    other.rename(one)
    (directory / "aside").rename(other)
    problems = verify(directory, read_data=True).problems
    assert {p.file for p in problems} >= {one.name, other.name}
    assert any("holds what was written as" in p.what or "on disk" in p.what for p in problems)


# ---- loading


def load(path: Path, **keys: Any) -> Run:
    """What a new process has after the load."""
    run = Run()
    settings = {"save_path": str(path), "auto_resume": True, **keys}
    with Checkpointer(
        CheckpointConfig(**settings),
        model=run.model,
        optimizer=run.optimizer,
        extra={"word": run.word},
        say=lambda line: None,
    ) as checkpointer:
        checkpointer.load()
    return run


def test_a_flip_anywhere_leads_to_the_parent_bit_for_bit_and_is_not_tried_twice(tmp_path: Path) -> None:
    """Random bits of every kind of place; with `verify_on_load: first` too."""
    draw = random.Random(20)
    train(str(tmp_path / "sound"), "AA")
    wanted = Run.after("A").digest()
    spots = places(Root(tmp_path / "sound"), "iteration_00000002")
    for number in range(2000 if FULL else 40):
        path = Path(shutil.copytree(tmp_path / "sound", tmp_path / "root"))
        name = draw.choice(sorted(spots))
        # As often in the header as in the data, which are a thousandth of it.
        ends = [0, *(end for end, _ in spots[name])]
        part = draw.randrange(len(ends) - 1)
        bit = draw.randrange(ends[part] * 8, ends[part + 1] * 8)
        with flipped(str(path / "iteration_00000002" / name), bit):
            run = load(path, verify_on_load="first" if number % 3 == 0 else "inline")
            assert (run.word.text, run.digest()) == ("A", wanted), (name, bit)
            marks = len(damage_marks(Root(path)))
            assert marks == (name != "commit.json"), (name, bit)
            events = len([e for e in read_events(Root(path)) if e["event"] == "damage"])
            assert load(path).digest() == wanted
            assert len([e for e in read_events(Root(path)) if e["event"] == "damage"]) == events
        shutil.rmtree(path)


def test_weights_alone_are_those_of_the_step_or_refused_whatever_bit_is_flipped(tmp_path: Path) -> None:
    draw = random.Random(21)
    path = tmp_path / "sound"
    train(str(path), "AA")
    iteration = path / "iteration_00000002"
    wanted = Run.after("AA").model.state_dict()
    refused = 0
    spots = places(Root(path), "iteration_00000002")
    for _ in range(1000 if FULL else 60):
        name = draw.choice(sorted(spots))
        bit = draw.randrange(spots[name][-1][0] * 8)
        with flipped(str(iteration / name), bit):
            keys = {"auto_resume": False, "load_path": str(iteration), "no_load_optim": True, "enable_save": False}
            if name.startswith(("checkpoint-opt", "checkpoint-extra")):
                run = load(tmp_path / "none", **keys)
                assert all(v.equal(wanted[k]) for k, v in run.model.state_dict().items())
                continue
            refused += 1
            with pytest.raises(PerdureError, match=name):
                load(tmp_path / "none", **keys)
    assert refused > 10


@pytest.mark.parametrize("name", ["model", "opt", "extra"])
def test_a_shard_of_another_writing_of_the_same_step_is_never_loaded(tmp_path: Path, name: str) -> None:
    """The same run rewound and gone on otherwise: same names, shapes, step and lineage."""
    path = tmp_path / "root"
    train(str(path), "AA")
    file = f"checkpoint-{name}-0000000-0000001.safetensors"
    earlier = (path / "iteration_00000002" / file).read_bytes()
    (path / "latest_checkpointed_iteration.txt").write_text("1")
    train(str(path), "AB")
    (path / "iteration_00000002" / file).write_bytes(earlier)
    keys = {"auto_resume": False, "load_path": str(path / "iteration_00000002"), "enable_save": False}
    with pytest.raises(DamagedCheckpointError, match=f"{file}: .*belongs to save"):
        load(tmp_path / "none", **keys)
    assert load(path).word.text == "A"


def test_after_a_fallback_the_run_overwrites_the_damaged_step_and_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    train(str(tmp_path / "sound"), "AAA")
    path = tmp_path / "root"
    train(str(path), "AAA")
    for step in (2, 3):
        shard = path / f"iteration_{step:08d}" / "checkpoint-opt-0000000-0000001.safetensors"
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(bytes(data))
    assert load(path).word.text == "A"
    assert len(damage_marks(Root(path))) == 2
    events = [e for e in read_events(Root(path)) if e["event"] == "fallback"]
    assert [(e["damaged"][-1], e["to"][-1]) for e in events] == [("3", "2"), ("2", "1")]
    assert verify(path, read_data=True).problems
    train(str(path), "AAA")
    assert verify(path, read_data=True).ok
    assert load(path).digest() == Run.after("AAA").digest()


@pytest.mark.parametrize("name", ["events.jsonl", "latest_checkpointed_iteration.txt"])
def test_damage_beside_the_iterations_never_keeps_a_run_from_resuming(tmp_path: Path, name: str) -> None:
    draw = random.Random(22)
    train(str(tmp_path / "sound"), "AA")
    size = (tmp_path / "sound" / name).stat().st_size
    for _ in range(30):
        path = Path(shutil.copytree(tmp_path / "sound", tmp_path / "root"))
        with flipped(str(path / name), draw.randrange(size * 8)):
            assert load(path).word.text in ("A", "AA")
        shutil.rmtree(path)
    (tmp_path / "sound" / name).write_bytes(json.dumps([None] * 9).encode() + b"\xff\n{\n\0")
    assert load(tmp_path / "sound").word.text == "AA"
