"""What befalls one rank alone in a save or a load leaves all of them in agreement."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.forked import job, told

import perdure.train.step
from perdure import Callback, CheckpointConfig, Checkpointer, Trainer
from perdure.engine.progress import Progress
from perdure.engine.ranks import Ranks
from perdure.optim.masters import MixedPrecisionOptimizer
from perdure.storage.local import LocalStorage


def progress(step: int, samples: int = 0) -> Progress:
    return Progress(global_step=step, consumed_samples=samples or 8 * step, global_batch_size=8)


def checkpointer(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Checkpointer:
    config = CheckpointConfig(save_path=str(folder / "out"), auto_resume=True, **more.pop("config", {}))
    model = torch.nn.Linear(4, 3).to(dtype)
    optimizer = MixedPrecisionOptimizer(
        [{"params": list(model.parameters())}], lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    return Checkpointer(config, model=model, optimizer=optimizer, **more)


class Refusing(LocalStorage):
    """A disk that takes one directory no more."""

    refused = 0

    def make_directory(self, path: str) -> None:
        if not self.refused:
            self.refused += 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)
        super().make_directory(path)


def test_a_directory_that_rank_0_cannot_make_is_a_failed_save_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        storage = Refusing() if rank == 0 else LocalStorage()
        with checkpointer(tmp_path, config={"on_save_error": "warn"}, storage=storage) as saver:
            saver.load()
            saver.save(progress(2), wait=True)
            saver.save(progress(4), wait=True)

    assert job(tmp_path / "job", 2, work) == [0, 0], told(tmp_path / "job")
    assert "the run goes on without it" in told(tmp_path / "job")
    assert [path.name for path in (tmp_path / "out").glob("iteration_*")] == ["iteration_00000004"]


def test_a_replaced_iteration_that_cannot_be_removed_keeps_no_rank_waiting(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with checkpointer(tmp_path) as saver:
            saver.load()
            saver.save(progress(2), wait=True)
            if rank == 0:
                (tmp_path / "out" / "iteration_00000002" / "notes").mkdir()
            saver.ranks.agree(None, "leaving something there")
            saver.save(progress(2, samples=24), wait=True)

    assert job(tmp_path / "job", 2, work, deadline_s=60) == [0, 0], told(tmp_path / "job")
    assert "could not be removed yet" in told(tmp_path / "job")


def test_masters_that_are_astray_on_one_rank_are_damage_on_all(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with checkpointer(tmp_path, torch.bfloat16) as saver:
            saver.load()
            saver.save(progress(2), wait=True)
            saver.save(progress(4), wait=True)
        if rank == 1:
            check = MixedPrecisionOptimizer.check_alignment
            answers = [["weight"]]
            MixedPrecisionOptimizer.check_alignment = lambda self: answers.pop() if answers else check(self)  # type: ignore[method-assign]
        with checkpointer(tmp_path, torch.bfloat16) as saver:
            assert saver.load().global_step == 2

    assert job(tmp_path / "job", 2, work) == [0, 0], told(tmp_path / "job")


@pytest.mark.slow
def test_a_background_save_may_take_one_rank_longer_than_an_exchange_may_take(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        def slowly() -> tuple[int, str]:
            time.sleep(12)
            return 0, ""

        ranks = Ranks(deadline_s=8)
        with checkpointer(tmp_path, config={"async_save": True}, ranks=ranks, before_commit=slowly) as saver:
            saver.load()
            saver.save(progress(2))
            saver.wait()

    assert job(tmp_path / "job", 2, work) == [0, 0], told(tmp_path / "job")


def test_ranks_whose_gradients_differ_take_the_same_decision(tmp_path: Path) -> None:
    """Copies of one gradient on two ranks, as other hardware would compute them: a little apart, then one is NaN."""

    def work(rank: int) -> None:
        summed = perdure.train.step.sum_over_replicas

        def apart(gradients: Any, group: Any) -> None:
            summed(gradients, group)
            torch._foreach_mul_(gradients, [1.0, 1.5, float("nan"), 1.0][trainer.state.global_step] if rank else 1.0)

        perdure.train.step.sum_over_replicas = apart
        figures: list[Any] = []

        class Notes(Callback):
            def on_step_end(self, trainer: Any, state: Any) -> None:
                figures.append([state.grad_norm, state.skipped_steps])

        config = {
            "training": {"steps": 4, "local_batch_size": 2, "global_batch_size": 4, "use_skip_step_on_nan": True},
            "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 0.1},
            "train_dataset": {"num_parallel_workers": 0},
            "parallelism": {"data_parallel_replicate": 2},
            "checkpoint": {"enable_save": False},
            "output_dir": str(tmp_path / "out"),
        }
        trainer = Trainer(
            config,
            model=torch.nn.Linear(4, 3),
            train_dataset=[torch.ones(4) * n for n in range(8)],
            compute_loss_func=lambda model, batch: model(batch).square().mean(),
            callbacks=[Notes()],
        )
        trainer.train()
        (tmp_path / f"{rank}.json").write_text(json.dumps(figures))

    assert job(tmp_path / "job", 2, work) == [0, 0], told(tmp_path / "job")
    here, there = ((tmp_path / f"{rank}.json").read_text() for rank in (0, 1))
    assert here == there
    assert [skipped for _, skipped in json.loads(here)] == [0, 0, 1, 1]
