"""CPU seconds of `perdure --help`, `ls` and `inspect` against bare Python, interleaved; medians.

python benchmarks/start_up.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from perdure import CheckpointConfig, Checkpointer
from perdure.engine.progress import Progress


def cpu_seconds(words: list[str]) -> float:
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = CheckpointConfig(save_path=folder)
        with Checkpointer(config, model=torch.nn.Linear(4, 4), say=lambda line: None) as checkpointer:
            progress = Progress()
            progress.advance(1)
            checkpointer.save(progress)
        cases = {
            "bare Python": ["-c", "pass"],
            "perdure --help": ["-m", "perdure", "--help"],
            "perdure ls": ["-m", "perdure", "ls", folder],
            "perdure inspect": ["-m", "perdure", "inspect", folder],
            "perdure verify": ["-m", "perdure", "verify", folder],
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(9):
            for name, words in cases.items():
                times[name].append(cpu_seconds(words))
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        print(f"{name:<18}{median:>8.3f} s CPU   {median - medians['bare Python']:+.3f}")
    target = Path(__file__).parent / "results" / "start_up.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
