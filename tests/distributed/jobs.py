"""Jobs of several ranks as real processes, started without a launcher, so that nobody but the ranks ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from perdure.train.history import read_lines, superseded

CONFIG = """
training: {steps: 12, local_batch_size: 2, global_batch_size: 8, seed: 42}
model: {type: decoder, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, dropout: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 1e-3, warmup_ratio: 0.1}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 32, shuffle: true}}
checkpoint: {auto_resume: true, save_interleaved_steps: 4, save_max: 2, async_save: true}
"""
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Job:
    """Ranks that run."""

    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def told(self) -> list[str]:
        """What each rank has said on stderr so far."""
        return [file.read_text() for file in self.files]

    def wait(self, seconds: float) -> list[int]:
        """The exit codes; fails when a rank still runs after so long."""
        end = time.monotonic() + seconds
        try:
            return [rank.wait(max(end - time.monotonic(), 0.1)) for rank in self.ranks]
        except subprocess.TimeoutExpired as error:
            raise AssertionError(self.told) from error
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends what is left."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def environment(**more: str) -> dict[str, str]:
    """What a rank's process gets."""
    path = f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PERDURE_RANK_DEADLINE": "60", **more}


def start(
    config: Path,
    output: Path,
    *overrides: str,
    size: int = 2,
    ranks: tuple[int, ...] = (),
    module: str = "perdure",
    **env: str,
) -> Job:
    """Starts a job; `ranks` are those that really come (default: all), `module` is what they run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", module, "train", str(config), f"output_dir={output}", *overrides]
    job, folder = Job(), Path(tempfile.mkdtemp(dir=output.parent))
    for rank in ranks or range(size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        job.files.append(folder / f"{rank}.err")
        with job.files[-1].open("wb") as file:
            job.ranks.append(subprocess.Popen(words, stderr=file, env=environment(**place, **env), cwd=output.parent))
    return job


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def lines(output: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    """The standing lines of a history; none where it does not exist yet."""
    path = output / name
    return superseded(read_lines(str(path))) if path.exists() else []


def until(condition: object, job: Job, seconds: float = 100) -> None:
    """Waits for something that a running job does."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "the job did not get there"
        assert any(rank.poll() is None for rank in job.ranks), job.told
        time.sleep(0.01)


def same_run(one: Path, other: Path) -> bool:
    """Whether two runs did the same steps on the same samples, bit for bit."""
    keys = ("step", "loss", "learning_rate", "grad_norm", "samples")
    return [[m[k] for k in keys] for m in lines(one)] == [[m[k] for k in keys] for m in lines(other)] and [
        m["ids"] for m in lines(one, "ledger.jsonl")
    ] == [m["ids"] for m in lines(other, "ledger.jsonl")]
