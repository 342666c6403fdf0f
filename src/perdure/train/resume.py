"""What a resume does to step and samples: decided purely, from the saved position and the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perdure.config.schema import TrainConfig
from perdure.data.cursor import BatchPlan, scale_step
from perdure.data.growth import Stretches, grown
from perdure.data.identity import differences, has_grown
from perdure.engine.progress import Progress
from perdure.errors import DamagedCheckpointError, DataError, MismatchError, PerdureError, UsageError
from perdure.optim.schedules import build_schedule
from perdure.train.state import TrainerState

__all__ = ["ResumePoint", "Wish", "changed_settings", "drawing_layout", "rate_warning", "resume_point", "understood"]


@contextmanager
def understood(where: str) -> Iterator[None]:
    """Around the taking apart of what a checkpoint says of its training.

    Raises:
        DamagedCheckpointError: it isn't what a trainer writes.
    """
    try:
        yield
    except PerdureError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"{where}: metadata.json: training: not what a trainer writes ({type(error).__name__}: {str(error)[:200]})",
            hint="its contents are as they were written; take the weights alone: checkpoint.no_load_optim=True",
        ) from error


@dataclass(frozen=True)
class Wish:
    """What the configuration asks of a resume."""

    plan: BatchPlan
    steps: int
    seed: int
    shuffle: bool = False
    local_batch_size: int = 1
    ignore_data_skip: bool = False
    data_skip_steps: int = 0
    accept_growth: bool = False
    by_samples: tuple[str, ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: TrainConfig) -> Wish:
        """What a configuration asks."""
        training = config.training
        ramp, rate = training.rampup_batch_size, config.lr_scheduler
        by_samples = ["rampup_batch_size"] if ramp is not None else []
        by_samples += [f"the learning rate (lr_scheduler.by: {rate.by})"] if rate.by == "samples" else []
        return cls(
            plan=BatchPlan(training.global_batch_size, rampup=ramp, skip_ranges=training.skip_ranges),
            steps=training.steps,
            seed=training.seed,
            shuffle=config.train_dataset.dataloader.shuffle,
            local_batch_size=training.local_batch_size,
            ignore_data_skip=training.ignore_data_skip,
            data_skip_steps=training.data_skip_steps,
            accept_growth=training.accept_data_growth,
            by_samples=tuple(by_samples),
            layout=drawing_layout(config),
        )

    @property
    def one_shot(self) -> dict[str, Any]:
        """The keys that are applied once and recorded, so that a restart doesn't apply them again."""
        asked: dict[str, Any] = {}
        if self.ignore_data_skip:
            asked["ignore_data_skip"] = True
        if self.data_skip_steps:
            asked["data_skip_steps"] = self.data_skip_steps
        return asked


@dataclass
class ResumePoint:
    """Where training goes on; `notes` belong into the resume line, `warnings` on lines of their own.

    `data_afresh` says that positions are those of other data than before, `moved` which one-shot keys were
    applied, `stretches` which lengths the data have had (empty where that is unknown).
    """

    global_step: int
    consumed_samples: int
    data_afresh: bool = False
    moved: dict[str, Any] = field(default_factory=dict)
    stretches: Stretches = ()
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def resume_point(saved: Progress, training: Mapping[str, Any], wish: Wish, dataset: Mapping[str, Any]) -> ResumePoint:
    """The step and the stream position of the next sample.

    Args:
        saved: the position in the checkpoint.
        training: metadata's `training`; a foreign checkpoint's is empty.
        dataset: identity of the present training data.

    Raises:
        MismatchError: the seed was changed.
        DataError: the data are not the data that the checkpoint was trained on.
    """
    point = ResumePoint(saved.global_step, saved.consumed_samples)
    seed = training.get("seed", wish.seed)
    if seed != wish.seed:
        raise MismatchError(
            f"training.seed: the checkpoint was trained with {seed}, the configuration says {wish.seed}; "
            "order and draws of all samples depend on it",
            hint=f"set training.seed={seed}, or start anew from the weights: checkpoint.no_load_optim=True",
        )
    fresh_wishes = {k: v for k, v in wish.one_shot.items() if training.get("applied", {}).get(k) != v}
    if not fresh_wishes:
        _check_data(training, dataset, saved.consumed_samples, wish)
    point.moved = fresh_wishes
    _take_in_growth(point, training, dataset)
    _scale(point, saved, wish)
    draws = {"training.local_batch_size": wish.local_batch_size, **wish.layout}
    settings = training.get("settings", {})
    changed = [key.partition(".")[2] for key, value in draws.items() if settings.get(key, value) != value]
    if changed:
        verb = "has" if len(changed) == 1 else "have"
        text = f"the same samples, but other random draws in the model ({', '.join(changed)} {verb} changed)"
        point.notes.append(text)
    if "ignore_data_skip" in fresh_wishes:
        point.consumed_samples, point.data_afresh, point.stretches = 0, True, ()
        point.notes.append("data start afresh (ignore_data_skip)")
        if wish.by_samples:
            what = ", ".join(wish.by_samples)
            point.warnings.append(f"with the data, what follows their samples begins afresh: {what}")
    if "data_skip_steps" in fresh_wishes:
        point.consumed_samples = wish.plan.after(point.consumed_samples, wish.data_skip_steps)
        steps = f"{wish.data_skip_steps} step{'s' * (wish.data_skip_steps > 1)}"
        point.notes.append(f"{steps} of data left out (data_skip_steps)")
    return point


def _check_data(training: Mapping[str, Any], dataset: Mapping[str, Any], consumed: int, wish: Wish) -> None:
    saved = training.get("datasets", {}).get("train") or dataset
    can_grow = bool(training.get("stretches"))
    found = differences(saved, dataset, consumed_samples=consumed, grown=can_grow and wish.accept_growth)
    # Another order of the same samples repeats some and leaves out others.
    if training.get("shuffle", wish.shuffle) != wish.shuffle:
        found.append(f"shuffle: {training['shuffle']} -> {wish.shuffle}")
    if found:
        ways = (
            "training.ignore_data_skip=True starts the data afresh, training.data_skip_steps=N goes on N steps further"
        )
        if can_grow and has_grown(saved, dataset) and not differences(saved, dataset, grown=True):
            ways += ", training.accept_data_growth=True takes in what was added at their end from the next epoch on"
        raise DataError(
            "the training data are not those that the checkpoint was trained on:\n  " + "\n  ".join(found),
            hint=f"bring the data back, or go on on purpose: {ways}",
        )


def _take_in_growth(point: ResumePoint, training: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
    """Which lengths the data have had, where they are the same data as before."""
    had = tuple((int(start), int(length)) for start, length in training.get("stretches", ()))
    length = dataset.get("length")
    if not had or not isinstance(length, int) or (point.moved and had[-1][1] != length):
        return
    point.stretches = grown(had, length, point.consumed_samples)
    if had[-1][1] != length:
        point.notes.append(
            f"{length - had[-1][1]} samples added to the data, taken in from sample {point.stretches[-1][0]} on"
        )


def _scale(point: ResumePoint, saved: Progress, wish: Wish) -> None:
    old, new = saved.global_batch_size, wish.plan.global_batch_size
    if old in (0, new) or wish.plan.rampup is not None:
        return
    step, whole = scale_step(saved.global_step, old, new)
    point.global_step = step
    point.notes.append(f"step {saved.global_step} x {old} / {new} = {step}")
    if not whole:
        point.warnings.append(
            f"step {saved.global_step} x {old} / {new} is not whole; it was rounded down to {step}, and data go on at "
            f"sample {saved.consumed_samples} exactly"
        )
    point.warnings.append(
        f"training.steps is not scaled: {max(wish.steps - step, 0)} steps of {new} samples remain until {wish.steps}"
    )


def drawing_layout(config: TrainConfig) -> dict[str, Any]:
    """The keys of the layout on which random draws in the model depend: which part of it a rank draws for."""
    keys = ("tensor_parallel", "pipeline_parallel", "pipeline_parallel_interleave_num")
    told = {f"parallelism.{key}": getattr(config.parallelism, key) for key in keys}
    if config.parallelism.pipeline_parallel > 1:
        key = "pipeline_parallel_layers_per_stage"
        told[f"parallelism.{key}"] = getattr(config.parallelism, key) or "auto"
    return told


def changed_settings(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every setting that affects the run and differs."""
    keys = [k for k in present if k in saved and saved[k] != present[k]]
    return [f"{key}: {saved[key]} -> {present[key]}" for key in keys]


def rate_warning(
    saved: Mapping[str, Any], rate: Callable[[int, int, int], float], state: TrainerState, batch_size: int
) -> str:
    """A line for a run whose learning rates will not be those that it had been heading for; empty for one whose are.

    Args:
        saved: the settings of the checkpoint's run.
        rate: the present rate at (step, consumed samples, batch size).
    """
    section = {key.partition(".")[2]: value for key, value in saved.items() if key.startswith("lr_scheduler.")}
    try:
        former = build_schedule(section, saved["training.steps"])
    except (UsageError, KeyError, TypeError, ValueError):
        return ""
    first, last = state.global_step, max(state.steps, saved["training.steps"]) - 1
    for step in sorted({first, (first + last) // 2, last} - set(range(first))):
        samples = state.consumed_samples + (step - first) * batch_size
        old = former.rate(global_step=step, consumed_samples=samples, global_batch_size=batch_size)
        new = rate(step, samples, batch_size)
        if abs(new - old) > 1e-9 * max(abs(new), abs(old)):
            rates = f"at step {step + 1} {old:.6g} -> {new:.6g}"
            return f"the learning rate is another than the checkpoint's run had ahead: {rates}"
    return ""
