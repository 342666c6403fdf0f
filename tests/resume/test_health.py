"""Planted NaNs and spikes: what is marked, what is skipped, and a run that goes back by itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests import tiny
from torch import Tensor, nn

from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.data.order import EpochOrder
from perdure.errors import TrainingError
from perdure.train.callbacks.ema import EMA
from perdure.train.history import read_lines

STEPS = 36
ORDER = EpochOrder(400, 3, shuffle=True).slice(0, 400)
BAD = ORDER[4 * 28 + 1]
"""The sample that spoils step 29."""


def spoiling(factor: float, *bad: int) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hit = any(int(index) in (bad or (BAD,)) for index in batch[0])
        return tiny.loss_of(model, batch) * (factor if hit else 1.0)

    return loss


def run(output: Path, steps: int = STEPS, *, factor: float = 1e4, bad: tuple[int, ...] = (), **sections: Any) -> Any:
    """A run long enough to know what is usual, with one bad sample in its first epoch."""
    given = {"monitor": {"health_checkpoint": {"on_spike": "rollback"}}, **sections}
    made = tiny.trainer(output, steps, data=tiny.Noisy(400), loss=spoiling(factor, *bad), **given)
    made.train()
    return made


def where(sample: int = BAD) -> tuple[int, int]:
    """Stream positions [first, last) of the step in which a sample comes."""
    first = ORDER.index(sample) // 4 * 4
    return first, first + 4


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, told from the start to leave the bad step out."""
    output = tmp_path_factory.mktemp("told")
    run(output, training={"skip_ranges": [list(where())]})
    return output


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_events(Root(str(output / "checkpoint"))) if e["event"] == kind]


@pytest.mark.parametrize(("factor", "keys"), [
    (1e4, {}),
    (math.nan, {"checkpoint": {"async_save": True}, "train_dataset": {"num_parallel_workers": 2}}),
])  # fmt: skip
def test_going_back_gives_the_run_that_leaves_the_samples_out(
    told: Path, tmp_path: Path, factor: float, keys: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    made = run(tmp_path, factor=factor, **keys)
    assert tiny.trace(tmp_path) == tiny.trace(told)
    assert tiny.state(tiny.newest(tmp_path / "checkpoint")) == tiny.state(tiny.newest(told / "checkpoint"))
    assert tiny.common(tiny.newest(tmp_path / "checkpoint")) == tiny.common(tiny.newest(told / "checkpoint"))
    first, last = where()
    (event,) = events(tmp_path, "rollback")
    assert event["left_out"] == [first, last]
    assert event["to"] == first // 4 // 5 * 5
    headers = [line for line in read_lines(str(tmp_path / "ledger.jsonl")) if "resumed" in line]
    assert [header["left_out"] for header in headers] == [[], [[first, last]]]
    assert f"without samples {first} to {last - 1}" in capfd.readouterr().err
    assert made.state.skipped_steps == 0


def test_what_was_left_out_stays_out_through_any_restart(told: Path, tmp_path: Path) -> None:
    for stop in (where()[0] // 4 - 2, where()[0] // 4 + 1, where()[0] // 4 + 2, STEPS):
        run(tmp_path, stop)
    assert tiny.trace(tmp_path) == tiny.trace(told)
    assert len(events(tmp_path, "rollback")) == 1


def test_killed_right_after_going_back_it_goes_back_again(told: Path, tmp_path: Path) -> None:
    class Killed(tiny.Callback):
        def on_rollback(self, trainer: Any, state: Any) -> None:
            tiny.kill_self()

    def work() -> None:
        given: dict[str, Any] = {"monitor": {"health_checkpoint": {"on_spike": "rollback"}}}
        tiny.trainer(
            tmp_path, STEPS, data=tiny.Noisy(400), loss=spoiling(1e4), callbacks=(EMA(0.9), Killed()), **given
        ).train()

    assert tiny.in_child(work) == -9
    run(tmp_path)
    assert tiny.trace(tmp_path) == tiny.trace(told)


def test_nothing_to_go_back_to_leaves_the_update_out_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = run(tmp_path, checkpoint={"save_interleaved_steps": 1000})
    assert made.state.skipped_steps == 1
    assert "no healthy checkpoint before it" in capfd.readouterr().err
    assert tiny.numbers(tmp_path / "checkpoint") == [STEPS]


def test_after_so_many_returns_the_run_stops(tmp_path: Path) -> None:
    again = {"monitor": {"health_checkpoint": {"on_spike": "rollback", "max_rollbacks": 2}}}
    with pytest.raises(TrainingError, match="gone back 2 times"):
        run(tmp_path, factor=math.nan, bad=tuple(ORDER[40:80]), **again)
    assert [event["left_out"] for event in events(tmp_path, "rollback")] == [[40, 44], [36, 48]]


def test_a_skipped_spike_changes_no_weight_and_is_counted(tmp_path: Path) -> None:
    kept: dict[int, dict[str, Tensor]] = {}

    class Watch(tiny.Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            kept[state.global_step] = tiny.weights(trainer.model)

    given: dict[str, Any] = {"monitor": {"health_checkpoint": {"on_spike": "skip"}}}
    state = tiny.trainer(
        tmp_path, STEPS, data=tiny.Noisy(400), loss=spoiling(1e4), callbacks=(Watch(),), **given
    ).train()
    step = where()[0] // 4 + 1
    assert state.skipped_steps == 1
    assert tiny.same(kept[step - 1], kept[step])
    assert not tiny.same(kept[step], kept[step + 1])


def test_a_marked_spike_is_not_what_a_healthy_resume_takes(tmp_path: Path) -> None:
    step = where()[0] // 4 + 1
    mark: dict[str, Any] = {"monitor": {"health_checkpoint": {"on_spike": "mark"}}}
    run(tmp_path, step + 1, **mark)
    newest = tiny.newest(tmp_path / "checkpoint")
    assert (newest.iteration, newest.commit.healthy) == (step + 1, False)
    run(tmp_path, STEPS, checkpoint={"load_healthy": True}, **mark)
    resumed = [line["step"] for line in read_lines(str(tmp_path / "ledger.jsonl")) if "resumed" in line]
    assert resumed == [0, step // 5 * 5]


def test_counts_of_skipped_updates_come_back(tmp_path: Path) -> None:
    bad = tuple(s for s in range(400) if where(s)[0] // 4 in (3, 4, 5))
    limits = {"training": {"use_skip_step_on_nan": True, "max_consecutive_skipped_steps": 3}}
    mark: dict[str, Any] = {"monitor": {"health_checkpoint": {"on_spike": "mark"}}}
    made = run(tmp_path, 5, factor=math.nan, bad=bad, **limits, **mark)
    assert (made.state.skipped_steps, made.state.consecutive_skipped_steps) == (2, 2)
    with pytest.raises(TrainingError, match="left out 3 times in a row"):
        run(tmp_path, 12, factor=math.nan, bad=bad, **limits, **mark)
