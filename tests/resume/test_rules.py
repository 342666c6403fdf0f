"""What a resume decides: steps, samples, rates, data, health, hooks, registered objects."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny
from torch import Tensor, nn

from perdure.catalog.events import read_events
from perdure.catalog.root import Root
from perdure.errors import DataError, MismatchError, TrainingError, UsageError
from perdure.train.history import read_lines, superseded


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    tiny.trainer(output, 12).train()
    return output


def root_of(output: Path) -> Path:
    return output / "checkpoint"


# ---- steps and batches


def test_counters_follow_the_stream_through_epochs_and_resumes(tmp_path: Path) -> None:
    small = {"checkpoint": {"save_interleaved_steps": 3, "save_max": 99}}
    tiny.trainer(tmp_path / "a", 28, **small).train()
    for stop in (4, 14, 23, 28):
        tiny.trainer(tmp_path / "b", stop, **small).train()
    for output in (tmp_path / "a", tmp_path / "b"):
        for iteration in Root(str(root_of(output))).iterations():
            told = tiny.common(iteration)
            assert told.global_step == iteration.iteration
            assert told.consumed_samples == 4 * told.global_step
            assert told.epoch_num == told.consumed_samples // tiny.LENGTH
            assert told.step_num == told.consumed_samples % tiny.LENGTH // 4
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


def test_each_epoch_is_complete_and_in_an_order_of_its_own(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0].tolist())
        return tiny.loss_of(model, batch)

    for stop in (4, 13, 28):
        tiny.trainer(tmp_path, stop, loss=loss).train()
    epochs = [seen[i : i + tiny.LENGTH] for i in range(0, 3 * tiny.LENGTH, tiny.LENGTH)]
    assert all(sorted(epoch) == list(range(tiny.LENGTH)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_accumulation_counts_updates_and_leaves_no_gradient_over(tmp_path: Path) -> None:
    micro = {"training": {"local_batch_size": 1, "global_batch_size": 4}, "checkpoint": {"save_interleaved_steps": 3}}
    tiny.trainer(tmp_path / "a", 9, **micro).train()
    first = tiny.trainer(tmp_path / "b", 3, **micro)
    first.train()
    assert first.model is not None
    assert all(p.grad is None for p in first.model.parameters())
    tiny.trainer(tmp_path / "b", 9, **micro).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    assert tiny.common(tiny.newest(root_of(tmp_path / "b"))).global_step == 9


def test_the_last_step_is_saved_whatever_the_interval(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 7, checkpoint={"save_interleaved_steps": 5}).train()
    assert tiny.numbers(root_of(tmp_path)) == [5, 7]


def test_the_present_interval_holds_not_the_saved_one(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5, checkpoint={"save_max": 9}).train()
    tiny.trainer(tmp_path, 12, checkpoint={"save_max": 9, "save_interleaved_steps": 3}).train()
    assert tiny.numbers(root_of(tmp_path)) == [5, 6, 9, 12]


def test_a_run_that_comes_by_the_same_step_and_sample_again_is_saved_there(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 4).train()
    root = tmp_path / "checkpoint"
    before = tiny.newest(root)
    first = tiny.state(before)
    # Step 4 of 16 samples becomes step 2 and sample 0; two steps of 8 lead to step 4 and sample 16 once more.
    tiny.trainer(tmp_path, 4, training={"global_batch_size": 8, "ignore_data_skip": True}).train()
    after = tiny.newest(root)
    assert (after.iteration, after.commit.consumed_samples) == (before.iteration, before.commit.consumed_samples)
    assert after.commit.sequence == before.commit.sequence + 1
    assert tiny.state(after) != first


def test_a_scaled_run_saves_the_step_number_it_was_resumed_from(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 12, checkpoint={"save_interleaved_steps": 12}).train()
    larger = {"training": {"global_batch_size": 8}, "checkpoint": {"save_interleaved_steps": 12}}
    tiny.trainer(tmp_path, 13, **larger).train()
    assert tiny.numbers(root_of(tmp_path)) == [12, 13]
    twelve = Root(str(root_of(tmp_path))).find(12)
    assert twelve is not None
    assert (tiny.common(twelve).global_batch_size, tiny.common(twelve).consumed_samples) == (8, 96)
    assert twelve.commit.parent == 1
    told = [event for event in read_events(Root(str(root_of(tmp_path)))) if event["event"] == "resume"]
    assert [(event["step"], event["notes"]) for event in told] == [(6, ["step 12 x 4 / 8 = 6"])]


def test_scaling_twice_comes_back_to_where_it_would_have_been(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.trainer(tmp_path, 5).train()
    tiny.trainer(tmp_path, 4, training={"global_batch_size": 6}).train()
    told = capfd.readouterr().err
    assert "5 x 4 / 6" in told
    assert "rounded down to 3" in told
    assert "training.steps is not scaled" in told
    tiny.trainer(tmp_path, 8).train()
    lines = superseded(read_lines(str(tmp_path / "metrics.jsonl")))
    assert [line["samples"] for line in lines][4:] == [[16, 20], [20, 26], [26, 30], [30, 34]]
    assert [line["step"] for line in lines][4:] == [5, 4, 7, 8]


@pytest.mark.parametrize("kind", ["ConstantWarmUpLR", "CosineWithWarmUpLR"])
def test_the_configured_rate_wins_and_the_change_is_told(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = {"type": kind, "warmup_steps": 2, "total_steps": 40}
    run: dict[str, Any] = {"lr_scheduler": {**keys}}
    tiny.trainer(tmp_path / "a", 5, **run).train()
    doubled = {"lr_scheduler": {**keys, "learning_rate": 0.02}}
    tiny.trainer(tmp_path / "a", 8, **doubled).train()
    told = capfd.readouterr().err
    assert "lr_scheduler.learning_rate: 0.01 -> 0.02" in told
    tiny.trainer(tmp_path / "b", 8, **doubled).train()
    assert [row[2] for row in tiny.trace(tmp_path / "a")][5:] == [row[2] for row in tiny.trace(tmp_path / "b")][5:]


def test_an_optimizer_of_ones_own_keeps_the_ratio_of_its_rates(tmp_path: Path) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.RMSprop([{"params": [first], "lr": 0.001}, {"params": rest, "lr": 0.01}], momentum=0.5)

    tiny.trainer(tmp_path / "a", 9, given_optimizer=made).train()
    for stop in (2, 6):
        tiny.trainer(tmp_path / "b", stop, given_optimizer=made).train()
    run = tiny.trainer(tmp_path / "b", 9, given_optimizer=made)
    run.train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    rates = [group["lr"] for group in run.optimizer.param_groups]
    assert rates[0] == pytest.approx(rates[1] / 10, rel=1e-12)


def test_an_optimizer_of_other_parameters_is_refused_before_training(tmp_path: Path) -> None:
    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])

    with pytest.raises(UsageError, match="updates parameters that are not the model's"):
        tiny.trainer(tmp_path, 3, given_optimizer=made).train()
    assert not (tmp_path / "metrics.jsonl").exists()


def test_steps_lowered_and_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(tmp_path, 10).train()
    before = tiny.tree(tmp_path, but=("lock", "events.jsonl"))
    capfd.readouterr()
    assert tiny.trainer(tmp_path, 6).train().global_step == 10
    assert "step 10 of 6 is reached" in capfd.readouterr().err
    assert tiny.tree(tmp_path, but=("lock", "events.jsonl")) == before
    tiny.trainer(tmp_path, 12).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 13))


# ---- data


def test_changed_data_stop_the_start_with_both_identities_and_the_ways_on(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    with pytest.raises(DataError) as caught:
        tiny.trainer(tmp_path, 8, data=tiny.Noisy(41, "other")).train()
    for word in ("37", "41", "noisy", "other", "ignore_data_skip", "data_skip_steps"):
        assert word in str(caught.value)


def test_a_split_that_is_drawn_anew_at_each_start_is_changed_data(tmp_path: Path) -> None:
    def split(seed: int) -> Any:
        return torch.utils.data.random_split(tiny.Noisy(), [30, 7], torch.Generator().manual_seed(seed))[0]

    for steps in (5, 8):
        tiny.trainer(tmp_path, steps, data=split(1)).train()
    with pytest.raises(DataError, match=r"are not those that the checkpoint was trained on:\n  fingerprint"):
        tiny.trainer(tmp_path, 9, data=split(2)).train()


@pytest.mark.parametrize(("total", "told"), [(6, "is 0 from step 7 to the last, 9"), (8, ""), (9, ""), (40, "")])
def test_steps_without_a_rate_are_warned_about(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], total: int, told: str
) -> None:
    tiny.trainer(tmp_path, 9, lr_scheduler={"total_steps": total}).train()
    rates = [row[2] for row in tiny.trace(tmp_path)]
    assert [step for step, rate in enumerate(rates, 1) if rate == 0 and step > 1] == list(range(total + 1, 10))
    err = capfd.readouterr().err
    assert told in err
    assert ("warning" in err) == bool(told)


def test_a_lazy_module_is_told_to_have_no_shape_yet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the model's 0\.weight has no shape yet"):
        tiny.trainer(tmp_path, 2, model=lambda: nn.Sequential(nn.LazyLinear(1))).train()


def test_another_order_of_the_same_data_is_changed_data(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    with pytest.raises(DataError, match=r"(?s)shuffle: True -> False.*ignore_data_skip"):
        tiny.trainer(tmp_path, 8, train_dataset={"dataloader": {"shuffle": False}}).train()


def test_another_micro_batch_uses_the_same_samples_and_says_that_draws_differ(
    tmp_path: Path, straight: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.trainer(tmp_path, 5).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, 12, training={"local_batch_size": 4}).train()
    assert "other random draws" in capfd.readouterr().err
    assert [(row[0], row[4], row[6]) for row in tiny.trace(tmp_path)] == [
        (row[0], row[4], row[6]) for row in tiny.trace(straight)
    ]


def test_ignored_data_start_afresh_once_and_the_history_stays(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    asked = {"training": {"ignore_data_skip": True}}
    tiny.trainer(tmp_path, 8, data=tiny.Noisy(41, "other"), **asked).train()
    tiny.trainer(tmp_path, 10, data=tiny.Noisy(41, "other"), **asked).train()
    lines = superseded(read_lines(str(tmp_path / "metrics.jsonl")))
    assert [line["samples"][0] for line in lines] == [0, 4, 8, 12, 16, 0, 4, 8, 12, 16]
    assert [line["step"] for line in lines] == list(range(1, 11))


def test_a_skip_is_applied_again_when_nothing_was_saved_since(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    skip = {"training": {"data_skip_steps": 2}, "checkpoint": {"enable_save": False}}
    tiny.trainer(tmp_path, 7, **skip).train()
    tiny.trainer(tmp_path, 7, training={"data_skip_steps": 2}).train()
    assert [row[4] for row in tiny.trace(tmp_path)][5:] == [[28, 32], [32, 36]]


def test_what_is_skipped_on_a_ramp_is_what_so_many_steps_would_have_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ramp = {"global_batch_size": 8, "rampup_batch_size": [2, 2, 24]}
    tiny.trainer(tmp_path / "straight", 7, training=ramp).train()
    tiny.trainer(tmp_path / "skipped", 2, training=ramp).train()
    tiny.trainer(tmp_path / "skipped", 4, training={**ramp, "data_skip_steps": 3}).train()
    straight = [row[4] for row in tiny.trace(tmp_path / "straight")]
    assert [row[4] for row in tiny.trace(tmp_path / "skipped")] == [*straight[:2], *straight[5:]]
    assert "begins afresh" not in capfd.readouterr().err
    tiny.trainer(tmp_path / "skipped", 5, training={**ramp, "ignore_data_skip": True}).train()
    assert "what follows their samples begins afresh: rampup_batch_size" in capfd.readouterr().err
    assert tiny.trace(tmp_path / "skipped")[-1][4] == straight[0]


def test_skipped_ranges_count_as_consumed(tmp_path: Path) -> None:
    skipping = {"training": {"skip_ranges": [[6, 14], [30, 31]]}}
    tiny.trainer(tmp_path / "a", 10, **skipping).train()
    for stop in (2, 6, 10):
        tiny.trainer(tmp_path / "b", stop, **skipping).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    assert tiny.trace(tmp_path / "a")[-1][5] == 49


def test_a_ramp_goes_on_where_it_was(tmp_path: Path) -> None:
    ramp = {"training": {"global_batch_size": 8, "rampup_batch_size": [2, 2, 24]}}
    tiny.trainer(tmp_path / "a", 12, **ramp).train()
    for stop in (1, 3, 6, 12):
        tiny.trainer(tmp_path / "b", stop, **ramp).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


def test_a_rate_by_samples_follows_them_through_a_change_of_the_batch(tmp_path: Path) -> None:
    by = {"lr_scheduler": {"by": "samples"}}
    tiny.trainer(tmp_path / "a", 12, **by).train()
    tiny.trainer(tmp_path / "b", 6, **by).train()
    tiny.trainer(tmp_path / "b", 12, **by).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


def test_a_changed_seed_is_refused_with_both(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5).train()
    with pytest.raises(MismatchError, match=r"(?s)3.*4.*hint.*training\.seed=3"):
        tiny.trainer(tmp_path, 8, training={"seed": 4}).train()


# ---- draws that the run itself makes


def test_python_and_numpy_draws_of_a_loss_come_back_too(tmp_path: Path) -> None:
    import random

    import numpy

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return tiny.loss_of(model, batch) * (1 + random.random() + float(numpy.random.rand()))

    tiny.trainer(tmp_path / "a", 8, loss=loss).train()
    tiny.trainer(tmp_path / "b", 3, loss=loss).train()
    random.seed(99)
    tiny.trainer(tmp_path / "b", 8, loss=loss).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_with_masters_resumes_in_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        return tiny.Net().to(dtype)

    tiny.trainer(tmp_path / "a", 12, model=model).train()
    for stop in (1, 4, 9, 12):
        tiny.trainer(tmp_path / "b", stop, model=model).train()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")
    a, b = (tiny.newest(root_of(tmp_path / name)) for name in "ab")
    assert tiny.state(a) == tiny.state(b)
    assert any(name.startswith("optimizer:main_param.") for name in tiny.state(a))
    assert tiny.common(a) == tiny.common(b)


def test_the_loss_scale_and_its_counter_come_back(tmp_path: Path) -> None:
    def run(output: Path, stop: int) -> tuple[float, int]:
        # The loss is so large that the scale shrinks a few times before an update is applied.
        made = tiny.trainer(output, stop, model=lambda: tiny.Net().half(), loss=lambda m, b: tiny.loss_of(m, b) * 50)
        made.train()
        assert tiny.common(tiny.newest(root_of(output))).loss_scale == made.scaler.scale
        return made.scaler.scale, made.scaler.good_steps

    straight = run(tmp_path / "a", 12)
    assert straight[0] < 65536.0
    assert [run(tmp_path / "b", stop) for stop in (2, 7, 12)][-1] == straight
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


# ---- steps that are not finite


def poison(*steps: int) -> Any:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return tiny.loss_of(model, batch) * (math.nan if (calls[0] + 1) // 2 in steps else 1.0)

    return loss


def test_a_step_that_is_not_finite_marks_what_is_saved_and_a_healthy_one_can_be_asked_for(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 10, loss=poison(10)).train()
    assert tiny.common(tiny.newest(root_of(tmp_path))).ckpt_status == 1
    assert not tiny.newest(root_of(tmp_path)).commit.healthy
    tiny.trainer(tmp_path, 12, checkpoint={"load_healthy": True}).train()
    rows = tiny.trace(tmp_path)
    assert [row[0] for row in rows] == list(range(1, 13))
    assert all(row[1] is not None and math.isfinite(row[1]) for row in rows)


def test_a_skipped_update_changes_no_weight_and_is_counted(tmp_path: Path) -> None:
    kept: dict[str, dict[str, Tensor]] = {}

    class Watch(tiny.Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            kept[state.global_step] = tiny.weights(trainer.model)

    skipping = {"training": {"use_skip_step_on_nan": True}}
    reached = tiny.trainer(tmp_path, 6, loss=poison(4), callbacks=(Watch(),), **skipping).train()
    assert (reached.skipped_steps, reached.consecutive_skipped_steps, reached.global_step) == (1, 0, 6)
    assert tiny.same(kept[3], kept[4])  # type: ignore[index]
    assert not tiny.same(kept[4], kept[5])  # type: ignore[index]
    assert [row[4] for row in tiny.trace(tmp_path)] == [[4 * i, 4 * i + 4] for i in range(6)]


def test_too_many_skipped_steps_stop_the_run_with_the_last_save_untouched(tmp_path: Path) -> None:
    skipping = {"training": {"use_skip_step_on_nan": True, "max_consecutive_skipped_steps": 3}}
    with pytest.raises(TrainingError, match="left out 3 times in a row"):
        tiny.trainer(tmp_path, 12, loss=poison(6, 7, 8), **skipping).train()
    assert tiny.numbers(root_of(tmp_path)) == [5]
    tiny.trainer(tmp_path, 12, **skipping).train()
    assert [row[0] for row in tiny.trace(tmp_path)] == list(range(1, 13))


# ---- hooks and registered objects


def test_no_hook_of_the_resumed_step_runs_again(tmp_path: Path) -> None:
    tiny.trainer(tmp_path, 5, callbacks=(tiny.Recorder(),)).train()
    recorder = tiny.Recorder()
    tiny.trainer(tmp_path, 7, callbacks=(recorder,), checkpoint={"save_interleaved_steps": 1}).train()
    assert recorder.seen == [
        ("begin", 5),
        ("step_begin", 5),
        ("step_end", 6),
        ("save", 6),
        ("step_begin", 6),
        ("step_end", 7),
        ("save", 7),
        ("end", 7),
    ]
    assert recorder.steps == 7


class Average:
    """An exponential moving average with some history, as people register them."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}
        self.history: list[Any] = [0, [1.5, None], {"on": True, 3: "three"}]

    def update(self, model: nn.Module) -> None:
        for name, value in model.state_dict().items():
            held = self.shadow.setdefault(name, torch.zeros_like(value, dtype=torch.float64))
            held.lerp_(value.double(), 0.1)
        self.history[0] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "history": self.history, "none": None, "pair": (1, 2.5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (1, 2.5)
        assert state["none"] is None
        self.shadow, self.history = state["shadow"], state["history"]


class Averaging(tiny.Callback):
    def __init__(self, average: Average) -> None:
        self.average = average

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.average.update(trainer.model)


def test_a_registered_object_goes_on_as_it_was(tmp_path: Path) -> None:
    whole, parts = Average(), Average()
    tiny.trainer(tmp_path / "a", 8, callbacks=(Averaging(whole),), extra={"ema": whole}).train()
    for stop in (3, 8):
        parts = Average()
        tiny.trainer(tmp_path / "b", stop, callbacks=(Averaging(parts),), extra={"ema": parts}).train()
    assert tiny.same(whole.shadow, parts.shadow)
    assert whole.history == parts.history
    a, b = (tiny.newest(root_of(tmp_path / name)) for name in "ab")
    assert tiny.state(a, "extra") == tiny.state(b, "extra") != {}


def test_an_object_missing_on_either_side_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.trainer(tmp_path, 5).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, 6, extra={"ema": Average()}).train()
    assert "`ema` is not in the checkpoint" in capfd.readouterr().err
    tiny.trainer(tmp_path, 7).train()
    assert "not registered here: ema" in capfd.readouterr().err


# ---- freezing


def test_frozen_and_unfrozen_again_weights_and_moments_are_exact(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def frozen() -> nn.Module:
        net = tiny.Net()
        net.first.requires_grad_(False)
        return net

    def optimizer_state(step: int) -> dict[str, str]:
        iteration = tiny.newest(root_of(tmp_path))
        assert iteration.iteration == step
        return tiny.state(iteration, "optimizer")

    of_first = [f"optimizer:adam_{each}.first.{part}" for each in "mv" for part in ("weight", "bias")]
    tiny.trainer(tmp_path, 5).train()
    five = tiny.state(tiny.newest(root_of(tmp_path)))
    capfd.readouterr()
    for stop in (7, 8):
        tiny.trainer(tmp_path, stop, model=frozen).train()
        assert (
            "2 parameters are frozen; their optimizer state is kept: first.weight, first.bias" in capfd.readouterr().err
        )
    eight = tiny.state(tiny.newest(root_of(tmp_path)))
    assert five["model:first.weight"] == eight["model:first.weight"]
    assert five["model:last.weight"] != eight["model:last.weight"]
    assert {name: five[name] for name in of_first} == {name: eight[name] for name in of_first}
    made = tiny.trainer(tmp_path, 9)

    class Look(tiny.Callback):
        def on_train_begin(self, trainer: Any, state: Any) -> None:
            steps = {n: float(trainer.optimizer.state[p]["step"]) for n, p in trainer.model.named_parameters()}
            assert steps == {"first.weight": 5.0, "first.bias": 5.0, "last.weight": 8.0, "last.bias": 8.0}

    made._callbacks.append(Look())
    made.train()
    told = capfd.readouterr().err
    assert "2 parameters are trained again, with the optimizer state from before they were frozen" in told
    assert "fresh" not in told
    assert {name for name in optimizer_state(9) if "step" in name} == {
        f"optimizer:adam_step.{layer}.{part}" for layer in ("first", "last") for part in ("weight", "bias")
    }


def test_a_loss_scale_that_has_grown_and_shrunk_comes_back(tmp_path: Path) -> None:
    class Eager(tiny.Callback):
        """A scale that grows after three good steps."""

        def on_build(self, trainer: Any, state: Any) -> None:
            trainer.scaler.growth_interval = 3

    scales: dict[str, list[float]] = {"a": [], "b": []}

    def run(name: str, stop: int) -> Any:
        class Watch(tiny.Callback):
            def on_step_end(self, trainer: Any, state: Any) -> None:
                scales[name].append(state.loss_scale)

        made = tiny.trainer(
            tmp_path / name,
            stop,
            model=lambda: tiny.Net().half(),
            loss=lambda m, b: tiny.loss_of(m, b) * 50,
            callbacks=(Eager(), Watch()),
        )
        made.train()
        return made

    straight = run("a", 24)
    for stop in (7, 11, 13, 24):
        parts = run("b", stop)
    steps = scales["a"]
    assert any(b > a for a, b in itertools.pairwise(steps))
    assert any(b < a for a, b in itertools.pairwise(steps))
    assert scales["a"] == scales["b"]
    assert straight.scaler.state_dict() == parts.scaler.state_dict()
    assert tiny.trace(tmp_path / "a") == tiny.trace(tmp_path / "b")


# ---- what becomes of the learning rate


def cosine(peak: float, total: int) -> float:
    """The rate of the sixth step, after a warm-up of three."""
    return peak * 0.5 * (1 + math.cos(math.pi * (5 - 3) / (total - 3)))


@pytest.mark.parametrize(
    ("schedule", "steps", "warned"),
    [
        ({"total_steps": None}, 20, cosine(0.01, 20)),
        ({"total_steps": 40}, 20, None),
        ({"total_steps": None, "learning_rate": 0.02}, 12, cosine(0.02, 12)),
        ({"type": "ConstantWarmUpLR", "total_steps": None}, 20, 0.01),
    ],
)
def test_a_change_of_the_rates_ahead_is_warned_about_with_old_and_new(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], schedule: dict[str, Any], steps: int, warned: float | None
) -> None:
    first = {"total_steps": schedule["total_steps"]}

    class Stop(tiny.Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            if state.global_step == 5:
                state.stop_signal = 15

    tiny.trainer(tmp_path, 12, lr_scheduler=first, callbacks=(Stop(),)).train()
    capfd.readouterr()
    tiny.trainer(tmp_path, steps, lr_scheduler=schedule).train()
    told = capfd.readouterr().err
    assert ("the learning rate is another" in told) == (warned is not None)
    assert warned is None or f"at step 6 {cosine(0.01, 12):.6g} -> {warned:.6g}" in told


def test_each_group_has_its_factor_on_the_rate_also_after_a_resume(tmp_path: Path) -> None:
    rates: list[tuple[int, dict[str, float]]] = []

    class Look(tiny.Callback):
        def on_step_end(self, trainer: Any, state: Any) -> None:
            found = {n: g["lr"] for g in trainer.optimizer.param_groups for n in g["param_names"]}
            rates.append((state.global_step, {n: found[n] / max(state.learning_rate, 1e-30) for n in found}))

    for stop in (3, 6):
        tiny.trainer(tmp_path, stop, optimizer={"lr_scale": {"first": 0.25}}, callbacks=(Look(),)).train()
    expected = {"first.weight": 0.25, "first.bias": 0.25, "last.weight": 1.0, "last.bias": 1.0}
    for number, (step, found) in enumerate(rates, start=1):
        assert step == number
        # The very first rate of a warm-up is zero.
        assert number == 1 or found == pytest.approx(expected)
