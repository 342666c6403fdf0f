"""Deletion among races, refusals, strangers and readers: what must stay stays, and no run ends for what cannot go."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from tests import tiny
from tests.checkpoints import build_checkpoint
from tests.crash.engine_run import Run, rewind, train

from perdure import Progress
from perdure.catalog.choose import choose
from perdure.catalog.lock import RootLock
from perdure.catalog.publish import set_tracker
from perdure.catalog.root import Root
from perdure.catalog.verify import verify
from perdure.cli.prune import command
from perdure.errors import SaveError
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage


def hold(root: Path) -> list[int]:
    return [i.iteration for i in Root(root).iterations()]


def strays(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


def resumed(root: Path) -> Run:
    run = Run()
    with run.checkpointer(str(root), None, False, 9) as checkpointer:
        checkpointer.load()
    return run


class Watched(LocalStorage):
    """After every operation a committed iteration is there, and a resume would take it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.seen = root, 0
        self.at_least: int | None = None

    def _look(self) -> None:
        if self.at_least is not None:
            self.seen += 1
            assert choose(Root(self.root)).iteration.iteration >= self.at_least

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self._look()

    def exchange(self, a: str, b: str) -> None:
        super().exchange(a, b)
        self._look()

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._look()

    def remove_directory(self, path: str) -> None:
        super().remove_directory(path)
        self._look()


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_with_save_max_one_there_is_always_one_and_after_each_save_only_the_newest(
    tmp_path: Path, background: bool
) -> None:
    root = tmp_path / "root"
    storage, run = Watched(root), Run()
    with run.checkpointer(str(root), storage, background, 1) as checkpointer:
        checkpointer.load()
        for done in range(1, 6):
            run.update("A")
            checkpointer.save(Progress(done, 4 * done, 4))
            checkpointer.wait()
            assert hold(root) == [done]
            storage.at_least = done
    assert storage.seen > 20
    assert not strays(root)


def test_numbers_that_go_down_do_not_make_the_newest_the_oldest(tmp_path: Path) -> None:
    train(str(tmp_path / "root"), "AAAAA", numbered=lambda word: 1000 - len(word), save_max=2)
    assert hold(tmp_path / "root") == [996, 995]
    train(str(tmp_path / "root"), "AAAAAA", numbered=lambda word: 10**9, save_max=2)
    assert hold(tmp_path / "root") == [995, 10**9]
    assert resumed(tmp_path / "root").word.text == "AAAAAA"


def test_another_process_that_deletes_old_ones_at_the_same_time_disturbs_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    train(str(root), "A")
    deleter = os.fork()
    if deleter == 0:
        while True:
            names = sorted(n for n in os.listdir(root) if "iteration" in n and not n.startswith("."))
            hidden = [n for n in os.listdir(root) if ".removed-" in n]
            for name in names[:-2] + hidden:
                shutil.rmtree(root / name, ignore_errors=True)
    try:
        for _ in range(3):
            word = resumed(root).word.text
            train(str(root), word + "A" * 12, save_max=1)
    finally:
        os.kill(deleter, signal.SIGKILL)
        os.waitpid(deleter, 0)
    assert hold(root) == [37]
    assert resumed(root).digest() == Run.after("A" * 37).digest()
    assert verify(root, read_data=True).ok


@pytest.mark.parametrize("when", ["rename", "sync_directory", "unlink", "remove_directory"])
def test_one_that_vanishes_under_the_hand_that_deletes_it_is_no_fault(tmp_path: Path, when: str) -> None:
    root = tmp_path / "root"

    class Race(LocalStorage):
        """Somebody deletes the same directory just before we do."""

        def _clear(self) -> None:
            for name in os.listdir(root):
                if "iteration_00000001" in name:
                    shutil.rmtree(root / name)

        def rename(self, source: str, target: str) -> None:
            if when == "rename" and ".removed-" in target:
                self._clear()
            super().rename(source, target)

        def sync_directory(self, path: str) -> None:
            if when == "sync_directory" and any(".removed-" in n for n in os.listdir(root)):
                self._clear()
            super().sync_directory(path)

        def unlink(self, path: str) -> None:
            if when == "unlink" and ".removed-" in path:
                self._clear()
            super().unlink(path)

        def remove_directory(self, path: str) -> None:
            if when == "remove_directory" and ".removed-" in path:
                self._clear()
            super().remove_directory(path)

    train(str(root), "A")
    train(str(root), "AAA", storage=Race(), save_max=1)
    assert hold(root) == [3]
    assert not strays(root)


@pytest.mark.parametrize("operation", ["rename", "sync_directory", "unlink", "remove_directory"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY, errno.EIO, errno.EROFS])
def test_what_cannot_be_deleted_is_a_warning_and_goes_at_the_next_chance(
    tmp_path: Path, operation: str, code: int
) -> None:
    root, said = tmp_path / "root", []
    train(str(root), "A")

    def deletion(name: str, path: str) -> bool:
        if name == "sync_directory":
            return operation == name and any(".removed-" in n for n in os.listdir(root))
        return name == operation and ".removed-" in path

    # A directory that can never be synced can't be saved into either: that one fails once.
    lasting = operation != "sync_directory"
    storage = FaultStorage(LocalStorage(), at=1, action="raise", code=code, sticky=lasting, only=deletion)
    run = Run()
    with run.checkpointer(str(root), storage, False, 1) as checkpointer:
        checkpointer._save_root._say = said.append
        checkpointer.load()
        for done in (2, 3):
            run.update("A")
            checkpointer.save(Progress(done, 4 * done, 4))
    assert [line for line in said if os.strerror(code) in line], said
    assert 3 in hold(root)
    train(str(root), "AAAA", save_max=1)
    assert hold(root) == [4]
    assert not strays(root)


def test_strangers_in_the_root_stay_as_they_are_byte_for_byte(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    train(str(root), "A")
    shutil.copytree(root / "iteration_00000001", outside / "iteration_00000001")
    for name in ("iteration_00000001.bak", "iteration_0000001", "iteration_000000001", "iteration_best", "nested/root"):
        shutil.copytree(root / "iteration_00000001", root / name)
    build_checkpoint(Root(root), 77, lineage="another", sequence=1)
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    for name in (".iteration_00000001.removed-x", ".iteration_00000001.partial-XYZ-1", "iteration_00000098", ".cache"):
        (root / name).mkdir()
        (root / name / "file").write_text(name)
    (root / "iteration_00000099").symlink_to(outside / "iteration_00000001")
    (root / ".iteration_00000097.removed-3").symlink_to(outside, target_is_directory=True)
    (root / "iteration_00000096").write_text("a file of this name")
    before = {n: d for n, d in tiny.tree(tmp_path).items() if not n.startswith("root/iteration_00000001/")}
    train(str(root), "AAAAA", save_max=1)
    after = tiny.tree(tmp_path)
    changed = {n for n, d in before.items() if after.get(n) != d}
    assert changed <= {"root/events.jsonl", "root/lock", "root/latest_checkpointed_iteration.txt"}
    assert (root / "iteration_00000099").is_symlink()
    assert sorted(hold(root)) == [5, 77]


@pytest.mark.parametrize("kind", ["a file", "a directory"])
def test_what_somebody_put_into_an_old_iteration_is_not_deleted_with_it(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    train(str(root), "A")
    place = root / "iteration_00000001" / "notes"
    place.write_text("mine") if kind == "a file" else place.mkdir()
    train(str(root), "AAAA", save_max=1)
    assert place.exists()
    assert hold(root) == [1, 4]
    shutil.move(place, tmp_path / "notes")
    train(str(root), "AAAAA", save_max=1)
    assert hold(root) == [5]


def removed_by_hand(root: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(root / f"iteration_{step:08d}")


@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 2), (1, 2, 3)], ids=str)
def test_iterations_removed_by_hand_in_mid_run_do_not_matter(tmp_path: Path, gone: tuple[int, ...]) -> None:
    root, run = tmp_path / "root", Run()
    with run.checkpointer(str(root), None, False, 3) as checkpointer:
        checkpointer.load()
        for done in range(1, 7):
            run.update("A")
            checkpointer.save(Progress(done, 4 * done, 4))
            if done == 3:
                removed_by_hand(root, *gone)
            assert done in hold(root) or done == 3
            assert len(hold(root)) <= 3
    assert hold(root) == [4, 5, 6]
    assert resumed(root).word.text == "AAAAAA"


def test_a_root_removed_under_a_run_is_told_at_the_next_save(tmp_path: Path) -> None:
    root, run = tmp_path / "root", Run()
    with run.checkpointer(str(root), None, False, 3) as checkpointer:
        checkpointer.load()
        run.update("A")
        checkpointer.save(Progress(1, 4, 4))
        shutil.rmtree(root)
        run.update("A")
        with pytest.raises(SaveError, match="root"):
            checkpointer.save(Progress(2, 8, 4))


class Slow(LocalStorage):
    """Deletes nothing before it is let; while it is `small`, there is room for a save only then."""

    def __init__(self) -> None:
        super().__init__()
        self.let, self.small = threading.Event(), False

    def unlink(self, path: str) -> None:
        if ".removed-" in path:
            assert self.let.wait(20)
        super().unlink(path)

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self.let.is_set() or not self.small else 0


def test_a_save_begins_while_an_old_iteration_is_still_being_deleted(tmp_path: Path) -> None:
    storage, run = Slow(), Run()
    with run.checkpointer(str(tmp_path / "root"), storage, True, 1) as checkpointer:
        for done in (1, 2):
            checkpointer.save(Progress(done, 4 * done, 4), wait=True)
        run.update("A")
        expected = run.digest()
        checkpointer.save(Progress(3, 12, 4))
        assert any(".removed-" in name for name in strays(tmp_path / "root"))
        storage.let.set()
    assert hold(tmp_path / "root") == [3]
    assert resumed(tmp_path / "root").digest() == expected


def test_a_save_that_needs_the_room_of_what_is_being_deleted_waits_for_it(tmp_path: Path) -> None:
    storage, run = Slow(), Run()
    with run.checkpointer(str(tmp_path / "root"), storage, True, 1) as checkpointer:
        for done in (1, 2):
            checkpointer.save(Progress(done, 4 * done, 4), wait=True)
        storage.small = True
        threading.Timer(0.2, storage.let.set).start()
        checkpointer.save(Progress(3, 12, 4), wait=True)
    assert hold(tmp_path / "root") == [3]


# ---- who reads it


def test_the_one_that_a_run_was_resumed_from_goes_only_after_the_next_is_committed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    train(str(root), "AAA")
    rewind(str(root), 1)
    storage = Watched(root)
    storage.at_least = 1
    train(str(root), "AB", storage=storage, save_max=1)
    assert hold(root) == [2]
    assert resumed(root).word.text == "AB"


def test_a_source_elsewhere_is_never_touched(tmp_path: Path) -> None:
    source, root = tmp_path / "source", tmp_path / "root"
    train(str(source), "AA")
    before = tiny.tree(source)
    run = Run()
    with run.checkpointer(str(root), None, False, 1) as checkpointer:
        checkpointer.load(str(source))
        for done in range(3, 7):
            run.update("A")
            checkpointer.save(Progress(done, 4 * done, 4))
    assert hold(root) == [6]
    assert tiny.tree(source) == before
    assert resumed(root).digest() == Run.after("AAAAAA").digest()


@pytest.mark.parametrize("how", ["deleted", "exchanged", "exchanged without exchange"])
def test_a_mapped_old_file_keeps_its_bytes_whatever_becomes_of_its_name(tmp_path: Path, how: str) -> None:
    from tests.crash.storage_sweep import NoExchange

    root = tmp_path / "root"
    train(str(root), "AA")
    maps: dict[Path, mmap.mmap] = {}
    for path in sorted((root / "iteration_00000002").iterdir()):
        with open(path, "rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    before = {path: path.read_bytes() for path in maps}
    if how == "deleted":
        train(str(root), "AAAA", save_max=1)
    else:
        rewind(str(root), 1)
        train(str(root), "AB", storage=NoExchange() if "without" in how else LocalStorage())
    for path, mapped in maps.items():
        assert mapped[:] == before[path]
        assert not path.exists() or path.read_bytes() != before[path] or path.name == "common.json"
        mapped.close()


def test_a_reader_that_has_opened_a_replaced_iteration_reads_it_whole(tmp_path: Path) -> None:
    """By its handle, while its name already means another writing of the step."""
    from perdure.catalog.read import open_shards, read_iteration

    root = tmp_path / "root"
    train(str(root), "AA")
    iteration = Root(root).iterations()[1]
    with Root(root).open(iteration) as directory:
        content = read_iteration(directory)
        with open_shards(directory, content) as files:
            files.check()
            rewind(str(root), 1)
            train(str(root), "AB")
            reader, offset = files.locate("model", "weight", content.metadata.model["weight"].shards[0])
            data = bytearray(5 * 3 * 4)
            reader.pread_into(memoryview(data), offset)
    assert bytes(data) == Run.after("AA").model.weight.detach().numpy().tobytes()


@pytest.mark.timeout(120)
def test_readers_of_a_busy_root_always_find_a_whole_iteration(tmp_path: Path) -> None:
    """Choosing, again and again, while a run saves and deletes."""
    root = tmp_path / "root"
    train(str(root), "A")

    writer = os.fork()
    if writer == 0:
        code = 1
        try:
            for _ in range(8):
                word = resumed(root).word.text
                train(str(root), word + "B" * 6, save_max=2)
            code = 0
        finally:
            os._exit(code)
    looks = 0
    status = None
    while status is None:
        found = choose(Root(root)).iteration
        assert found.iteration >= 1
        looks += 1
        done, code = os.waitpid(writer, os.WNOHANG)
        status = code if done else None
        time.sleep(0.001)
    assert status == 0
    assert looks > 10
    assert verify(root, read_data=True).ok


def test_pruning_goes_by_what_stands_once_it_holds_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(tmp_path)
    for number in (1, 2, 3):
        build_checkpoint(root, number, sequence=number, parent=number - 1)
    set_tracker(root, 3)
    acquire = RootLock.acquire

    def after_a_rewind(directory: str, *, attempt: str) -> RootLock:
        rewind(str(tmp_path), 1)
        return acquire(directory, attempt=attempt)

    monkeypatch.setattr(RootLock, "acquire", after_a_rewind)
    command.main([str(tmp_path), "--keep", "1"], standalone_mode=False)
    assert hold(tmp_path) == [1]


@pytest.mark.parametrize("save_max", [1, 2, 3])
def test_a_branch_that_was_left_does_not_outlive_what_the_newest_falls_back_to(tmp_path: Path, save_max: int) -> None:
    root = str(tmp_path / "root")
    double = {"a": 1, "ab": 2, "abc": 4, "abcd": 6, "abx": 3, "abxy": 5, "abxyz": 7}.__getitem__
    train(root, "abcd", save_max=9, numbered=double)
    rewind(root, 2)
    train(root, "abx", save_max=save_max, numbered=double)
    assert 3 in hold(tmp_path / "root")
    assert (2 in hold(tmp_path / "root")) == (save_max > 1)
    assert len(hold(tmp_path / "root")) == save_max
    train(root, "abxyz", save_max=save_max, numbered=double)
    assert hold(tmp_path / "root") == {1: [7], 2: [5, 7], 3: [3, 5, 7]}[save_max]


def test_prune_keeps_what_the_newest_falls_back_to_before_a_branch_that_was_left(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    double = {"a": 1, "ab": 2, "abc": 4, "abcd": 6, "abx": 3}.__getitem__
    train(root, "abcd", save_max=9, numbered=double)
    rewind(root, 2)
    train(root, "abx", save_max=9, numbered=double)
    assert command.main([root, "--keep", "2"], standalone_mode=False) == 0
    assert hold(tmp_path / "root") == [2, 3]
