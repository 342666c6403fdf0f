"""A fault storage numbers what changes something, and acts at the number it is told."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.storage.base import Storage
from perdure.storage.faults import FaultStorage
from perdure.storage.local import LocalStorage


def everything(storage: Storage, root: Path) -> None:
    """Every changing operation once, with reading ones between them."""
    base = str(root / "d")
    storage.make_directory(base)
    writer = storage.create(f"{base}/f", 10)
    writer.pwrite(b"0123456789", 0)
    writer.finish(10)
    storage.write(f"{base}/g", b"x")
    storage.append(f"{base}/g", b"y", True)
    storage.list(base)
    storage.exchange(f"{base}/f", f"{base}/g")
    storage.rename(f"{base}/f", f"{base}/h")
    with storage.open_directory(base) as directory:
        directory.names()
        directory.read("h", 10)
        reader = directory.open("g")
        reader.pread_into(memoryview(bytearray(5)), 0)
        reader.close()
    storage.unlink(f"{base}/g")
    storage.unlink(f"{base}/h")
    storage.sync_directory(base)
    storage.remove_directory(base)


CHANGES = [
    *("make_directory", "create", "pwrite", "finish", "write", "append", "exchange", "rename", "unlink", "unlink"),
    *("sync_directory", "remove_directory"),
]


def test_changing_operations_are_numbered_from_one(tmp_path: Path) -> None:
    storage = FaultStorage(LocalStorage())
    everything(storage, tmp_path)
    assert [name for name, _ in storage.log] == CHANGES
    assert os.listdir(tmp_path) == []


def test_reads_are_numbered_on_wish(tmp_path: Path) -> None:
    storage = FaultStorage(LocalStorage(), reads=True)
    everything(storage, tmp_path)
    names = [name for name, _ in storage.log]
    assert names[names.index("open_directory") :][:5] == ["open_directory", "names", "read", "open", "pread_into"]
    assert [n for n in names if n in CHANGES] == CHANGES


@pytest.mark.parametrize("at", range(1, len(CHANGES) + 1))
def test_raising_at_each_number(tmp_path: Path, at: int) -> None:
    storage = FaultStorage(LocalStorage(), at=at, action="raise", code=errno.EIO)
    with pytest.raises(OSError, match=f"operation {at}, {CHANGES[at - 1]}") as caught:
        everything(storage, tmp_path)
    assert caught.value.errno == errno.EIO
    assert len(storage.log) == at


def test_only_what_is_chosen_is_numbered(tmp_path: Path) -> None:
    storage = FaultStorage(LocalStorage(), at=2, action="raise", only=lambda name, path: name == "unlink")
    with pytest.raises(OSError, match="operation 2, unlink"):
        everything(storage, tmp_path)
    assert storage.log == [("unlink", str(tmp_path / "d" / "g")), ("unlink", str(tmp_path / "d" / "h"))]


@pytest.mark.parametrize(("sticky", "second"), [(True, False), (False, True)])
def test_a_sticky_fault_stays(tmp_path: Path, sticky: bool, second: bool) -> None:
    storage = FaultStorage(LocalStorage(), at=1, action="raise", sticky=sticky)
    with pytest.raises(OSError, match="injected"):
        storage.make_directory(str(tmp_path / "a"))
    if second:
        storage.make_directory(str(tmp_path / "b"))
    else:
        with pytest.raises(OSError, match="injected"):
            storage.make_directory(str(tmp_path / "b"))
    assert (tmp_path / "b").exists() == second


@pytest.mark.parametrize(("action", "made"), [("kill-before", False), ("kill-after", True)])
def test_dying_before_or_after(tmp_path: Path, action: str, made: bool) -> None:
    program = (
        "import sys; from perdure.storage.faults import FaultStorage; from perdure.storage.local import LocalStorage\n"
        "FaultStorage(LocalStorage(), at=1, action=sys.argv[1]).make_directory(sys.argv[2])"
    )
    path = tmp_path / "d"
    done = subprocess.run([sys.executable, "-c", program, action, str(path)], check=False, env=_environment())
    assert done.returncode == -signal.SIGKILL
    assert path.exists() == made


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
