"""A loop of one's own, and what resuming must not cost: reads, opens, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn

from perdure import CheckpointConfig, Checkpointer, Progress, ResumableLoader


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


# ---- a loop of one's own


def own_loop(output: Path, total: int, stop: int, extra: dict[str, Any]) -> tuple[list[Any], nn.Module]:
    from perdure.state.random import seed_streams

    torch.manual_seed(1)
    model = tiny.Net()
    optimizer = adam(model)
    loader = ResumableLoader(tiny.Noisy(), global_batch_size=6, local_batch_size=3, seed=5)
    config = CheckpointConfig(save_path=str(output), auto_resume=True, save_interleaved_steps=2, async_save=True)
    seen = []
    with Checkpointer(config, model=model, optimizer=optimizer, extra=extra) as checkpointer:
        progress = checkpointer.load()
        loader.resume(progress)
        for batch in loader.take(total - progress.global_step):
            seed_streams(5, batch.first)
            for micro in batch:
                tiny.loss_of(model, micro).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            progress.advance(global_batch_size=6)
            seen.append((progress.global_step, [m.ids for m in batch.micro_batches]))
            checkpointer.step(progress)
            if progress.global_step == stop:
                break
        checkpointer.save(progress, wait=True)
    return seen, model


def test_a_loop_of_ones_own_resumes_in_every_bit(tmp_path: Path) -> None:
    whole, expected = own_loop(tmp_path / "a", 15, 15, {})
    parts: list[Any] = []
    for stop in (1, 4, 7, 15):
        seen, model = own_loop(tmp_path / "b", 15, stop, {})
        parts += seen
    assert parts == whole
    assert tiny.same(tiny.weights(model), tiny.weights(expected))


def test_captured_random_state_is_an_object_like_any_other(tmp_path: Path) -> None:
    import random

    import numpy

    from perdure import RandomState

    def draws() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    model = tiny.Net()
    config = CheckpointConfig(save_path=str(tmp_path), auto_resume=True)
    with Checkpointer(config, model=model, optimizer=adam(model), extra={"rng": RandomState()}) as checkpointer:
        checkpointer.load()
        checkpointer.save(Progress(1, 4, 4), wait=True)
    expected = draws()
    draws()
    with Checkpointer(config, model=model, optimizer=adam(model), extra={"rng": RandomState()}) as checkpointer:
        checkpointer.load()
    assert draws() == expected


# ---- size and speed, by counting


def test_far_into_huge_data_nothing_skipped_is_read(tmp_path: Path) -> None:
    class Huge(tiny.Noisy):
        def identity(self) -> dict[str, Any]:
            return {"type": "Huge", "length": self.length}

    model = tiny.Net()
    step, length = 4_000_000, 20_000_000
    with Checkpointer(
        CheckpointConfig(save_path=str(tmp_path), auto_resume=True), model=model, optimizer=adam(model)
    ) as checkpointer:
        checkpointer.load()
        tiny.save_once(checkpointer, step)
    for shuffle in (True, False):
        data = Huge(length)
        loader = ResumableLoader(data, global_batch_size=4, seed=5, shuffle=shuffle)
        loader.resume(Progress(step, 4 * step, 4))
        (batch,) = loader.take(1)
        assert batch.first == 4 * step
        assert data.reads == 4


def test_a_shard_file_is_opened_once_however_many_tensors_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ParameterDict({f"p{number}": nn.Parameter(torch.full((3,), float(number))) for number in range(5000)})
    config = CheckpointConfig(save_path=str(tmp_path), auto_resume=True)
    with Checkpointer(config, model=model) as checkpointer:
        checkpointer.load()
        tiny.save_once(checkpointer, 1)
    opens: list[str] = []
    plain = os.open

    def counting(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path).endswith(".safetensors"):
            opens.append(str(path))
        return plain(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", counting)
    other = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in model})
    weights = CheckpointConfig(load_path=str(tmp_path), no_load_optim=True, enable_save=False)
    with Checkpointer(weights, model=other) as checkpointer:
        checkpointer.load()
    assert torch.equal(other["p4999"], model["p4999"])
    assert len(opens) <= 2


PEAK = """
import sys
import torch
from torch import nn
from perdure import CheckpointConfig, Checkpointer, Progress

what, root = sys.argv[1:]
model = nn.ParameterList([nn.Parameter(torch.ones(4 << 20)) for _ in range(4)])  # 64 MiB
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if what == "save":
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def run():
    config = CheckpointConfig(save_path=root, auto_resume=True)
    with Checkpointer(config, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.load()
        if what == "save":
            checkpointer.save(Progress(1, 1, 1))


def told(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith(key))


open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
before = told("VmRSS")
run()
print(told("VmHWM") - before)
"""


def test_saving_and_loading_hold_no_copy_of_the_state(tmp_path: Path) -> None:
    def rise(what: str) -> int:
        words = [sys.executable, "-c", PEAK, what, str(tmp_path)]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    largest, slack = 16, 64
    assert rise("save") <= largest + slack
    # The moments, 128 MiB, are what a load has to make.
    assert rise("load") <= 128 + largest + slack
