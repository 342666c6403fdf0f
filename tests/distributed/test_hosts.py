"""Several hosts: two network namespaces with host names of their own, a torchrun on each, c10d between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.distributed import jobs

HOSTS = Path(__file__).with_name("hosts.sh")


def permitted() -> bool:
    """Whether this machine lets a user make namespaces."""
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "hostname"))
    probe = "ip link add name probe0 type veth peer name probe1 && hostname probe && mount -t tmpfs none /mnt"
    return tools and subprocess.run(["unshare", "-Urn", "--uts", "--mount", "sh", "-c", probe]).returncode == 0


pytestmark = pytest.mark.skipif(not permitted(), reason="namespaces are not permitted here")


def start(folder: Path, *, apart: bool = False, deadline: str = "60") -> subprocess.Popen[bytes]:
    for name in ("cut", "code.a", "code.b"):
        (folder / name).unlink(missing_ok=True)
    words = ["unshare", "-Urn", "--uts", str(HOSTS), str(folder), sys.executable, str(int(apart))]
    words += ["train", str(folder / "run.yaml"), f"output_dir={folder / 'run'}"]
    environment = jobs.environment(PERDURE_RANK_DEADLINE=deadline, PERDURE_SHARED_DEADLINE="2")
    return subprocess.Popen(words, env=environment, cwd=folder)


def ended(folder: Path, hosts: subprocess.Popen[bytes], seconds: float) -> tuple[int, int]:
    """The exit codes of both launchers."""
    try:
        hosts.wait(seconds)
    finally:
        hosts.kill()
    return int((folder / "code.a").read_text()), int((folder / "code.b").read_text())


def told(folder: Path, host: str) -> str:
    return (folder / f"told.{host}").read_text()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_host_is_lost_and_the_same_commands_go_on_exactly(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    assert jobs.start(tmp_path / "run.yaml", tmp_path / "straight").wait(100) == [0, 0]

    hosts = start(tmp_path, deadline="10")
    end = time.monotonic() + 90
    while len(jobs.lines(tmp_path / "run")) < 6 and hosts.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    (tmp_path / "cut").touch()
    codes = ended(tmp_path, hosts, 90)
    assert codes[0] != 0
    assert codes[1] != 0
    assert "rank 1 on hostb" in told(tmp_path, "a") or "rank 0 on hostb" in told(tmp_path, "a"), told(tmp_path, "a")
    reached = len(jobs.lines(tmp_path / "run"))
    assert 6 <= reached < 12

    assert ended(tmp_path, start(tmp_path), 120) == (0, 0), told(tmp_path, "a") + told(tmp_path, "b")
    assert jobs.same_run(tmp_path / "run", tmp_path / "straight")


def test_hosts_with_disks_of_their_own_are_told_so_by_name(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(jobs.CONFIG)
    codes = ended(tmp_path, start(tmp_path, apart=True), 100)
    assert 0 not in codes
    both = told(tmp_path, "a") + told(tmp_path, "b")
    assert f"{os.path.join(tmp_path, 'run', 'checkpoint')} is not one directory for all ranks" in both
    assert "on hosta" in both
    assert "on hostb" in both
    assert not jobs.lines(tmp_path / "run")
