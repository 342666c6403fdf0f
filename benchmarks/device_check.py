"""Whether saving and resuming are right, bit for bit, on this machine's CUDA devices: one table, and JSON.

    python benchmarks/device_check.py [--json FILE]     0: all right, 1: something is not, 2: there is no CUDA device
    python benchmarks/device_check.py --cpu             the same checks on the CPU, to try the script itself

Takes about a minute, some 200 MB of disk in the directory for temporary files, and 100 MB of device memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from perdure import Callback, CheckpointConfig, Checkpointer, Progress, RandomState, Trainer

WIDTH = 1024
STEPS = 10


@dataclass
class Result:
    """One line of the table."""

    check: str
    right: bool
    seconds: float
    detail: str


class Net(nn.Module):
    """Parameters and buffers of every kind that a device may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.low = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(WIDTH, 64).t())
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("counts", torch.arange(10))
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.embed(x))
        hidden = self.low(hidden.to(torch.bfloat16)).float() * self.scalar
        return hidden @ self.turned.t()


def trained(device: torch.device, steps: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    """A model and optimizer with state in them."""
    torch.manual_seed(1)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        step(model, optimizer, device)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    model(torch.randint(256, (4, 32), device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything that a checkpoint must hold, on the host."""
    found = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[parameter]}/{key}"] = torch.as_tensor(value).cpu().clone()
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names whose bits are not the same."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a or name not in b or a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    )


def checkpointer(folder: Path, model: nn.Module, optimizer: Any, **more: Any) -> Checkpointer:
    config = CheckpointConfig(save_path=str(folder), auto_resume=True, async_save=more.pop("async_save", False))
    return Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None, **more)


def in_files(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors as the safetensors library reads them."""
    (directory,) = folder.glob("iteration_*")
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(str(path), "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def save_and_read(device: torch.device, folder: Path) -> str:
    """A synchronous save holds what the device holds, for the safetensors library too."""
    model, optimizer = trained(device)
    with checkpointer(folder, model, optimizer) as keep:
        keep.save(Progress(3, 12, 4))
    files, wrong = in_files(folder), []
    for name, value in model.state_dict().items():
        wrong += [] if torch.equal(files[name], value.cpu()) else [name]
    assert not wrong, f"other bits in the files: {wrong}"
    again, fresh = trained(device, 0)
    with checkpointer(folder, again, fresh) as keep:
        keep.load()
    wrong = differing(values(model, optimizer), values(again, fresh))
    assert not wrong, f"other bits after loading: {wrong}"
    return f"{sum(v.numel() * v.element_size() for v in files.values()) / 2**20:.0f} MiB equal"


def save_in_background(device: torch.device, folder: Path) -> str:
    """What an asynchronous save holds is the state at the call, though it is overwritten as soon as that returns."""
    model, optimizer = trained(device)
    expected = values(model, optimizer)
    with checkpointer(folder, model, optimizer, async_save=True) as keep:
        busy(device)
        began = time.monotonic()
        keep.save(Progress(3, 12, 4))
        stall = time.monotonic() - began
        with torch.no_grad():
            for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                tensor.zero_()
        for _ in range(3):
            step(model, optimizer, device)
        keep.wait()
        memory = keep._runner._snapshot._memory
    again, fresh = trained(device, 0)
    with checkpointer(folder, again, fresh) as keep:
        keep.load()
    wrong = differing(expected, values(again, fresh))
    assert not wrong, f"other bits than at the call: {wrong}"
    assert memory is not None
    assert device.type == "cpu" or memory.is_pinned(), "the snapshot was not taken into pinned memory"
    return f"returned after {1000 * stall:.0f} ms, {'pinned' if memory.is_pinned() else 'plain'} memory"


def busy(device: torch.device) -> None:
    """Keeps the present stream at work for a while, so that whoever does not wait for it reads too early."""
    big = torch.randn(2048, 2048, device=device)
    for _ in range(60 if device.type == "cuda" else 1):
        big = big @ big.t() / 2048


def on_a_side_stream(device: torch.device, folder: Path) -> str:
    """Training, saving and loading on a stream that is not the default one."""
    if device.type == "cpu":
        return "left out: a CPU has no streams"
    with torch.cuda.stream(torch.cuda.Stream(device)):
        model, optimizer = trained(device, 1)
        for background in (False, True):
            busy(device)
            step(model, optimizer, device)
            path = folder / str(background)
            with checkpointer(path, model, optimizer, async_save=background) as keep:
                keep.save(Progress(2 + background, 8, 4))
            expected = values(model, optimizer)
            again, fresh = trained(device, 0)
            busy(device)
            with checkpointer(path, again, fresh) as keep:
                keep.load()
            wrong = differing(expected, values(again, fresh))
            assert not wrong, f"other bits: {wrong}"
    return "sync and async"


def on_the_last_device(device: torch.device, folder: Path) -> str:
    """A model on another device than the current one."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return "left out: there is one device"
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    save_in_background(other, folder / "background")
    save_and_read(other, folder / "plain")
    return str(other)


class StopAt(Callback):
    """Ends a run after a step, as a signal would."""

    def on_step_begin(self, trainer: Any, state: Any) -> None:
        if state.global_step == STEPS // 2:
            os.kill(os.getpid(), 10)


def configuration(output: Path) -> dict[str, Any]:
    return {
        "training": {"steps": STEPS, "local_batch_size": 2, "global_batch_size": 8, "seed": 1, "deterministic": True},
        "model": {
            "type": "decoder",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "dropout": 0.1,
        },
        "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 1e-3, "warmup_ratio": 0.1},
        "train_dataset": {
            "num_parallel_workers": 0,
            "dataloader": {"type": "Text", "path": "python-docs", "seq_length": 64, "shuffle": True},
        },
        "checkpoint": {"auto_resume": True, "save_interleaved_steps": 100},
        "output_dir": str(output),
    }


def losses(output: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"], r["samples"]) for r in rows if "loss" in r]


def resume(device: torch.device, folder: Path) -> str:
    """A run that is stopped and resumed has the losses of one that is not, bit for bit, dropout and all."""
    Trainer(configuration(folder / "straight")).train()
    stopped = Trainer(configuration(folder / "stopped"), callbacks=[StopAt()]).train()
    assert stopped.stop_signal == 10, "the run was not stopped"
    reached = Trainer(configuration(folder / "stopped")).train()
    assert reached.global_step == STEPS, "the run did not get to its end"
    straight, resumed = losses(folder / "straight"), losses(folder / "stopped")
    assert straight == resumed, f"other losses: {[a for a, b in zip(straight, resumed, strict=False) if a != b][:2]}"
    assert all(math.isfinite(row[1]) for row in straight)
    return f"{STEPS} losses equal, stopped at {stopped.global_step}"


def random_streams(device: torch.device, folder: Path) -> str:
    """`RandomState` brings the device's generator back."""
    model, optimizer = trained(device)
    with checkpointer(folder, model, optimizer, extra={"random": RandomState()}) as keep:
        keep.save(Progress(3, 12, 4))
    expected = torch.rand(1000, device=device).cpu()
    with checkpointer(folder, model, optimizer, extra={"random": RandomState()}) as keep:
        keep.load()
    assert torch.equal(expected, torch.rand(1000, device=device).cpu()), "other draws after loading"
    return "1000 draws equal"


def ranks(device: torch.device, folder: Path) -> str:
    """torchrun with one rank a device (two on a CPU), FSDP2: stopped, resumed, equal; NCCL where there is CUDA."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    folder.mkdir(parents=True)
    for name, steps in (("straight", STEPS), ("stopped", STEPS // 2), ("stopped", STEPS)):
        config = configuration(folder / name)
        config["training"] |= {"steps": steps, "global_batch_size": 2 * count}
        config["lr_scheduler"]["total_steps"] = STEPS
        (folder / "run.yaml").write_text(json.dumps(config))
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
        done = subprocess.run(
            [*words, __file__, "--rank", str(folder / "run.yaml")], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-1000:]
    assert losses(folder / "straight") == losses(folder / "stopped"), "other losses"
    return f"{count} rank{'s' * (count > 1)}, {'NCCL' if device.type == 'cuda' else 'gloo'}, FSDP2 state"


def one_rank(config: str) -> None:
    """What each rank of `ranks` runs: sharded state through a process group, then the run itself."""
    from torch.distributed.fsdp import fully_shard

    from perdure.engine.join import end_process, join, leave_together
    from perdure.engine.ranks import Ranks
    from perdure.train.build import device as own_device

    device = own_device(deterministic=True)
    join(120)
    group = torch.ones(1, device=device)
    torch.distributed.all_reduce(group)
    assert int(group) == torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, 333).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH, device=device)).sum().backward()
    optimizer.step()
    sharded: Any = model.weight
    expected = sharded.to_local().clone()
    path = Path(config).parent / "sharded"
    keep = checkpointer(path, model, optimizer, async_save=True, ranks=Ranks())
    keep.load()
    keep.save(Progress(1, 1, 1))
    with torch.no_grad():
        sharded.to_local().zero_()
    keep.close()
    keep = checkpointer(path, model, optimizer, ranks=Ranks())
    keep.load()
    assert torch.equal(sharded.to_local(), expected), "other bits in a sharded parameter"
    keep.close()
    Trainer(config).train()
    leave_together()
    end_process(0)


CHECKS: dict[str, Callable[[torch.device, Path], str]] = {
    "save, read back, load": save_and_read,
    "save in the background, overwritten at once": save_in_background,
    "the same on a stream of one's own": on_a_side_stream,
    "the same on another device": on_the_last_device,
    "stop and resume": resume,
    "random numbers of the device": random_streams,
    "ranks of a job": ranks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try the script itself, without a device")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    parser.add_argument("--rank", metavar="CONFIG", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        one_rank(arguments.rank)
        return 0
    if not arguments.cpu and not torch.cuda.is_available():
        print("there is no CUDA device here: nothing was checked (--cpu tries the script itself)", file=sys.stderr)
        return 2
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", torch.cuda.current_device())
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    machine = {
        "device": "CPU" if arguments.cpu else torch.cuda.get_device_name(device),
        "devices": 0 if arguments.cpu else torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    results = []
    with tempfile.TemporaryDirectory(prefix="perdure-device-check-") as folder:
        for number, (name, check) in enumerate(CHECKS.items()):
            began, right = time.monotonic(), True
            try:
                detail = check(device, Path(folder) / str(number))
            except Exception as error:
                right, detail = False, f"{type(error).__name__}: {error}"
            results.append(Result(name, right, round(time.monotonic() - began, 2), detail))
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for result in results:
        print(f"{'right' if result.right else 'WRONG':<7}{result.check:<46}{result.seconds:>7.2f} s  {result.detail}")
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"machine": machine, "checks": [asdict(r) for r in results]}, indent=1)
        )
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
