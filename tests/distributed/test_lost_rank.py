"""A rank killed with -9 ends the job; the same command brings it back, exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.distributed import jobs

CONFIG = """
training: {steps: 40, local_batch_size: 2, global_batch_size: 8, seed: 42}
model: {type: decoder, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, dropout: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 1e-3, warmup_ratio: 0.1}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 32, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 4, save_max: 2, async_save: true}
"""


def start(folder: Path, output: Path) -> subprocess.Popen[bytes]:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "perdure", "train"]
    words += [str(folder / "run.yaml"), f"output_dir={output}"]
    return subprocess.Popen(
        [sys.executable, *words], stderr=subprocess.DEVNULL, env={**os.environ, "PERDURE_RANK_DEADLINE": "30"}
    )


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    straight, lost = tmp_path / "straight", tmp_path / "lost"
    assert start(tmp_path, straight).wait(90) == 0
    for victim in (1, 0):
        launcher, before = start(tmp_path, lost), len(jobs.lines(lost))
        while launcher.poll() is None and len(jobs.lines(lost)) < before + 6:
            time.sleep(0.01)
        os.kill(jobs.ranks_of(launcher.pid)[victim], signal.SIGKILL)
        assert launcher.wait(60) != 0
    assert start(tmp_path, lost).wait(90) == 0
    assert jobs.same_run(lost, straight)
    newest = [root / "checkpoint" / "iteration_00000040" for root in (straight, lost)]
    compared = subprocess.run(
        [sys.executable, "-m", "perdure", "diff", "--section", "model", *map(str, newest)],
        capture_output=True,
        text=True,
    )
    assert compared.returncode == 0, compared.stdout
