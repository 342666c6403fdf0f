"""Optimizers and precisions on two ranks under FSDP2, tensor and pipeline cuts: one job for many small runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.distributed.precision_job import CASES, OPTIMIZERS, run

from perdure.train.callbacks.ema import EMA

SOME = [
    "AdamW bfloat16",
    "AdamW-fused float16",
    "AdamW-foreach policy",
    "Adam float32",
    "SGD float16",
    "Muon bfloat16",
    "Adafactor bfloat16",
    "third-party bfloat16",
]
SPECIAL = [name for name in CASES if name.split()[0] not in OPTIMIZERS]
SCRIPT = Path(__file__).with_name("precision_job.py")
REPOSITORY = Path(__file__).parents[2]


def job(folder: Path, *names: str) -> None:
    """Runs cases on two ranks; what a failed one says is what this fails with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}",
        "OMP_NUM_THREADS": "1",
        "PERDURE_RANK_DEADLINE": "60",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    words = [sys.executable, str(SCRIPT), str(folder), *names]
    files = [folder / f"rank{rank}.err" for rank in range(2)]
    ranks = []
    for rank, file in enumerate(files):
        with file.open("wb") as out:
            ranks.append(subprocess.Popen(words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=out))
    try:
        codes = [each.wait(500) for each in ranks]
    finally:
        for each in ranks:
            if each.poll() is None:
                each.kill()
                each.wait()
    told = "\n".join(file.read_text() for file in files)
    assert codes == [0, 0], told[told.find("FAILED") :][:6000]
    assert all(f"PASSED {name}\n" in told for name in names)


@pytest.mark.timeout(600)
def test_on_two_ranks_masters_optimizers_averages_and_adapters_are_exact(tmp_path: Path) -> None:
    job(tmp_path, *SOME, *SPECIAL)
    # What two ranks hold in parts is whole on one.
    seen: dict[str, torch.Tensor] = {}

    class Look(tiny.Callback):
        def on_train_begin(self, trainer: Any, state: Any) -> None:
            assert state.global_step == 7
            seen.update({name: value.clone() for name, value in ema.weights.items()})

    ema = EMA(0.75)
    run(tmp_path / "average" / "b", 8, "AdamW", "bfloat16", callbacks=(ema, Look()))
    assert tiny.same(seen, load_file(tmp_path / "average" / "exported" / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_optimizer_in_every_precision_on_two_ranks(tmp_path: Path) -> None:
    job(tmp_path, *(name for name in CASES if name not in (*SOME, *SPECIAL)))
