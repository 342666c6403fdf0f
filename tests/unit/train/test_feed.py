"""What the sections of the data sets do to the loaders."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.config.load import load_config_mapping
from perdure.config.schema import TrainConfig
from perdure.engine.ranks import Ranks
from perdure.errors import ConfigError
from perdure.parallel.mesh import Mesh
from perdure.train.feed import evaluation_feed, feed


def config(**evaluation: object) -> TrainConfig:
    return load_config_mapping(
        {
            "training": {"global_batch_size": 4},
            "lr_scheduler": {"type": "ConstantWarmUpLR"},
            "train_dataset": {"numa_enable": True},
            "eval_dataset": {"dataloader": {"type": "Text", "shuffle": True}, **evaluation},
        }
    )


def test_an_evaluation_takes_its_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.train.feed.worker_cpus", lambda: frozenset({1}))
    section = {"num_parallel_workers": 0, "prefetch_size": 3, "numa_enable": True}
    loader = evaluation_feed(config(**section), range(8), Mesh(), Ranks())
    ids = [[index for micro in step.micro_batches for index in micro.ids] for step in loader.take(2)]
    assert sorted(ids[0] + ids[1]) == list(range(8)) != ids[0] + ids[1]
    assert (loader._prefetch, loader._num_workers, loader.worker_cpus) == (3, 0, {1})  # type: ignore[attr-defined]


def test_where_there_is_one_memory_node_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.train.feed.worker_cpus", lambda: None)
    told: list[str] = []
    feed(config(), range(8), Mesh(), Ranks(), told.append)
    assert told == ["train_dataset.numa_enable changes nothing: the processors of this rank lie on one memory node"]


def test_a_last_batch_that_is_not_full_cannot_be_evaluated() -> None:
    with pytest.raises(ConfigError, match=r"eval_dataset.drop_remainder: not built yet: evaluating a last batch"):
        config(drop_remainder=False)
