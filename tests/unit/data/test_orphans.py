"""No worker outlives its run: not when it ends without closing the loader, not when it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from perdure.data.loader import ResumableLoader

class Pids:
    def __len__(self): return 100
    def __getitem__(self, index): return os.getpid()

if __name__ == "__main__":
    loader = ResumableLoader(Pids(), global_batch_size=1, num_workers=2)
    steps = loader.take()
    print(*{int(data[0]) for _ in range(6) for data in next(steps)}, flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "raises":
        raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("raises", 3), ("killed", -9)])
def test_workers_end_with_the_run(tmp_path: Path, how: str, status: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", how],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == status, done.stderr
    assert done.stderr == ""
    pids = done.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"workers {alive} outlived their run"
        time.sleep(0.02)


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
