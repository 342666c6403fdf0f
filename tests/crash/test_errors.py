"""A storage that fails: older checkpoints stay, the failure is told with step, file and cause, the next save works."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from tests.crash.engine_run import Run, train

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.errors import DamagedCheckpointError, SaveError
from perdure.storage.base import Storage
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage

FULL = os.environ.get("PERDURE_CRASH_SWEEP") == "full"
CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one iteration."""
    path = tmp_path_factory.mktemp("sound") / "root"
    train(str(path), "A")
    return path


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "root"))


class Saver:
    """A resumed run that saves; faults are armed once it has resumed."""

    def __init__(self, root: Path, storage: Storage, *, background: bool, **keys: Any) -> None:
        self.run, self.said = Run(), []  # type: tuple[Run, list[str]]
        config = CheckpointConfig(
            save_path=str(root), auto_resume=True, save_interleaved_steps=1, async_save=background, **keys
        )
        self.checkpointer = Checkpointer(
            config,
            model=self.run.model,
            optimizer=self.run.optimizer,
            extra={"word": self.run.word},
            storage=storage,
            say=self.said.append,
        )
        self.checkpointer.load()

    def save(self) -> None:
        """One update and its save, waited for."""
        self.run.update("B")
        done = len(self.run.word.text)
        self.checkpointer.save(Progress(done, 4 * done, 4))
        self.checkpointer.wait()


def loaded(root: Path) -> Run:
    run = Run()
    with run.checkpointer(str(root), None, False, 9) as checkpointer:
        checkpointer.load()
    return run


class Armed:
    """Numbers operations only once it is switched on."""

    def __init__(self) -> None:
        self.on = False

    def __call__(self, name: str, path: str) -> bool:
        return self.on


def faulty(at: int, code: int, sticky: bool, armed: Armed) -> FaultStorage:
    return FaultStorage(LocalStorage(), at=at, action="raise", code=code, sticky=sticky, only=armed)


@pytest.mark.timeout(1200 if FULL else 240)
@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "lasting"])
def test_an_error_at_any_operation_of_a_save_is_told_and_survived(
    sound: Path, tmp_path: Path, background: bool, sticky: bool
) -> None:
    before = tiny.tree(sound / "iteration_00000001")
    number = failed = 0
    while True:
        number += 1
        for code in CODES if FULL else CODES[number % 3 :][:1]:
            root = Path(shutil.copytree(sound, tmp_path / "root"))
            armed = Armed()
            storage = faulty(number, code, sticky, armed)
            saver = Saver(root, storage, background=background)
            armed.on = True
            try:
                saver.save()
            except SaveError as error:
                failed += 1
                operation, path = storage.log[number - 1]
                where = f"{operation} {path}: {error}"
                assert os.strerror(code) in str(error), where  # noqa: PT017
                assert "step 2 " in str(error) or "iteration 2 " in str(error), where  # noqa: PT017
                told = [e for e in read_events(Root(root)) if e["event"] == "save_failed"]
                assert told or sticky, where
                assert tiny.tree(root / "iteration_00000001") == before, where
                assert verify(root / "iteration_00000001", read_data=True).ok, where
                assert Root(root).tracker().text in ("1", "2"), where
            past = len(storage.log) < number
            armed.on = False
            # There is room again: the same process saves its next step, and a new one goes on from there.
            saver.save()
            saver.checkpointer.close()
            assert Root(root).tracker().text == "3"
            assert verify(root, read_data=True).ok
            run = loaded(root)
            assert (run.word.text, run.digest()) == ("ABB", Run.after("ABB").digest())
            assert not [n for n in os.listdir(root) if n.startswith(".")]
            shutil.rmtree(root)
        if past:
            break
    assert failed >= 15


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("code", CODES)
def test_with_warn_every_failed_save_is_said_with_its_cause_and_the_run_goes_on(
    root: Path, code: int, background: bool
) -> None:
    armed = Armed()
    saver = Saver(root, faulty(1, code, True, armed), background=background, on_save_error="warn")
    armed.on = True
    for _ in range(3):
        saver.save()
    armed.on = False
    saver.save()
    saver.checkpointer.close()
    warnings = [line for line in saver.said if "the run goes on without it" in line]
    assert [line.partition("step ")[2][:2] for line in warnings] == ["2 ", "3 ", "4 "]
    assert all(os.strerror(code) in line for line in warnings)
    assert [i.iteration for i in Root(root).iterations()] == [1, 5]
    assert loaded(root).digest() == Run.after("ABBBB").digest()


@pytest.mark.timeout(300)
def test_an_error_at_any_read_of_a_load_stops_and_is_never_taken_for_damage(sound: Path, tmp_path: Path) -> None:
    number = 0
    while True:
        number += 1
        code = (errno.EIO, errno.EACCES, errno.ESTALE)[number % 3]
        root = Path(shutil.copytree(sound, tmp_path / "root"))
        storage = FaultStorage(LocalStorage(), at=number, action="raise", code=code, reads=True)
        run = Run()
        try:
            with run.checkpointer(str(root), storage, False, 9) as checkpointer:
                checkpointer.load()
        except OSError as error:
            assert error.errno == code  # noqa: PT017
            assert error.filename  # noqa: PT017
        else:
            # What a failing history or tidying costs is not worth a run.
            assert run.digest() == Run.after("A").digest()
        if len(storage.log) < number:
            break
        assert [e["event"] for e in read_events(Root(root))].count("damage") == 0
        assert [e["event"] for e in read_events(Root(root))].count("fallback") == 0
        assert loaded(root).digest() == Run.after("A").digest()
        shutil.rmtree(root)
    assert number > 10


# ---- calls that do less than they were asked


@contextmanager
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every read and write of the storage moves a part of what was asked, as the system may at any time."""
    pwrite, write, preadv = os.pwrite, os.write, os.preadv
    counts = [0]

    def part(size: int) -> int:
        counts[0] += 1
        return max(1, size * (1 + counts[0] % 3) // 4)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, memoryview(data)[: part(len(data))], at))
        patch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[: part(len(data))]))
        patch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: part(len(views[0]))]], at))
        yield counts


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_short_writes_and_short_reads_make_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    with in_pieces(monkeypatch) as counts:
        train(str(tmp_path / "root"), "AAA", background=background)
        assert loaded(tmp_path / "root").digest() == Run.after("AAA").digest()
    assert counts[0] > 100
    assert verify(tmp_path / "root", read_data=True).ok
    lines = (tmp_path / "root" / "events.jsonl").read_bytes().splitlines()
    assert len(read_events(Root(tmp_path / "root"))) == len(lines)


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_signals_that_interrupt_system_calls_make_no_difference(tmp_path: Path, background: bool) -> None:
    caught = [0]

    def count(number: int, frame: object) -> None:
        caught[0] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        train(str(tmp_path / "root"), "A" * 8, background=background)
        found = loaded(tmp_path / "root").digest()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == Run.after("A" * 8).digest()
    assert caught[0] > 20
    assert verify(tmp_path / "root", read_data=True).ok


# ---- limits of the file system itself


def test_a_limit_of_the_file_size_is_an_error_with_the_file_and_its_end(root: Path) -> None:
    import resource

    def limited() -> None:
        saver = Saver(root, LocalStorage(), background=False)
        for limit in (0, 100, 4095, 4096, 5000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with pytest.raises(SaveError, match=r"(?s)step \d .*File too large.*iteration_"):
                saver.save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saver.save()
        saver.checkpointer.close()

    assert tiny.in_child(limited) == 0
    assert [i.iteration for i in Root(root).iterations()] == [1, 7]
    assert loaded(root).digest() == Run.after("A" + "B" * 6).digest()


def test_a_slow_disk_changes_nothing_but_the_time(root: Path) -> None:
    import time

    class Slow(LocalStorage):
        def sync_directory(self, path: str) -> None:
            time.sleep(0.05)
            super().sync_directory(path)

        def write(self, path: str, data: Any) -> None:
            time.sleep(0.05)
            super().write(path, data)

    saver = Saver(root, Slow(), background=True)
    for _ in range(3):
        saver.run.update("B")
        done = len(saver.run.word.text)
        saver.checkpointer.save(Progress(done, 4 * done, 4))
        # The run goes on while that is written.
        saver.checkpointer.poll()
    saver.checkpointer.close()
    assert loaded(root).digest() == Run.after("ABBB").digest()
    assert verify(root, read_data=True).ok


def test_damage_on_the_way_is_told_apart_from_a_disk_that_fails(root: Path) -> None:
    """A file that ends early is damage; one that cannot be read is not."""
    shard = next((root / "iteration_00000001").glob("*-model-*"))
    os.truncate(shard, shard.stat().st_size - 4)
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        loaded(root)


def test_a_file_system_that_is_really_full_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    """Bytes and names left, from none to enough, both paths; mounted in a namespace, which some systems forbid."""
    here = Path(__file__).resolve().parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here / "src"), str(here)]),
        "OMP_NUM_THREADS": "1",
    }
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = ["sh", "-c", 'mount -t tmpfs -o size=64k tmpfs "$1"', "sh", str(tmp_path)]
    if not shutil.which("unshare") or subprocess.run([*namespace, *probe], capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here; the limit of the file size stands for it")
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "tests.crash.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=here,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["faults"] == []
    assert result["failed"] >= 10
    assert result["saved"] >= 6


@pytest.mark.timeout(600)
def test_two_ranks_tell_of_the_one_whose_disk_failed_and_agree_on_what_only_one_of_them_read() -> None:
    here = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.two_ranks"],
        capture_output=True,
        text=True,
        cwd=here,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(here / "src"), str(here)]),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["tried"] > 40
