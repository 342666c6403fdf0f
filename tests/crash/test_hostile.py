"""Hostile files are a clear error: no traceback, no huge allocation, nothing read or written outside, no waiting."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.crash.engine_run import Run, train
from tests.crash.hostile import TEXTS, changes, header_of, mutated, replace_header, resign

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.catalog.checkpoint import Checkpoint
from perdure.catalog.verify import verify
from perdure.cli.main import run as command
from perdure.errors import PerdureError
from perdure.format.digest import digest_bytes

FULL = os.environ.get("PERDURE_CRASH_SWEEP") == "full"
EXAMPLES = 1500 if FULL else 15
MOST = 96 << 20
"""Bytes that looking at a few kilobytes may take; the most honest reader has one block of 8 MiB in hand."""

fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two iterations."""
    path = tmp_path_factory.mktemp("sound") / "root"
    train(str(path), "AA")
    return path


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of another program's, cut over several files."""
    fixtures = Path(__file__).resolve().parents[1] / "golden" / "mindformers"
    found = next(p.parent for p in sorted(fixtures.rglob("metadata.json")))
    path = tmp_path_factory.mktemp("theirs") / "root"
    shutil.copytree(found.parent, path)
    return path


@contextlib.contextmanager
def bounded(counted: bool = False) -> Iterator[None]:
    """Fails what allocates much, by the size of the process; `counted`: by Python's own count too, which is slow."""
    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    if counted:
        tracemalloc.start()
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * MOST, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST


@contextlib.contextmanager
def scratch(source: Path) -> Iterator[Path]:
    """A copy of a root, with a secret beside it that nobody may read or change."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "secret").write_text("secret")
        yield Path(shutil.copytree(source, Path(folder) / "root", symlinks=True))
        assert Path(folder, "secret").read_text() == "secret"
        assert sorted(os.listdir(folder)) == ["root", "secret"]


def load(path: Path, **keys: Any) -> Run:
    run = Run()
    settings = {"load_path": str(path), "enable_save": False, **keys}
    with Checkpointer(
        CheckpointConfig(**settings),
        model=run.model,
        optimizer=run.optimizer,
        extra={"word": run.word},
        say=lambda line: None,
    ) as checkpointer:
        checkpointer.load()
    return run


def look(*paths: Path, **keys: Any) -> None:
    """Everything that reads, on each path: it works, or says why not in words of ours."""
    with bounded():
        for path in paths:
            for read in (
                lambda path=path: Checkpoint(path).names(),
                lambda path=path: verify(path, read_data=True),
                lambda path=path: load(path, **keys),
                lambda path=path: load(path, no_load_optim=True, **keys),
            ):
                try:
                    read()  # type: ignore[no-untyped-call]
                except PerdureError as error:
                    assert 0 < len(error.message) < 3000  # noqa: PT017
                    assert "secret" not in error.message or "../secret" in error.message  # noqa: PT017


def newest(root: Path) -> Path:
    return root / "iteration_00000002"


# ---- values anywhere


@fuzzed
@given(data=st.data())
def test_any_value_in_metadata(sound: Path, data: st.DataObject) -> None:
    with scratch(sound) as root:
        file = newest(root) / "metadata.json"
        table = json.loads(file.read_bytes())
        file.write_text(json.dumps(mutated(table, data.draw(changes(table)))))
        resign(newest(root))
        look(newest(root), root)


@fuzzed
@given(data=st.data())
def test_any_value_in_common(sound: Path, data: st.DataObject) -> None:
    with scratch(sound) as root:
        file = newest(root) / "common.json"
        table = json.loads(file.read_bytes())
        file.write_text(json.dumps(mutated(table, data.draw(changes(table)))))
        resign(newest(root))
        look(newest(root))


@fuzzed
@given(data=st.data())
def test_any_value_in_commit(sound: Path, data: st.DataObject) -> None:
    with scratch(sound) as root:
        table = json.loads((newest(root) / "commit.json").read_bytes())
        resign(newest(root), mutated(table, data.draw(changes(table))) or {})
        look(newest(root), root)


@fuzzed
@given(data=st.data(), signed=st.booleans())
def test_any_value_in_a_shards_header(sound: Path, data: st.DataObject, signed: bool) -> None:
    with scratch(sound) as root:
        file = data.draw(st.sampled_from(sorted(newest(root).glob("*.safetensors"))))
        table = header_of(file)
        header = replace_header(file, mutated(table, data.draw(changes(table))))
        if signed:
            metadata = json.loads((newest(root) / "metadata.json").read_bytes())
            for record in metadata["files"]:
                if record["name"] == file.name:
                    record |= {"bytes": file.stat().st_size, "header": digest_bytes(header)}
            (newest(root) / "metadata.json").write_text(json.dumps(metadata))
            resign(newest(root))
        look(newest(root))


@fuzzed
@given(data=st.data())
def test_any_value_in_events(sound: Path, data: st.DataObject) -> None:
    with scratch(sound) as root:
        lines = [json.loads(line) for line in (root / "events.jsonl").read_bytes().splitlines()]
        number = data.draw(st.sampled_from(range(len(lines))))
        lines[number] = mutated(lines[number], data.draw(changes(lines[number])))
        (root / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (newest(root) / "commit.json").unlink()
        look(root)


@fuzzed
@given(text=st.one_of(st.binary(max_size=80), st.integers(-(10**25), 10**25).map(lambda n: str(n).encode())))
def test_any_bytes_in_the_tracker(sound: Path, text: bytes) -> None:
    with scratch(sound) as root:
        (root / "latest_checkpointed_iteration.txt").write_bytes(text)
        assert load(root).word.text in ("A", "AA")
        look(root)


@fuzzed
@given(data=st.data())
def test_any_value_in_another_programs_files(theirs: Path, data: st.DataObject) -> None:
    with scratch(theirs) as root:
        directory = next(p.parent for p in sorted(root.rglob("metadata.json")))
        file = data.draw(st.sampled_from(sorted(directory.iterdir())))
        if file.suffix == ".json":
            table = json.loads(file.read_bytes())
            file.write_text(json.dumps(mutated(table, data.draw(changes(table)))))
        else:
            table = header_of(file)
            replace_header(file, mutated(table, data.draw(changes(table))))
        look(directory, root)


# ---- whole files


@pytest.mark.parametrize("text", TEXTS)
def test_files_that_are_none_of_ours(sound: Path, theirs: Path, text: str) -> None:
    for name in ("metadata.json", "common.json"):
        with scratch(sound) as root:
            (newest(root) / name).write_bytes(TEXTS[text])
            resign(newest(root))
            look(newest(root), root)
        with scratch(theirs) as root:
            directory = next(p.parent for p in sorted(root.rglob("metadata.json")))
            (directory / name).write_bytes(TEXTS[text])
            look(directory, root)
    with scratch(sound) as root:
        (newest(root) / "commit.json").write_bytes(TEXTS[text])
        (root / "events.jsonl").write_bytes(TEXTS[text] + b"\n" + TEXTS[text])
        assert load(root).word.text == "A"
        look(root, newest(root))
        head = TEXTS[text].removesuffix(b"}")
        (newest(root) / "commit.json").write_bytes(head + b',"digest":"' + digest_bytes(head).encode() + b'"}')
        look(root, newest(root))
    with scratch(sound) as root:
        (root / "latest_checkpointed_iteration.txt").write_bytes(TEXTS[text])
        (root / "lock").write_bytes(TEXTS[text])
        train(str(root), "AAA")
        assert load(root).word.text == "AAA"
    with scratch(sound) as root:
        (newest(root) / "model.safetensors.index.json").write_bytes(TEXTS[text])
        (newest(root) / "commit.json").unlink()
        look(newest(root).rename(root / "weights"))


# ---- names that are not files


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a secret": lambda place, outside: place.symlink_to(outside / "secret"),
    "a link to a directory": lambda place, outside: place.symlink_to(outside, target_is_directory=True),
    "a dangling link": lambda place, outside: place.symlink_to(outside / "nowhere"),
    "a link to itself": lambda place, outside: place.symlink_to(place),
    "a link to endless zeros": lambda place, outside: place.symlink_to("/dev/zero"),
    "a link to what is always full": lambda place, outside: place.symlink_to("/dev/full"),
    "a fifo": lambda place, outside: os.mkfifo(place),
    "a directory": lambda place, outside: (place.mkdir(), (place / "inside").write_text("x")),
    "a socket": lambda place, outside: _socket(place),
    "a device": lambda place, outside: os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(1, 5)),
    "a sparse terabyte": lambda place, outside: (place.touch(), os.truncate(place, 1 << 40)),
}
NAMES = (
    "latest_checkpointed_iteration.txt",
    ".latest_checkpointed_iteration.txt.tmp",
    "events.jsonl",
    "lock",
    "iteration_00000002",
    ".iteration_00000003.partial-ab-3",
    ".iteration_00000002.replaced-2",
    "iteration_00000003",
    "iteration_00000002/metadata.json",
    "iteration_00000002/common.json",
    "iteration_00000002/commit.json",
    "iteration_00000002/checkpoint-model-0000000-0000001.safetensors",
    "iteration_00000002/checkpoint-opt-0000000-0000001.safetensors",
)


def _socket(place: Path) -> None:
    with contextlib.chdir(place.parent) if hasattr(contextlib, "chdir") else contextlib.nullcontext():
        plug = socket.socket(socket.AF_UNIX)
        plug.bind(place.name if hasattr(contextlib, "chdir") else str(place))
        plug.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_no_file_is_neither_followed_nor_waited_for(sound: Path, kind: str) -> None:
    if kind == "a device" and os.geteuid() != 0:
        pytest.skip("only root makes device files")
    # In a plain run each kind meets a third of the names, and each name a third of the kinds.
    for name in NAMES if FULL else NAMES[list(KINDS).index(kind) % 3 :: 3]:
        with scratch(sound) as root:
            outside = root.parent
            place = root / name
            if place.is_dir():
                shutil.rmtree(place)
            place.unlink(missing_ok=True)
            KINDS[kind](place, outside)
            look(newest(root), root)
            # Going on: it saves over it, or says what is in the way.
            run = Run()
            try:
                with bounded(), run.checkpointer(str(root), None, False, 1) as checkpointer:
                    checkpointer.load()
                    run.update("B")
                    done = len(run.word.text)
                    checkpointer.save(Progress(done, 4 * done, 4))
            except (PerdureError, OSError) as error:
                told = str(error) if isinstance(error, PerdureError) else str(error.filename)
                assert Path(name).name in told or "iteration" in told, (name, error)  # noqa: PT017
            else:
                assert load(root).digest() == Run.after(run.word.text).digest()
            # `scratch` sees to the secret; nothing else has come into being beside the root.


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", [["ls"], ["inspect"], ["verify", "--read-data"]])
def test_the_commands_say_it_in_a_sentence(sound: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for text in TEXTS.values():
        with scratch(sound) as root:
            for name in ("metadata.json", "common.json"):
                (newest(root) / name).write_bytes(text)
            resign(newest(root))
            with bounded(counted=True):
                codes = {command([*words, str(path)]) for path in (root, newest(root))[: 1 if words == ["ls"] else 2]}
            assert codes <= {0, 1, 10}
            told = capsys.readouterr().err
            assert "error: unexpected" not in told
            assert "Traceback" not in told
            assert max(map(len, told.splitlines() or [""])) < 3000


@pytest.mark.timeout(240)
def test_a_trainer_is_told_what_it_cannot_make_sense_of(tmp_path: Path) -> None:
    """Everything that a trainer keeps for a resume to compare, as something else."""
    tiny.trainer(tmp_path / "sound", 3).train()
    directory = next((tmp_path / "sound" / "checkpoint").glob("iteration_*"))
    file = directory / "metadata.json"
    table = json.loads(file.read_bytes())
    keys = {*table["training"], "base", "config", "extra", "left_out", "stretches"}
    refused = 0
    for key in sorted(keys):
        for value in (None, 10**30, "x", [["x", "y"]], {"train": 5}):
            file.write_text(json.dumps({**table, "training": {**table["training"], key: value}}))
            resign(directory)
            wishes = {"load_path": str(directory), "auto_resume": False, "enable_save": False}
            try:
                tiny.trainer(tmp_path / "other", 3, checkpoint=wishes).train()
            except PerdureError:
                refused += 1
    assert refused > 20
