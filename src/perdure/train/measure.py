"""What saving and loading cost on this storage, measured with our own writer and reader; and how often to save."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.errors import UsageError
from perdure.storage.local import LocalStorage
from perdure.storage.memory import address_of, aligned

__all__ = ["Measured", "Observed", "measure", "observe", "synthetic"]

_BLOCK = 8 << 20
_ROUNDS = 5
_BUDGET_S = 40.0


@dataclass(frozen=True)
class Measured:
    """Medians in seconds, for `bytes` of state: model and optimizer.

    Attributes:
        copy_s: one copy of the state in memory.
        raw_write_s: as many bytes written durably, without digests, by the same means.
        raw_read_s: as many bytes read; past the page cache where the file system allows it.
        save_s: a save that waits for its commit.
        load_s: a full resume into objects that are there.
        stall_s: how long `step` takes with `async_save`.
        background_s: from its start until that save is committed.
    """

    bytes: int
    copy_s: float
    raw_write_s: float
    raw_read_s: float
    save_s: float
    load_s: float
    stall_s: float
    background_s: float


@dataclass(frozen=True)
class Observed:
    """What the events of a root tell of its runs; None for what they don't.

    Attributes:
        mtbf_s: mean time between resumes, which stand for interruptions.
        step_s: mean seconds of a step, saves included.
        bytes: size of the newest committed iteration.
    """

    mtbf_s: float | None = None
    step_s: float | None = None
    bytes: int | None = None


def observe(path: str) -> Observed:
    """Looks at a root's history; a directory that is none, or an empty one, tells nothing."""
    root = Root(os.path.abspath(path))
    if not root.storage.is_directory(root.path):
        return Observed()
    iterations = root.iterations()
    if not iterations:
        return Observed()
    events = [e for e in read_events(root) if isinstance(e.get("time"), int | float)]
    saves = [e for e in events if e["event"] == "save" and isinstance(e.get("step"), int)]
    loads = sum(e["event"] == "load" for e in events)
    span = events[-1]["time"] - events[0]["time"] if events else 0.0
    paces = [
        (b["time"] - a["time"]) / (b["step"] - a["step"])
        for a, b in pairwise(saves)
        if a.get("attempt") == b.get("attempt") and b["step"] > a["step"] and b["time"] > a["time"]
    ]
    newest = max(iterations, key=lambda i: i.commit.time)
    return Observed(
        mtbf_s=span / loads if loads and span > 0 else None,
        step_s=statistics.median(paces) if paces else None,
        bytes=newest.commit.size,
    )


def synthetic(size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with AdamW state of about `size` bytes in tensors of 16 MiB."""
    count = max(size // (48 << 20), 1)
    model = nn.Module()
    for number in range(count):
        model.register_parameter(f"p{number}", nn.Parameter(torch.rand(max(size // 12 // count, 1))))
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)


def measure(
    path: str, model: nn.Module, optimizer: Any, *, budget_s: float = _BUDGET_S, progress: Callable[[str], None] = print
) -> Measured:
    """Measures in a folder of its own below `path`, which is removed again.

    Args:
        optimizer: one without state makes it by a step over zeros, which changes no weight if its rate is 0.
        progress: is told what is measured next.

    Raises:
        UsageError: `path` is no directory that can be written, or there is no room.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors: list[torch.Tensor] = list(model.parameters())
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in tensors)
    with _folder(path, 4 * size) as folder:
        cases: dict[str, Callable[[], float]] = {
            "raw_write_s": lambda: _timed(lambda: _raw_write(folder, size)),
            "raw_read_s": lambda: _timed(lambda: _raw_read(folder, size)),
            "copy_s": lambda: _copy(size),
        }
        kept = [_checkpointer(os.path.join(folder, name), model, optimizer, name == "async") for name in ("s", "async")]
        try:
            times = _rounds(cases | _saves(*kept), budget_s, progress)
        finally:
            for each in kept:
                each.close()
    return Measured(size, **{name: statistics.median(each) for name, each in times.items()})


def _saves(waiting: Checkpointer, background: Checkpointer) -> dict[str, Callable[[], float]]:
    done = Progress()

    def save() -> float:
        done.advance(1)
        return _timed(lambda: waiting.save(done))

    def stall() -> float:
        background.wait()
        return _timed(lambda: background.save(done))

    def background_s() -> float:
        background.wait()
        return background.last_save_s

    return {"save_s": save, "load_s": lambda: _timed(waiting.load), "stall_s": stall, "background_s": background_s}


def _rounds(
    cases: dict[str, Callable[[], float]], budget_s: float, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Every case in turn, at least twice after a round to warm up, while the budget lasts."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    began = time.monotonic()
    for number in range(_ROUNDS + 1):
        if number > 2 and time.monotonic() - began > budget_s:
            break
        for name, case in cases.items():
            progress(
                f"{'warming up' if number == 0 else f'round {number}'}: {name.removesuffix('_s').replace('_', ' ')}"
            )
            seconds = case()
            if number:
                times[name].append(seconds)
    return times


def _checkpointer(path: str, model: nn.Module, optimizer: Any, background: bool) -> Checkpointer:
    config = CheckpointConfig(save_path=path, save_max=1, async_save=background, auto_resume=True)
    return Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None)


def _raw_write(folder: str, size: int) -> None:
    path = os.path.join(folder, "raw")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    writer = LocalStorage().create(path, size)

    def work(starts: Sequence[int]) -> None:
        memory = aligned(_BLOCK)
        memory.write(os.urandom(1 << 20) * (_BLOCK >> 20))
        with memoryview(memory) as whole:
            for at in starts:
                writer.pwrite(whole[: min(_BLOCK, size - at)], at)

    _in_threads(work, size)
    writer.finish(size)


def _raw_read(folder: str, size: int) -> None:
    with LocalStorage().open_directory(folder) as directory:
        reader = directory.open("raw")

        def work(starts: Sequence[int]) -> None:
            with memoryview(aligned(_BLOCK)) as whole:
                for at in starts:
                    reader.pread_into(whole[: min(_BLOCK, size - at)], at)

        _in_threads(work, size)
        reader.close()


def _in_threads(work: Callable[[Sequence[int]], None], size: int, threads: int = 2) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, range(n * _BLOCK, size, threads * _BLOCK)) for n in range(threads)]:
            done.result()


def _copy(size: int) -> float:
    block = 64 << 20
    source, target = aligned(block), aligned(block)
    for memory in (source, target):
        ctypes.memset(address_of(memory), 1, block)
    seconds = _timed(lambda: ctypes.memmove(address_of(target), address_of(source), block))
    return seconds / block * size


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextlib.contextmanager
def _folder(path: str, room: int) -> Iterator[str]:
    try:
        folder = tempfile.mkdtemp(prefix=".perdure-bench-", dir=path)
    except OSError as error:
        raise UsageError(
            f"{path}: nothing can be written there: {error.strerror}", hint="name a directory that exists and is yours"
        ) from error
    try:
        free = LocalStorage().free_bytes(folder)
        if free < room:
            raise UsageError(f"{path}: the measurement needs {room} bytes, {free} are free", hint="lower --gib")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
