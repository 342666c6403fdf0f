"""Ranks that were not started as one run are told at once what differs, and never wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import nn

from perdure import CheckpointConfig, Checkpointer, Trainer
from perdure.errors import ConfigError, DataError, UsageError

from . import forked


def trainer(folder: Path, rank: int, model: nn.Module | None = None, length: int = 37, **sections: Any) -> Trainer:
    """A run of two ranks; what hosts may have otherwise differs always."""
    place = [f"/data{rank}"]
    loader = {"shuffle": True, "path": place, "datasets": [{"path": place}]}
    own = {"num_parallel_workers": rank, "prefetch_size": 1 + rank, "dataloader": loader}
    callbacks = sections.pop("callbacks", [])
    config = tiny.config(folder / "out", 2, **sections) | {"train_dataset": own, "callbacks": callbacks}
    return Trainer(config, model=model or tiny.Net(), train_dataset=tiny.Noisy(length), compute_loss_func=tiny.loss_of)


def test_what_differs_is_named_with_its_ranks_before_anything_is_made(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        other = rank == 2
        with pytest.raises(ConfigError) as caught:
            trainer(
                tmp_path,
                rank,
                training={"steps": 30 if other else 2, "global_batch_size": 6, "local_batch_size": 2},
                checkpoint={"save_interleaved_steps": 7 + rank},
            ).train()
        assert "training.steps is 2 on ranks 0 and 1, 30 on rank 2;" in caught.value.message
        assert "save_interleaved_steps is 7 on rank 0, 8 on rank 1, 9 on rank 2" in caught.value.message
        assert "prefetch_size" not in caught.value.message
        with pytest.raises(ConfigError, match=r"callbacks\[0\]\.type is missing on ranks 0 and 1, 'a:B' on rank 2"):
            trainer(tmp_path, rank, callbacks=[{"type": "a:B"}] if other else []).train()
        with pytest.raises(ConfigError, match=r"checkpoint\.enable_save is True on rank 0, False on ranks 1 and 2"):
            Checkpointer(CheckpointConfig(save_path=str(tmp_path / "out"), enable_save=rank == 0), model=tiny.Net())

    assert forked.job(tmp_path / "job", 3, work) == [0] * 3, forked.told(tmp_path / "job")
    assert not (tmp_path / "out").exists()


def test_other_data_or_another_model_are_named(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with pytest.raises(DataError, match="different training data: length is 37 on rank 0, 36 on rank 1"):
            trainer(tmp_path, rank, length=37 - rank).train()
        wide = tiny.Net(8 + rank)
        with pytest.raises(UsageError, match=r"first\.bias is float32 \[8\] on rank 0, float32 \[9\] on rank 1"):
            trainer(tmp_path, rank, model=wide).train()

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")


@pytest.mark.parametrize("layout", [{}, {"data_parallel_shard": 2}], ids=["replicated", "sharded"])
def test_ranks_that_drew_other_weights_start_from_those_of_the_first(tmp_path: Path, layout: dict[str, int]) -> None:
    def drawn(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return tiny.Net()

    def work(rank: int) -> None:
        for name, seed in (("alike", 7), ("apart", 7 + rank)):
            trainer(tmp_path / name, rank, model=drawn(seed), parallelism=layout).train()

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
    alike, apart = (sorted((tmp_path / name).rglob("metrics.jsonl")) for name in ("alike", "apart"))
    losses = [
        [json.loads(line)["loss"] for line in f.read_text().splitlines() if '"loss"' in line] for f in (*alike, *apart)
    ]
    assert len(losses) == 2
    assert losses[0] == losses[1] != []
    assert "the ranks were given different weights (first.weight, first.bias, last.weight, last.bias)" in forked.told(
        tmp_path / "job"
    )


def test_what_hosts_may_have_otherwise_changes_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        assert trainer(tmp_path, rank).train().global_step == 2

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
