"""From the sections of a configuration to live objects, with faults told at the key that causes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from perdure.config.ranks import check_ranks
from perdure.config.schema import TrainConfig
from perdure.data.loader import ResumableLoader
from perdure.data.sources.registry import build_source
from perdure.engine.ranks import Ranks
from perdure.errors import UsageError
from perdure.importing import KeyFaults, import_object
from perdure.models.build import build_model
from perdure.optim.build import build_optimizer
from perdure.optim.schedules import build_schedule
from perdure.train.callbacks.base import Callback

__all__ = ["callbacks", "check_world", "data", "loader", "network", "optimizer_and_schedule", "settings_of"]

# The reference's own callbacks; what they do is part of the Trainer here.
_BUILT_IN = {"MonitorCallback", "LossCallback", "CheckpointCallback"}

Rate = Callable[[int, int, int], float]


def check_world(config: TrainConfig, world_size: int) -> None:
    """Sizes that must divide the number of ranks, before anything is built."""
    check_ranks(config, world_size)


def data(config: TrainConfig, given: Any) -> Any:
    """The training data: what was passed, or what `train_dataset.dataloader` describes."""
    if given is not None:
        return given
    section = config.train_dataset.dataloader
    if section.type is None:
        raise UsageError(
            "there is no training data",
            hint="describe it in train_dataset.dataloader, or pass train_dataset to Trainer",
        )
    return build_source(
        section.type, section.extras(), fault=lambda key, text: config.fault(f"train_dataset.dataloader.{key}", text)
    )


def network(config: TrainConfig, given: nn.Module | None, dataset: Any) -> nn.Module:
    """The model: what was passed, or what `model` describes; the data say how many token ids there are."""
    if given is not None:
        return given
    try:
        return build_model(config.model, vocab_size=getattr(dataset, "vocab_size", None))
    except KeyFaults as faults:
        raise config.faults(faults.faults) from faults


def optimizer_and_schedule(config: TrainConfig, model: nn.Module, given: Any) -> tuple[Any, Rate]:
    """The optimizer, and the learning rate at (step, consumed samples, batch size).

    An optimizer that was passed keeps the ratios of its groups' rates; without `lr_scheduler` it keeps
    the rates themselves.
    """
    try:
        if config.lr_scheduler is None:
            if given is None:
                raise UsageError("there is no learning rate", hint="add lr_scheduler: {type: ..., learning_rate: ...}")
            own = float(given.param_groups[0]["lr"])
            _keep_ratios(given, own)
            return given, lambda step, samples, size: own
        schedule = build_schedule(config.lr_scheduler, config.training.steps)
        peak = config.lr_scheduler.learning_rate
        if given is not None:
            _keep_ratios(given, peak)
        optimizer = given if given is not None else build_optimizer(config.optimizer, model, lr=peak)
    except KeyFaults as faults:
        raise config.faults(faults.faults) from faults

    def rate(step: int, samples: int, size: int) -> float:
        return schedule.rate(global_step=step, consumed_samples=samples, global_batch_size=size)

    return optimizer, rate


def _keep_ratios(optimizer: Any, peak: float) -> None:
    for group in optimizer.param_groups:
        group.setdefault("lr_ratio", float(group["lr"]) / peak if peak else 1.0)


def loader(config: TrainConfig, dataset: Any, ranks: Ranks) -> ResumableLoader:
    """The loader over the training data."""
    section, training = config.train_dataset, config.training
    return ResumableLoader(
        dataset,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        seed=training.seed,
        rank=ranks.rank,
        ranks=ranks.size,
        skip_ranges=training.skip_ranges,
        rampup=training.rampup_batch_size,
        num_workers=section.num_parallel_workers,
        prefetch=max(section.prefetch_size, 1),
        shuffle=section.dataloader.shuffle,
    )


def callbacks(config: TrainConfig, given: Sequence[Callback]) -> list[Callback]:
    """The configured callbacks, then the passed ones."""
    built: list[Callback] = []
    for number, section in enumerate(config.callbacks):
        if section.type in _BUILT_IN:
            continue
        try:
            target = import_object(section.type)
            inspect.signature(target).bind(**section.extras())
            callback = target(**section.extras())
        except (UsageError, TypeError) as error:
            text = error.message if isinstance(error, UsageError) else str(error)
            raise config.fault(f"callbacks[{number}]", text) from error
        built.append(callback)
    return [*built, *given]


def settings_of(config: TrainConfig, optimizer: Any) -> dict[str, Any]:
    """What affects the run and may differ on a resume, flat: one line each where it does."""
    training = config.training
    settings: dict[str, Any] = {
        "training.steps": training.steps,
        "training.global_batch_size": training.global_batch_size,
        "training.local_batch_size": training.local_batch_size,
        "training.max_norm": training.max_norm,
        "training.deterministic": training.deterministic,
    }
    if config.lr_scheduler is not None:
        for key, value in {**config.lr_scheduler.model_dump(), **config.lr_scheduler.extras()}.items():
            settings[f"lr_scheduler.{key}"] = value
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names", "lr", "initial_lr", "lr_ratio"):
                plain = list(value) if isinstance(value, tuple) else value
                if plain is None or isinstance(plain, bool | int | float | str | list):
                    settings[f"optimizer group {group.get('name', number)}: {key}"] = plain
    return settings
