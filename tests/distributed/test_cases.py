"""What goes wrong between ranks elsewhere: names not visible yet, listings in any order, lost shards, replicas."""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.catalog.root import Root
from perdure.errors import DamagedCheckpointError
from perdure.storage.local import LocalStorage

from . import forked


def build(salt: int = 0, **optimizer: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(salt)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    if "momentum" in optimizer:
        return model, torch.optim.SGD(model.parameters(), lr=0.1, **optimizer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, salt: int) -> None:
    torch.manual_seed(salt)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every number of model and optimizer, for comparing ranks."""
    found: list[Any] = [[name, value.tolist()] for name, value in model.state_dict().items()]
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        found.append([[key, v.tolist() if hasattr(v, "tolist") else v] for key, v in state.items()])
    return found


def note(folder: Path, rank: int, **what: Any) -> None:
    (folder / f"noted-{rank}.json").write_text(json.dumps(what))


def noted(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"noted-{rank}.json").read_text()) for rank in range(ranks)]


def checkpointer(root: Path, model: nn.Module, optimizer: Any, storage: Any = None, **keys: Any) -> Checkpointer:
    config = CheckpointConfig(**{"save_path": str(root), **keys})
    return Checkpointer(config, model=model, optimizer=optimizer, storage=storage, say=lambda line: None)


def progress(step: int) -> Progress:
    return Progress(step, 4 * step, 4)


class Late(LocalStorage):
    """Sees what was made only a tenth of a second later, as a network file system does."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, float] = {}

    def _visible(self, path: str) -> bool:
        found = super().exists(path)
        if found:
            self._first.setdefault(path, time.monotonic())
        return found and time.monotonic() - self._first[path] > 0.1

    def exists(self, path: str) -> bool:
        return self._visible(path)

    def is_directory(self, path: str) -> bool:
        return self._visible(path) and super().is_directory(path)


class Shuffled(LocalStorage):
    """Lists names in no order, another one each time."""

    def list(self, path: str) -> list[str]:
        names = super().list(path)
        random.shuffle(names)
        return names


def test_replicas_save_and_load_as_one(tmp_path: Path) -> None:
    """O54, O57, O58, O60: ranks that see names late and in any order; buffers of one rank; equal replicas."""
    root = tmp_path / "root"

    def work(rank: int) -> None:
        random.seed(rank)
        model, optimizer = build()
        update(model, optimizer, 1)
        # Statistics that each rank has taken of its own samples.
        model[1].running_mean.fill_(rank)
        with checkpointer(root, model, optimizer, Late() if rank else None) as saver:
            saver.save(progress(1), wait=True)
            # Visible on every rank when `save` returns.
            visible = sorted(i.iteration for i in Root(str(root)).iterations())
            for step in (9, 10, 11):
                update(model, optimizer, step)
                saver.save(progress(step), wait=True)
        saved = everything(model, optimizer)
        loads = []
        for storage in (Shuffled(), Late() if rank else None, None):
            model, optimizer = build(rank + 5)
            update(model, optimizer, rank + 5)
            keys = {"load_path": str(root), "save_path": str(tmp_path / "none"), "enable_save": False}
            with checkpointer(root, model, optimizer, storage, **keys) as loader:
                assert loader.load().global_step == 11
            loads.append(everything(model, optimizer))
        note(tmp_path, rank, visible=visible, saved=saved, loads=loads)

    assert forked.job(tmp_path / "job", 4, work) == [0] * 4, forked.told(tmp_path / "job")
    found = noted(tmp_path, 4)
    assert [each["visible"] for each in found] == [[1]] * 4
    first = found[0]["loads"][0]
    assert all(load == first for each in found for load in each["loads"])
    # What all ranks had alike is what was saved; of what differed, one rank's was.
    mean = next(number for number, each in enumerate(first) if each and each[0] == "1.running_mean")
    for each in found:
        assert [v for n, v in enumerate(each["saved"]) if n != mean] == [v for n, v in enumerate(first) if n != mean]
    assert first[mean] in [each["saved"][mean] for each in found]


def test_removals_by_another_process_while_ranks_save(tmp_path: Path) -> None:
    """O55: save_max 1, and somebody who deletes old iterations too."""
    root = tmp_path / "root"
    end = threading.Event()

    def remove() -> None:
        while not end.wait(0.002):
            iterations = (
                sorted(root.glob("iteration_*"), key=lambda path: path.stat().st_mtime) if root.exists() else []
            )
            for old in iterations[:-2]:
                shutil.rmtree(old, ignore_errors=True)

    def work(rank: int) -> None:
        remover = threading.Thread(target=remove)
        if rank == 0:
            remover.start()
        model, optimizer = build()
        try:
            with checkpointer(root, model, optimizer, save_max=1) as saver:
                for step in range(1, 11):
                    update(model, optimizer, step)
                    saver.save(progress(step), wait=True)
        finally:
            end.set()

    assert forked.job(tmp_path / "job", 4, work) == [0] * 4, forked.told(tmp_path / "job")
    assert [i.iteration for i in Root(str(root)).iterations()] == [10]


@pytest.mark.parametrize("balanced", [False, True])
def test_a_lost_or_foreign_shard_of_one_rank_stops_all(tmp_path: Path, balanced: bool) -> None:
    """O59: the file of rank 1 is gone, or is that of an older step."""
    root = tmp_path / "root"
    load = {"load_path": str(root), "save_path": str(tmp_path / "none"), "enable_save": False, "on_corrupt": "error"}

    def work(rank: int) -> None:
        model, optimizer = build()
        with checkpointer(root, model, optimizer) as saver:
            for step in (1, 2):
                update(model, optimizer, step)
                saver.save(progress(step), wait=True)
        older, newer = (root / f"iteration_{step:08d}" for step in (1, 2))
        name = next(path.name for path in newer.glob("*-model-0000001-0000002.safetensors"))
        found = []
        for act in ("replace", "remove", "restore"):
            torch.distributed.barrier()
            if rank == 0 and act == "replace":
                (newer / name).rename(tmp_path / "kept")
                shutil.copy(older / name, newer / name)
            elif rank == 0 and act == "remove":
                (newer / name).unlink()
            elif rank == 0:
                (tmp_path / "kept").rename(newer / name)
            torch.distributed.barrier()
            model, optimizer = build(3)
            with checkpointer(root, model, optimizer, load_balanced=balanced, **load) as loader:
                if act == "restore":
                    assert loader.load().global_step == 2
                    continue
                with pytest.raises(DamagedCheckpointError) as caught:
                    loader.load()
                found.append(caught.value.message)
                assert name in caught.value.message
                assert ("belongs to save" if act == "replace" else "missing") in caught.value.message
        assert len(found) == 2

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")


def test_wrappers_scalars_and_optimizers_without_state(tmp_path: Path) -> None:
    """O14, O15, O17, O49: DDP's names, numbers that stay what they are, SGD without momentum, before any step too."""

    class Extra:
        per_rank = True

        def __init__(self, rank: int) -> None:
            self.state = {"whole": rank, "real": 0.5, "tensor": torch.tensor(2.5), "none": None, "pair": (1, "a")}

        def state_dict(self) -> dict[str, Any]:
            return dict(self.state)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = dict(state)

    def work(rank: int) -> None:
        for number, stepped in enumerate((False, True)):
            root = tmp_path / f"sgd-{number}"
            model, optimizer = build(momentum=0.0)
            if stepped:
                update(model, optimizer, 1)
            extra = Extra(rank)
            config = CheckpointConfig(save_path=str(root))
            wrapped = DistributedDataParallel(model)
            with Checkpointer(
                config, model=wrapped, optimizer=optimizer, extra={"own": extra}, say=lambda line: None
            ) as saver:
                saver.save(progress(1), wait=True)
            saved = optimizer.state_dict()
            other, restored = build(9, momentum=0.0)
            loaded = Extra(70 + rank)
            config = CheckpointConfig(load_path=str(root), enable_save=False)
            with Checkpointer(
                config, model=other, optimizer=restored, extra={"own": loaded}, say=lambda line: None
            ) as loader:
                loader.load()
            assert restored.state_dict() == saved
            assert all(
                torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
            )
            assert repr(loaded.state) == repr(extra.state)
            assert loaded.state["whole"] == rank
        (saved_last,) = Root(str(root)).iterations()
        names = set(json.loads((Path(saved_last.path) / "metadata.json").read_text())["model"])
        assert names == set(model.state_dict())

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
    # What two wrapped replicas saved, one process without a wrapper has.
    model, optimizer = build(9, momentum=0.0)
    config = CheckpointConfig(load_path=str(tmp_path / "sgd-1"), enable_save=False)
    with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as loader:
        loader.load()
    expected, other = build(momentum=0.0)
    update(expected, other, 1)
    assert all(
        torch.equal(a, b) for a, b in zip(expected.state_dict().values(), model.state_dict().values(), strict=True)
    )
