"""The whole configuration of a run, and where each of its keys was written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import Field, PrivateAttr, TypeAdapter, ValidationError

from perdure.config.base import Section, section_class, unnamed_key
from perdure.config.checks import cross_checks
from perdure.config.faults import Fault, Origin, Path, SectionError, config_error, found, parse_key
from perdure.config.kinds import Directory, wording
from perdure.config.layout_sections import ParallelismConfig, RecomputeConfig
from perdure.config.not_built import not_built
from perdure.config.sections import (
    CallbackConfig,
    CheckpointConfig,
    DataloaderConfig,
    DatasetConfig,
    HealthCheckpointConfig,
    LoraConfig,
    LRSchedulerConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    TensorboardConfig,
    TrainingConfig,
    TrainStateConfig,
)
from perdure.config.suggest import with_suggestion
from perdure.errors import ConfigError

__all__ = [
    "CallbackConfig",
    "CheckpointConfig",
    "DataloaderConfig",
    "DatasetConfig",
    "HealthCheckpointConfig",
    "LRSchedulerConfig",
    "LoraConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "RecomputeConfig",
    "Section",
    "TensorboardConfig",
    "TrainConfig",
    "TrainStateConfig",
    "TrainingConfig",
    "check_sections",
]


_AnySection = TypeVar("_AnySection", bound=Section)


class TrainConfig(Section):
    """A run's configuration: sections by keyword, each a section object or a mapping.

    Two configurations are equal when they say the same, wherever it was written.

    Raises:
        ConfigError: all faults of all sections and of their combinations.
    """

    training: TrainingConfig = Field(
        default=TrainingConfig(), description="how long, with which batches, from which seed"
    )
    model: ModelConfig = Field(default=ModelConfig(), description="what to train")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="the optimizer")
    lr_scheduler: LRSchedulerConfig = Field(description="the learning rate")
    parallelism: ParallelismConfig = Field(default=ParallelismConfig(), description="how the ranks share the work")
    train_dataset: DatasetConfig = Field(default=DatasetConfig(), description="what to train on")
    eval_dataset: DatasetConfig | None = Field(default=None, description="what to evaluate on")
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="saving, keeping, loading and resuming"
    )
    monitor: MonitorConfig = Field(default=MonitorConfig(), description="what is watched and told")
    recompute: RecomputeConfig = Field(default=RecomputeConfig(), description="activations computed again")
    callbacks: list[CallbackConfig] = Field(
        default=[], description="callbacks after the built-in MonitorCallback, LossCallback and CheckpointCallback"
    )
    lora_config: LoraConfig | None = Field(default=None, description="low-rank adapters")
    output_dir: Directory = Field(default="./output", description="directory of the run")

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def __init__(self, /, **data: Any) -> None:
        super().__init__(**check_sections(data, Origin()))

    @classmethod
    def from_origin(cls, data: Mapping[Any, object], origin: Origin, faults: Iterable[Fault] = ()) -> TrainConfig:
        """Check `data` as read from `origin`; `faults` are those that reading found already.

        Raises:
            ConfigError: all faults, those given and those found here.
        """
        config = cls.model_construct(**check_sections(data, origin, faults))
        config._origin = origin
        return config

    @property
    def save_path(self) -> str:
        """The root of the checkpoints: `checkpoint.save_path`, or `checkpoint` in `output_dir` where that is empty."""
        return self.checkpoint.save_path or os.path.join(self.output_dir, "checkpoint")

    def fault(self, key: str, text: str, *, hint: str | None = None) -> ConfigError:
        """An error about a key (`training.steps`, `callbacks[0].type`) that says where it was written."""
        return self.faults([(key, text)], hint=hint)

    def faults(self, faults: Iterable[tuple[str, str]], *, hint: str | None = None) -> ConfigError:
        """One error about several keys; `faults` holds pairs of key and what is wrong."""
        return config_error([Fault(parse_key(key), text, hint) for key, text in faults], self._origin)

    def require(self, *, model: bool = False, train_dataset: bool = False, eval_dataset: bool = False) -> None:
        """Check that what is to be built is described; not needed for what is passed as an object.

        Raises:
            ConfigError: `model` without a type, a data set without one, or nothing to evaluate on.
        """
        faults: list[tuple[str, str]] = []
        if model and not (self.model.type or self.model.model_type or self.model.architectures):
            faults.append(("model.type", "missing; expected a model's name or an import path package.module:Object"))
        if train_dataset and self.train_dataset.dataloader.type is None:
            faults.append(("train_dataset.dataloader.type", _NO_SOURCE))
        if eval_dataset and self.eval_dataset is None:
            text = f"expected an eval_dataset section for it, or 0; found {self.training.eval_interleaved_steps}"
            faults.append(("training.eval_interleaved_steps", text))
        elif eval_dataset and self.eval_dataset is not None and self.eval_dataset.dataloader.type is None:
            faults.append(("eval_dataset.dataloader.type", _NO_SOURCE))
        if faults:
            raise self.faults(faults)


_NO_SOURCE = "missing; expected a source's name or an import path package.module:Object"


def check_sections(data: Mapping[Any, object], origin: Origin, faults: Iterable[Fault] = ()) -> dict[str, Any]:
    """Check sections one by one and then their combinations.

    Keys with faults are left out for the later checks, so that one run tells everything there is to tell.

    Returns:
        The sections as objects, the absent ones left out.

    Raises:
        ConfigError: all faults, `faults` included.
    """
    every = list(faults)
    written, more = _names(data, ())
    every += more
    every += [Fault((name,), "unknown key") for name in written if name not in TrainConfig.model_fields]
    sections: dict[str, Any] = {}
    for name, field in TrainConfig.model_fields.items():
        if name not in written and not field.is_required():
            continue
        sections[name], more = _value(name, written.get(name))
        every += more
    draft = TrainConfig.model_construct(**sections)
    unbuilt = list(not_built(draft))
    every += unbuilt
    faulty = {fault.path for fault in every if fault.path}
    for finding in cross_checks(draft):
        if not any(_touches(parse_key(key), faulty) for key in (finding.key, *finding.about)):
            every.append(Fault(parse_key(finding.key), finding.text, finding.hint))
    if every:
        raise config_error([with_suggestion(fault, TrainConfig) for fault in every], origin)
    return sections


def _value(name: str, value: object) -> tuple[Any, list[Fault]]:
    """The checked value of a top-level key, or the best that can be made of it, and its faults."""
    field = TrainConfig.model_fields[name]
    if name == "callbacks":
        return _callbacks(value)
    section = section_class(field.annotation)
    if section is not None:
        nullable = field.default is None
        return (None, []) if value is None and nullable else _section(section, value, (name,))
    try:
        return TypeAdapter(Directory).validate_python(value, strict=True), []
    except ValidationError as error:
        return field.default, [Fault((name, *each["loc"]), wording(each)) for each in error.errors()]


def _callbacks(value: object) -> tuple[list[CallbackConfig], list[Fault]]:
    if value is None:
        return [], []
    if not isinstance(value, list | tuple):
        return [], [Fault(("callbacks",), f"expected a list of mappings, found {found(value)}")]
    pairs = [_section(CallbackConfig, item, ("callbacks", index)) for index, item in enumerate(value)]
    return [section for section, _ in pairs], [fault for _, faults in pairs for fault in faults]


def _section(cls: type[_AnySection], value: object, path: Path) -> tuple[_AnySection, list[Fault]]:
    if isinstance(value, cls):
        return value, []
    if value is not None and not isinstance(value, Mapping):
        return cls.model_construct(), [Fault(path, f"expected a mapping of keys to values, found {found(value)}")]
    data, faults = _names(value or {}, path)
    try:
        return cls(**data), faults
    except SectionError as error:
        faults += [fault.below(path) for fault in error.faults]
        sound = {key: item for key, item in data.items() if all(fault.path[:1] != (key,) for fault in error.faults)}
    try:
        return cls(**sound), faults
    except SectionError:
        return cls.model_construct(), faults


def _names(data: Mapping[Any, object], path: Path) -> tuple[dict[str, object], list[Fault]]:
    """The entries whose keys are names, and a fault for each other one."""
    faults = [unnamed_key(path, key) for key in data if not isinstance(key, str)]
    return {key: value for key, value in data.items() if isinstance(key, str)}, faults


def _touches(path: Path, faulty: Iterable[Path]) -> bool:
    return any(path[: len(other)] == other or other[: len(path)] == path for other in faulty)
