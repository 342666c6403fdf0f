"""A tiny run whose every bit can be compared: dropout, AdamW, warm-up and cosine, shuffled samples with noise."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perdure import Callback, Checkpointer, CommonInfo, Trainer
from perdure.catalog.root import Iteration, Root
from perdure.errors import PerdureError
from perdure.train.history import read_lines, superseded

LENGTH = 37


class Noisy(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that carry their index and noise of their own; `reads` counts what was really read."""

    def __init__(self, length: int = LENGTH, name: str = "noisy") -> None:
        self.length, self.name, self.reads = length, name, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        self.reads += 1
        x = torch.full((4,), index / self.length) + 0.1 * torch.randn(4)
        return index, x, x.sum(0, keepdim=True)

    def identity(self) -> dict[str, Any]:
        return {"type": "Noisy", "length": self.length, "fingerprint": self.name}


class Net(nn.Module):
    """A small network with dropout, and nothing that depends on the size of a micro-batch."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return out


class Recorder(Callback):
    """Notes every hook with its step; what it counts is saved and restored with the run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.ids: list[tuple[int, list[int]]] = []
        self.steps = 0

    def on_train_begin(self, trainer: Any, state: Any) -> None:
        self.seen.append(("begin", state.global_step))

    def on_step_begin(self, trainer: Any, state: Any) -> None:
        self.seen.append(("step_begin", state.global_step))

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.seen.append(("step_end", state.global_step))
        self.steps += 1

    def on_save(self, trainer: Any, state: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_train_end(self, trainer: Any, state: Any) -> None:
        self.seen.append(("end", state.global_step))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class SignalAt(Callback):
    """Sends this process a signal when a step has ended, as a scheduler would."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, trainer: Any, state: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Stubborn(Callback):
    """Says that it is there, and keeps the step from ending."""

    def on_step_begin(self, trainer: Any, state: Any) -> None:
        Path("stuck").touch()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.01)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean over a micro-batch."""
    return nn.functional.mse_loss(model(batch[1]).float(), batch[2])


def config(output: Path, steps: int = 12, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration; sections are merged into the usual ones key by key."""
    base: dict[str, dict[str, Any]] = {
        "training": {"steps": steps, "local_batch_size": 2, "global_batch_size": 4, "seed": 3},
        "lr_scheduler": {"type": "CosineWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 3, "total_steps": 40},
        "train_dataset": {"num_parallel_workers": 0, "dataloader": {"shuffle": True}},
        "checkpoint": {"auto_resume": True, "save_interleaved_steps": 5, "save_max": 3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return {**base, "output_dir": str(output)}


def trainer(
    output: Path,
    steps: int = 12,
    *,
    model: Callable[[], nn.Module] = Net,
    data: Any = None,
    loss: Callable[[nn.Module, Any], Any] = loss_of,
    callbacks: tuple[Callback, ...] = (),
    extra: dict[str, Any] | None = None,
    given_optimizer: Callable[[nn.Module], Any] | None = None,
    **sections: dict[str, Any],
) -> Trainer:
    """A trainer of the tiny run, its model drawn as on the very first start."""
    torch.manual_seed(7)
    built = model()
    return Trainer(
        config(output, steps, **sections),
        model=built,
        optimizer=given_optimizer(built) if given_optimizer is not None else None,
        train_dataset=Noisy() if data is None else data,
        compute_loss_func=loss,
        callbacks=callbacks,
        extra=extra,
    )


def trace(output: Path) -> list[tuple[Any, ...]]:
    """What every standing step did: step, loss, rate, norm, samples, position, ids."""
    metrics = superseded(read_lines(str(output / "metrics.jsonl")))
    ledger = superseded(read_lines(str(output / "ledger.jsonl")))
    keys = ("step", "loss", "learning_rate", "grad_norm", "samples", "consumed_samples")
    return [(*(m[k] for k in keys), row["ids"]) for m, row in zip(metrics, ledger, strict=True)]


def newest(root: Path) -> Iteration:
    """The iteration that was saved last."""
    return max(Root(str(root)).iterations(), key=lambda i: i.commit.sequence)


def numbers(root: Path) -> list[int]:
    """The committed iterations in the order of their saves."""
    return [i.iteration for i in sorted(Root(str(root)).iterations(), key=lambda i: i.commit.sequence)]


def common(iteration: Iteration) -> CommonInfo:
    return CommonInfo.decode((Path(iteration.path) / "common.json").read_bytes(), "common.json")


def state(iteration: Iteration, *sections: str) -> dict[str, str]:
    """Digest of every tensor of an iteration."""
    metadata = json.loads((Path(iteration.path) / "metadata.json").read_text())
    return {
        f"{section}:{name}": record["shards"][0][3]
        for section in sections or ("model", "optimizer", "extra")
        for name, record in metadata[section].items()
    }


def tree(directory: Path, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Digest of every file below a directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in but
    }


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's tensors."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal in every bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its exit status, or minus the signal that ended it.

    A `PerdureError` gives its exit code; anything else that is raised gives 99.
    """
    with warnings.catch_warnings():
        # The child touches no thread of the parent's.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        code = 99
        try:
            work()
            code = 0
        except PerdureError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def kill_self() -> None:
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def save_once(checkpointer: Checkpointer, step: int, batch: int = 4) -> None:
    """Saves as step number `step` and returns when it is committed."""
    from perdure import Progress

    checkpointer.save(Progress(step, step * batch, batch), wait=True)
