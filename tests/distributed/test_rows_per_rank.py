"""Data that split themselves over ranks: each rank's state is saved, restored, and needs the same ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import tiny

from perdure.errors import PerdureError
from perdure.train.audit import audit

ROOT = Path(__file__).parents[2]


class Odds:
    """Rank r of two has the numbers that leave r when halved."""

    shards_itself = True

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        rank = dist.get_rank() if dist.is_initialized() else 0
        samples = tiny.Noisy()
        while self.at < tiny.LENGTH // 2:
            self.at += 1
            yield samples[2 * self.at - 1 - rank]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def run(output: Path, steps: int, workers: int = 0) -> None:
    settings = {"num_parallel_workers": workers}
    parallel = {"data_parallel_replicate": dist.get_world_size() if dist.is_initialized() else 1}
    tiny.trainer(output, steps, data=Odds(), train_dataset=settings, parallelism=parallel).train()


def test_states_of_ranks_go_on_and_other_ranks_are_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny.trace(tmp_path / "run") == tiny.trace(tmp_path / "straight")
    assert audit(str(tmp_path / "run")).ok
    with pytest.raises(PerdureError, match="by 2 ranks, and there are 1 now"):
        run(tmp_path / "run", 14)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    where = Path(sys.argv[1])
    run(where / "straight", 12)
    for steps, workers in ((4, 0), (7, 1), (12, 0)):
        run(where / "run", steps, workers)
    dist.barrier()
    dist.destroy_process_group()
