"""load_balanced: every byte read once over all ranks, nothing else different, and no hang where something is wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.counting import Counting
from tests.distributed.forked import job, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.engine import segment
from perdure.errors import DamagedCheckpointError, RanksError
from perdure.format.names import METADATA
from perdure.format.safetensors import header_length


class Net(nn.Module):
    """Weights of several digest blocks, of part of one, tiny ones, one without elements, and several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(1100, 2000, bias=False)
        self.small = nn.ModuleList(nn.Linear(5, 7) for _ in range(6))
        self.half = nn.Linear(33, 9, dtype=torch.bfloat16)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).t())


def build(salt: int, cut: tuple[int, ...] = ()) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model cut over a mesh (or whole everywhere), with optimizer state where `salt` isn't 0."""
    torch.manual_seed(salt)
    model = Net()
    if cut:
        mesh = init_device_mesh("cpu", cut, mesh_dim_names=("replicate", "shard")[-len(cut) :])
        fully_shard(model.large, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if salt:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What this rank holds, name by name."""
    found: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {k: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for k, v in found.items()}


def load(root: Path, cut: tuple[int, ...], storage: Any = None, **keys: Any) -> dict[str, torch.Tensor]:
    model, optimizer = build(0, cut)
    config = CheckpointConfig(load_path=str(root), enable_save=False, **keys)
    with Checkpointer(config, model=model, optimizer=optimizer, storage=storage, say=lambda line: None) as checkpointer:
        assert checkpointer.load().global_step == 5
    return values(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process's checkpoint, one of three sharded ranks, and one of two replicas that both wrote everything."""
    folder = tmp_path_factory.mktemp("saved")
    cases: dict[str, tuple[int, tuple[int, ...], bool]] = {
        "one": (1, (), True), "three": (3, (3,), True), "twice": (2, (), False)
    }  # fmt: skip
    for name, (ranks, cut, once) in cases.items():

        def work(rank: int, name: str = name, cut: tuple[int, ...] = cut, once: bool = once) -> None:
            model, optimizer = build(7, cut)
            config = CheckpointConfig(save_path=str(folder / name), remove_redundancy=once)
            with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as checkpointer:
                checkpointer.save(Progress(5, 20, 4), wait=True)

        assert job(folder / f"job-{name}", ranks, work) == [0] * ranks, told(folder / f"job-{name}")
    return folder


def iteration(root: Path) -> Path:
    (found,) = root.glob("iteration_*")
    return found


CASES: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "four replicas": ("one", 4, ()),
    "replicate 2 x shard 2": ("one", 4, (2, 2)),
    "shard 3, nothing shared but single blocks": ("one", 3, (3,)),
    "three shards to four replicas": ("three", 4, ()),
    "three shards to replicate 2 x shard 2": ("three", 4, (2, 2)),
    "written twice, to two replicas": ("twice", 2, ()),
}


def pass_on(by: str) -> None:
    """Blocks go through shared memory, where it is, or over the process group."""
    segment._SHARES = by == "memory"


@pytest.mark.parametrize("case", CASES)
def test_each_byte_is_read_once_and_the_result_is_the_same(saved: Path, tmp_path: Path, case: str) -> None:
    source, ranks, cut = CASES[case]

    def work(rank: int) -> None:
        plain = load(saved / source, cut)
        for by in ("memory", "network"):
            pass_on(by)
            counting = Counting()
            balanced = load(saved / source, cut, counting, load_balanced=True)
            counting.write_down(tmp_path / f"{by}-{rank}.json")
            assert plain.keys() == balanced.keys()
            for name, value in plain.items():
                assert torch.equal(value, balanced[name]), name
                assert value.dtype == balanced[name].dtype
                assert value.stride() == balanced[name].stride()

    assert job(tmp_path, ranks, work) == [0] * ranks, told(tmp_path)
    for by in ("memory", "network"):
        check_counts(iteration(saved / source), [tmp_path / f"{by}-{rank}.json" for rank in range(ranks)], source)


def check_counts(where: Path, files: list[Path], source: str) -> None:
    """What ranks read of an iteration, together: the data once, shared evenly; the metadata once."""
    shares, times = [0] * len(files), Counter[str]()
    sizes = {path.name: path.stat().st_size for path in where.iterdir()}
    heads = {
        name: header_length((where / name).read_bytes()[:8], size, name)
        for name, size in sizes.items()
        if name.endswith(".safetensors")
    }
    seen = {name: torch.zeros(sizes[name], dtype=torch.uint8) for name in heads}
    for rank, file in enumerate(files):
        for name, begin, end in json.loads(file.read_text()):
            times[name] += 1
            if name in heads:
                seen[name][begin:end] += 1
                shares[rank] += max(0, end - max(begin, heads[name]))
    assert times[METADATA] == 1
    # Files are opened, and their headers read, by those who read something of them.
    bodies = [seen[name][heads[name] :] for name in heads]
    assert all(bool((body <= 1).all()) for body in bodies)
    total = sum(len(body) for body in bodies)
    # What both replicas wrote is read of one of them.
    assert sum(shares) == (total // 2 if source == "twice" else total)
    # The largest unit is one block; nobody reads much more than its share.
    assert max(shares) <= sum(shares) / len(files) + (8 << 20)


def test_one_process_is_told_that_it_gains_nothing(saved: Path, tmp_path: Path) -> None:
    model, optimizer = build(0)
    config = CheckpointConfig(load_path=str(saved / "one"), enable_save=False, load_balanced=True)
    with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as checkpointer:
        assert checkpointer.load().global_step == 5
        assert checkpointer.loaded is not None
        assert "load_balanced brings nothing on one process" in checkpointer.loaded.notes
    expected = build(7)
    assert all(
        torch.equal(a, b) for a, b in zip(values(model, optimizer).values(), values(*expected).values(), strict=True)
    )


class Failing(Counting):
    """Reading any byte after the first million of a file fails on one rank."""

    def open_directory(self, path: str) -> Any:
        directory = super().open_directory(path)
        plain_open = directory.open

        def open_file(name: str) -> Any:
            reader = plain_open(name)
            plain = reader.pread_into

            def pread_into(buffer: memoryview, offset: int) -> None:
                if offset > 1 << 20:
                    raise OSError(errno.EIO, "Input/output error", name)
                plain(buffer, offset)

            reader.pread_into = pread_into  # type: ignore[method-assign]
            return reader

        directory.open = open_file  # type: ignore[method-assign]
        return directory


@pytest.mark.parametrize("by", ["memory", "network"])
def test_damage_and_failing_storage_end_all_ranks_alike(saved: Path, tmp_path: Path, by: str) -> None:
    root = tmp_path / "root"
    target = root / iteration(saved / "one").name
    target.mkdir(parents=True)
    for path in iteration(saved / "one").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    hurt = next(target.glob("*-model-*.safetensors"))
    data = bytearray(hurt.read_bytes())
    data[len(data) * 2 // 3] ^= 1

    def work(rank: int) -> None:
        pass_on(by)
        # A disk of one rank fails: it raises its error, the others name it.
        with pytest.raises(OSError if rank == 2 else RanksError) as failed:
            load(root, (), Failing() if rank == 2 else None, load_balanced=True)
        assert rank == 2 or ("rank 2" in str(failed.value) and "Input/output" in str(failed.value))
        dist.barrier()
        # Then a flipped bit: damage on every rank, with the file's name.
        if rank == 0:
            hurt.write_bytes(data)
        dist.barrier()
        with pytest.raises(DamagedCheckpointError, match=r"large\.weight: block \d is not what was written") as damaged:
            load(root, (), load_balanced=True, on_corrupt="error")
        assert hurt.name in str(damaged.value)
        # And everything still works afterwards.
        load(saved / "one", (), load_balanced=True)

    assert job(tmp_path / "job", 3, work) == [0] * 3, told(tmp_path / "job")


@pytest.mark.parametrize("by", ["memory", "network"])
def test_a_rank_that_is_killed_while_others_wait_for_its_blocks(saved: Path, tmp_path: Path, by: str) -> None:
    class Dying(Counting):
        def open_directory(self, path: str) -> Any:
            directory = super().open_directory(path)
            plain_open = directory.open

            def open_file(name: str) -> Any:
                reader = plain_open(name)
                plain = reader.pread_into

                def pread_into(buffer: memoryview, offset: int) -> None:
                    if offset > 1 << 20:
                        os.kill(os.getpid(), signal.SIGKILL)
                    plain(buffer, offset)

                reader.pread_into = pread_into  # type: ignore[method-assign]
                return reader

            directory.open = open_file  # type: ignore[method-assign]
            return directory

    def work(rank: int) -> None:
        pass_on(by)
        load(saved / "one", (), Dying() if rank == 1 else None, load_balanced=True)

    codes = job(tmp_path / "job", 3, work, grace_s=60)
    assert codes == [1, -signal.SIGKILL, 1], told(tmp_path / "job")
    assert all("rank 1" in (tmp_path / "job" / f"rank-{rank}.txt").read_text() for rank in (0, 2))
