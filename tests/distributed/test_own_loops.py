"""What loops of one's own do on several ranks that the Trainer never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from perdure import Checkpoint, CheckpointConfig, Checkpointer, Progress
from perdure.errors import MismatchError, RanksError, SaveError, UnsupportedStateError

from . import forked


class Replica(DistributedDataParallel):
    """A wrapper of the user's own."""


def sharded(seed: int, *, wrapped: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Blocks under activation checkpointing are sharded, as is what is left of the model."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.ReLU()), nn.Linear(7, 3))
    model[1] = checkpoint_wrapper(model[1]) if wrapped else model[1]
    for module in (model[1], model) if dist.is_initialized() else ():
        fully_shard(module)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state = [value for parameter in model.parameters() for value in optimizer.state.get(parameter, {}).values()]
    return [_whole(tensor).tolist() for tensor in [*model.parameters(), *state]]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def checkpointer(root: Path, model: nn.Module, optimizer: Any, **extra: Any) -> Checkpointer:
    config = CheckpointConfig(save_path=str(root), auto_resume=True)
    return Checkpointer(config, model=model, optimizer=optimizer, extra=extra, say=lambda line: None)


def look(model: nn.Module) -> None:
    """An evaluation: FSDP2 leaves the outermost parameters gathered until a backward pass, which never comes."""
    with torch.no_grad():
        model(torch.randn(2, 5))


def test_a_save_and_a_load_right_after_an_evaluation(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model, optimizer = sharded(0)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        look(model)
        with checkpointer(tmp_path / "fsdp", model, optimizer) as saver:
            saver.save(Progress(1, 4, 4))
        other, restored = sharded(1, wrapped=False)
        look(other)
        with checkpointer(tmp_path / "fsdp", other, restored) as loader:
            loader.load()
        assert everything(other, restored) == everything(model, optimizer)
        bare = nn.Linear(2, 2)
        with checkpointer(tmp_path / "ddp", Replica(bare), torch.optim.SGD(bare.parameters())) as saver:
            saver.save(Progress(1, 4, 4))

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
    plain, _ = sharded(0, wrapped=False)
    assert set(Checkpoint(tmp_path / "fsdp").names("model")) == set(plain.state_dict())
    assert set(Checkpoint(tmp_path / "ddp").names("model")) == {"weight", "bias"}


def test_an_error_that_every_rank_catches_ends_with_its_checkpointer(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for width in (2, 3, 2):
            model = nn.Linear(width, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if width == 3:
                with pytest.raises(MismatchError), checkpointer(tmp_path / "out", model, optimizer) as loader:
                    loader.load()
                continue
            with checkpointer(tmp_path / "out", model, optimizer) as saver:
                progress = saver.load()
                progress.advance()
                saver.save(progress)

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
    assert Checkpoint(tmp_path / "out").iteration == 2


def test_what_ranks_do_not_share_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with checkpointer(tmp_path / "steps", model, optimizer) as saver:
            with pytest.raises(RanksError, match=r"rank 0 at step 5 with 8 samples, rank 1 at step 6 with 8 samples"):
                saver.save(Progress(5 + rank, 8, 4))
            saver.save(Progress(6, 8, 4))
        model, optimizer = sharded(0)
        second = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 5)).square().mean().backward()
        second.step()
        with (
            checkpointer(tmp_path / "second", model, optimizer, second=second) as saver,
            pytest.raises(UnsupportedStateError, match=r"second\.state\.0\.exp_avg: a tensor that is sharded"),
        ):
            saver.save(Progress(1, 4, 4))

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")


def batch_norm(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_replicas_that_differ_are_refused_before_anything_is_saved(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        def refused(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
            with checkpointer(tmp_path / "none", model, optimizer) as saver:
                for _ in range(2):
                    with pytest.raises(SaveError, match=f"0 and 1 hold different values of the same tensors: {what}"):
                        saver.save(Progress(1, 4, 4))

        # Never broadcast.
        model, optimizer = batch_norm(rank)
        refused(model, optimizer, r"model: 0\.weight, model: 0\.bias, model: 2\.weight, model: 2\.bias")
        # Parts of a tensor, each taken for the whole.
        model, optimizer = batch_norm(0)
        with torch.no_grad():
            model[0].weight[-1, -1] += rank
        refused(model, optimizer, r"model: 0\.weight\n")
        # Alike, but each with moments of its own.
        model, optimizer = batch_norm(0)
        with torch.no_grad():
            before = [p.clone() for p in model.parameters()]
            model(torch.randn(4, 5) + rank).square().mean()
        model(torch.randn(4, 5) + rank).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        refused(model, optimizer, r"optimizer: adam_m")
        # A batch norm's statistics are each rank's own.
        model, optimizer = batch_norm(0)
        model(torch.randn(4, 5) + rank)
        with checkpointer(tmp_path / "out", model, optimizer) as saver:
            saver.save(Progress(1, 4, 4))

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
    assert Checkpoint(tmp_path / "out").iteration == 1
    assert not list((tmp_path / "none").glob("*iteration*"))


@pytest.mark.parametrize("remove_redundancy", [True, False])
def test_statistics_of_a_batch_norm_go_on_as_the_wrapper_would_have_had_them(
    tmp_path: Path, remove_redundancy: bool
) -> None:
    def run(root: Path, rank: int, stop: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        # Large enough that every rank has some to write.
        norms = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
        model = DistributedDataParallel(nn.Sequential(*norms))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = CheckpointConfig(save_path=str(root), auto_resume=True, remove_redundancy=remove_redundancy)
        with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as saver:
            progress = saver.load()
            while progress.global_step < stop:
                torch.manual_seed(10 * progress.global_step + rank)
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.advance(global_batch_size=16)
            saver.save(progress)
        return dict(model.module.state_dict())

    def work(rank: int) -> None:
        whole = run(tmp_path / "whole", rank, 5)
        run(tmp_path / "parts", rank, 2)
        parts = run(tmp_path / "parts", rank, 5)
        assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
