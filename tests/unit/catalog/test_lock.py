"""One living writer per root; the dead are known at once, and who was taken over cannot publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.catalog import lock as lock_module
from perdure.catalog.lock import RootLock
from perdure.errors import RootLockedError, SaveError, UsageError

HOLD = """
import sys, time
from perdure.catalog.lock import RootLock
lock = RootLock.acquire(sys.argv[1], attempt="beef")
print("held", flush=True)
if len(sys.argv) > 2:
    import os
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
    print(pid, flush=True)
time.sleep(60)
"""


def hold(path: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_writer_is_refused_with_who_holds_it_and_since_when(tmp_path: Path) -> None:
    with hold(tmp_path) as process:
        with pytest.raises(RootLockedError, match=f"process {process.pid} on .*, since 20") as caught:
            RootLock.acquire(str(tmp_path), attempt="1")
        assert caught.value.exit_code == 12
        process.kill()
        process.wait()
        RootLock.acquire(str(tmp_path), attempt="1").release()


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_lock(tmp_path: Path) -> None:
    with hold(tmp_path, "fork") as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        process.kill()
        process.wait()
        RootLock.acquire(str(tmp_path), attempt="1").release()
        os.kill(orphan, 9)


def test_the_same_process_cannot_take_it_twice_but_again_after_release(tmp_path: Path) -> None:
    lock = RootLock.acquire(str(tmp_path), attempt="1")
    with pytest.raises(RootLockedError, match="by this process itself"):
        RootLock.acquire(str(tmp_path), attempt="2")
    lock.release()
    RootLock.acquire(str(tmp_path), attempt="2").release()


def test_the_file_says_who(tmp_path: Path) -> None:
    lock = RootLock.acquire(str(tmp_path), attempt="77", now=lambda: 5.0)
    line = json.loads((tmp_path / "lock").read_text())
    assert (line["pid"], line["attempt"], line["since"]) == (os.getpid(), "77", 5.0)
    lock.release()


def test_who_was_taken_over_finds_out_before_publishing(tmp_path: Path) -> None:
    lock = RootLock.acquire(str(tmp_path), attempt="1")
    lock.check()
    os.unlink(tmp_path / "lock")
    assert not lock.still_mine()
    other = RootLock.acquire(str(tmp_path), attempt="2")
    with pytest.raises(SaveError, match="taken this root over"):
        lock.check()
    lock.release()
    other.check()
    other.release()


def test_the_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    os.symlink(tmp_path / "precious", tmp_path / "lock")
    with pytest.raises(UsageError, match="no plain file"):
        RootLock.acquire(str(tmp_path), attempt="1")
    assert (tmp_path / "precious").read_text() == "keep"


class Clock:
    """A clock that runs by sleeping; at `beats` the holder's heartbeat moves."""

    def __init__(self, path: Path, beats: float | None = None) -> None:
        self.path, self.beats, self.at = path, beats, 0.0

    def __call__(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        if self.beats is not None and self.at >= self.beats:
            os.utime(self.path, (1.0, self.at))


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch, path: Path, **holder: object) -> None:
    monkeypatch.setattr(lock_module, "_lock", lambda fd: None)
    place = lock_module._place()
    path.write_text(json.dumps({**place, "pid": 1, "started": "never", "attempt": "0", "since": 1.0, **holder}))


def test_without_kernel_locks_a_dead_holder_on_this_host_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch, tmp_path / "lock")
    clock = Clock(tmp_path / "lock")
    lock = RootLock.acquire(str(tmp_path), attempt="1", clock=clock, sleep=clock.sleep)
    assert clock.at < 1
    lock.check()
    lock.release()


def test_without_kernel_locks_a_living_holder_on_this_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.getppid()
    without_kernel_locks(monkeypatch, tmp_path / "lock", pid=other, started=lock_module._start_time(other))
    with pytest.raises(RootLockedError, match=f"process {other}"):
        RootLock.acquire(str(tmp_path), attempt="1")


def test_without_kernel_locks_another_host_is_taken_over_after_a_minutes_standstill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch, tmp_path / "lock", host="elsewhere", boot="other")
    clock = Clock(tmp_path / "lock")
    lock = RootLock.acquire(str(tmp_path), attempt="1", clock=clock, sleep=clock.sleep)
    assert clock.at >= 60
    lock.release()


def test_without_kernel_locks_a_beating_heart_on_another_host_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch, tmp_path / "lock", host="elsewhere", boot="other")
    clock = Clock(tmp_path / "lock", beats=10)
    with pytest.raises(RootLockedError, match="elsewhere"):
        RootLock.acquire(str(tmp_path), attempt="1", clock=clock, sleep=clock.sleep)
    assert clock.at < 60
