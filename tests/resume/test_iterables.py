"""Runs over data that can only be read in a row: exact by their state, also Hugging Face's; else refused or said."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor

from perdure.errors import DataError
from perdure.train.audit import audit
from perdure.train.compare_ledgers import compare
from perdure.train.ledger import read_ledger

STEPS = 14


class Row:
    """What `tiny.Noisy` has, in a row, each epoch in another order."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        samples, order = tiny.Noisy(), list(range(tiny.LENGTH))
        random.Random(self.epoch).shuffle(order)
        while self.at < tiny.LENGTH:
            self.at += 1
            yield samples[order[self.at - 1]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Stateless:
    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        samples = tiny.Noisy()
        return (samples[index] for index in range(tiny.LENGTH))


def streamed() -> Any:
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[index / tiny.LENGTH] * 4 for index in range(tiny.LENGTH)]}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3).with_format("torch")


def loss_of_rows(model: torch.nn.Module, batch: Any) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]).float(), batch["x"].sum(1, keepdim=True))


def row(output: Path, steps: int, workers: int = 0, **sections: Any) -> Any:
    return tiny.trainer(output, steps, data=Row(), train_dataset={"num_parallel_workers": workers}, **sections)


@pytest.mark.parametrize("kind", ["row", "Hugging Face"])
def test_stops_and_other_workers_change_no_bit(tmp_path: Path, kind: str) -> None:
    def run(output: Path, steps: int, workers: int = 0) -> Any:
        if kind == "row":
            return row(output, steps, workers)
        settings = {"num_parallel_workers": workers}
        return tiny.trainer(output, steps, data=streamed(), loss=loss_of_rows, train_dataset=settings)

    straight, output = tmp_path / "straight", tmp_path / "run"
    run(straight, STEPS).train()
    for steps, workers in ((4, 0), (9, 2), (12, 0), (STEPS, 1)):
        run(output, steps, workers).train()
    assert tiny.trace(output) == tiny.trace(straight)
    assert tiny.state(tiny.newest(output / "checkpoint")) == tiny.state(tiny.newest(straight / "checkpoint"))
    report = audit(str(output))
    assert report.ok, report.findings
    assert not report.recomputed
    assert compare(read_ledger(str(output / "ledger.jsonl")), read_ledger(str(straight / "ledger.jsonl"))).same


def test_a_kill_and_another_batch_size_go_on_at_the_sample(tmp_path: Path) -> None:
    straight, output = tmp_path / "straight", tmp_path / "run"
    row(straight, 20).train()

    class Kill(tiny.Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            if state.global_step == 8:
                tiny.kill_self()

    def killed() -> None:
        tiny.trainer(output, 20, data=Row(), callbacks=(Kill(),)).train()

    assert tiny.in_child(killed) == -9
    row(output, 8, training={"global_batch_size": 6}).train()
    assert audit(str(output)).ok
    compared = compare(read_ledger(str(output / "ledger.jsonl")), read_ledger(str(straight / "ledger.jsonl")))
    assert compared.same
    assert not compared.step_by_step


def test_what_cannot_say_where_it_stands_is_refused_or_warned_of_at_each_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, **dataloader: Any) -> None:
        sections = {"num_parallel_workers": 0, "dataloader": dataloader}
        tiny.trainer(tmp_path / "run", steps, data=Stateless(), train_dataset=sections).train()

    with pytest.raises(DataError, match="exact: False"):
        run(3)
    for steps in (3, 6):
        run(steps, exact=False)
        assert "resuming is not exact" in capsys.readouterr().err


def test_a_shuffle_buffer_is_not_taken_for_exact(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="shuffles in a buffer that its state leaves out"):
        tiny.trainer(tmp_path, 3, data=streamed().shuffle(seed=1, buffer_size=16), loss=loss_of_rows).train()


def test_data_begun_afresh_begin_with_the_first_sample(tmp_path: Path) -> None:
    row(tmp_path / "run", 5).train()
    row(tmp_path / "run", 8, training={"ignore_data_skip": True}).train()
    ids = [line[-1] for line in tiny.trace(tmp_path / "run")]
    assert ids[5:8] == ids[:3]
    row(tmp_path / "skipping", 5).train()
    row(tmp_path / "skipping", 8, training={"data_skip_steps": 2}).train()
    row(tmp_path / "straight", 10).train()
    skipping, straight = ([line[-1] for line in tiny.trace(tmp_path / name)] for name in ("skipping", "straight"))
    assert skipping == straight[:5] + straight[7:10]
