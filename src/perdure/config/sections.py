"""The sections of a configuration, each key with its kind, default and meaning.

Names, kinds and defaults of the reference's keys are the reference's. A section that keeps further keys
passes them to the constructor of what its `type` names; `extras()` gives them.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from perdure.config.base import Section
from perdure.config.faults import Fault, found
from perdure.config.kinds import (
    Betas,
    ByteSize,
    Count,
    FilePrefix,
    Nonnegative,
    PathText,
    Positive,
    Ramp,
    Ratio,
    RenameRules,
    SkipRanges,
    TextList,
    Threshold,
    TypeName,
    Words,
    is_import_path,
    parse_byte_size,
    wording,
)
from perdure.config.schedule_keys import KEY_KINDS, REQUIRED, SCHEDULE_KEYS
from perdure.importing import did_you_mean

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
    "TensorboardConfig",
    "TrainStateConfig",
    "TrainingConfig",
]


_PATH = TypeAdapter[str](PathText)


class TrainingConfig(Section):
    """`training`: how long, with which batches, from which seed."""

    steps: Positive = Field(default=1000, description="optimizer steps of the whole run")
    local_batch_size: Positive = Field(default=1, description="samples per rank and micro-batch")
    global_batch_size: Positive = Field(
        default=1, description="samples per step: a multiple of `local_batch_size` times the data-parallel ranks"
    )
    max_norm: Threshold = Field(default=1.0, description="norm to which gradients are clipped; `.inf`: no clipping")
    use_skip_step_on_nan: bool = Field(
        default=False, description="leave out the update when the gradient norm is not finite"
    )
    max_consecutive_skipped_steps: Count = Field(
        default=0, description="stop the run after so many skipped steps in a row; 0: never"
    )
    seed: Count = Field(default=42, description="seed of everything, below 2^63")
    deterministic: bool = Field(default=False, description="use deterministic kernels")
    rampup_batch_size: Ramp | None = Field(
        default=None,
        description="`[start, increment, samples]`: grow the global batch size from `start` over so many samples",
    )
    ignore_data_skip: bool = Field(
        default=False, description="start changed data afresh on a resume, keeping step and optimizer"
    )
    data_skip_steps: Count = Field(default=0, description="start changed data after so many steps on a resume")
    accept_data_growth: bool = Field(
        default=False, description="take in samples added at the end of the data, from the next epoch on"
    )
    skip_ranges: SkipRanges = Field(default=[], description="stream positions left out, as `[first, last)` pairs")
    eval_interleaved_steps: Count = Field(
        default=0, description="evaluate on `eval_dataset` every so many steps; 0: never"
    )


class ModelConfig(Section):
    """`model`: what to train; further keys go to the model's constructor."""

    model_config = ConfigDict(extra="allow")

    type: TypeName | None = Field(default=None, description="`decoder`, `transformers` or an import path")
    model_type: str | None = Field(default=None, description="the reference's name of the architecture")
    architectures: TextList | None = Field(
        default=None, description="class names, as the reference and transformers give them"
    )


class OptimizerConfig(Section):
    """`optimizer`: further keys go to the optimizer's constructor."""

    model_config = ConfigDict(extra="allow")

    type: TypeName = Field(default="AdamW", description="`AdamW`, `Muon`, a class of `torch.optim`, or an import path")
    betas: Betas = Field(default=[0.9, 0.95], description="decay rates of the two moments")
    eps: Nonnegative = Field(default=1e-8, description="term added to the denominator")
    weight_decay: Nonnegative = Field(default=0.01, description="decoupled weight decay")
    weight_decay_include: TextList | None = Field(
        default=None, description="parameters that decay (name, substring or glob); beats `weight_decay_exclude`"
    )
    weight_decay_exclude: TextList | None = Field(
        default=None,
        description="parameters that do not decay; beats the rule that one-dimensional ones and biases do not",
    )

    @classmethod
    def _check_extras(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        wrong = [key for key in ("lr", "learning_rate") if key in data]
        faults = [Fault((key,), "unknown key; it belongs to lr_scheduler.learning_rate") for key in wrong]
        return {key: value for key, value in data.items() if key not in wrong}, faults


class LRSchedulerConfig(Section):
    """`lr_scheduler`: the learning rate as a function of the step; further keys as its type takes them."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description=f"{', '.join(f'`{name}`' for name in SCHEDULE_KEYS)}, or an import path")
    learning_rate: Nonnegative = Field(default=1e-5, description="the peak")
    by: Literal["steps", "samples"] = Field(default="steps", description="what the rate follows")

    _adapters: ClassVar[dict[str, TypeAdapter[Any]]] = {}

    @classmethod
    def _check_extras(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        data, kind, faults = dict(data), data.get("type"), []
        if not isinstance(kind, str) or is_import_path(kind):
            return data, []
        if kind not in SCHEDULE_KEYS:
            near = did_you_mean(kind, SCHEDULE_KEYS) or f"; known are {', '.join(SCHEDULE_KEYS)}"
            return data, [
                Fault(
                    ("type",), f"expected a schedule or an import path package.module:Object, found {found(kind)}{near}"
                )
            ]
        for key in [key for key in data if key not in cls.model_fields]:
            if key not in SCHEDULE_KEYS[kind]:
                near = did_you_mean(key, [*SCHEDULE_KEYS[kind], *cls.model_fields])
                faults.append(
                    Fault((key,), f"unknown key of {kind}{near or '; it takes ' + ', '.join(SCHEDULE_KEYS[kind])}")
                )
                del data[key]
                continue
            try:
                data[key] = cls._adapter(key).validate_python(data[key], strict=True)
            except ValidationError as error:
                faults += [Fault((key, *each["loc"]), wording(each)) for each in error.errors()]
        required = REQUIRED.get(kind, ())
        if required and all(data.get(key) is None for key in required):
            faults.append(Fault((required[0],), f"missing; {kind} requires {' or '.join(required)}"))
        if not faults and "lr_end" in SCHEDULE_KEYS[kind] and data.get("decay_ratio") is None:
            end, warm_up = data.get("decay_steps"), data.get("warmup_steps") or 0
            if end is not None and data.get("warmup_ratio") is None and end <= warm_up:
                faults.append(Fault(("decay_steps",), f"expected more than warmup_steps ({warm_up}), found {end}"))
        return data, faults

    @classmethod
    def _adapter(cls, key: str) -> TypeAdapter[Any]:
        if key not in cls._adapters:
            cls._adapters[key] = TypeAdapter(KEY_KINDS[key] | None)
        return cls._adapters[key]


class DataloaderConfig(Section):
    """`dataloader` of a data set: further keys go to the constructor of what `type` names."""

    model_config = ConfigDict(extra="allow")

    type: TypeName | None = Field(
        default=None,
        description="`Text`, `TokenFile`, `MegatronIndexed`, `HuggingFace`, another source or an import path; "
        "required unless the data set is passed to `Trainer`",
    )
    shuffle: bool = Field(default=False, description="a new seeded order in each epoch")
    exact: bool = Field(
        default=True, description="False: accept data in a row that cannot say where they stand, and resume inexactly"
    )
    column_names: TextList = Field(default=["input_ids", "labels"], description="columns that the model is given")
    python_multiprocessing: bool = Field(default=False, description="accepted; workers are processes in any case")

    @classmethod
    def _check_extras(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        """`path`, which most sources take, is expanded as the paths of the other sections are."""
        path = data.get("path")
        several = list(path) if isinstance(path, list | tuple) else [path]
        faults: list[Fault] = []
        for index, each in enumerate(several):
            try:
                several[index] = _PATH.validate_python(each) if isinstance(each, str | os.PathLike) else each
            except ValidationError as error:
                faults += [Fault(("path",), wording(item)) for item in error.errors()]
        kept = {} if path is None else {"path": several if isinstance(path, list | tuple) else several[0]}
        return {**data, **kept}, faults


class DatasetConfig(Section):
    """`train_dataset`, `eval_dataset`: the samples, and how they are read."""

    dataloader: DataloaderConfig = Field(default=DataloaderConfig(), description="where the samples come from")
    drop_remainder: bool = Field(
        default=True,
        description="accepted: batches straddle epochs, so that nothing is dropped; an evaluation leaves out what does "
        "not fill its last batch",
    )
    num_parallel_workers: Count = Field(default=8, description="worker processes; 0: none")
    prefetch_size: Positive = Field(default=1, description="batches prepared ahead by each worker")
    numa_enable: bool = Field(
        default=False,
        description="bind workers to the processors of one memory node: that of the rank's CUDA device, or else ranks "
        "are spread over the nodes; changes nothing where there is one",
    )
    use_distribute_dataset: bool = Field(
        default=False, description="one rank reads for its tensor and pipeline group and broadcasts"
    )


class CheckpointConfig(Section):
    """`checkpoint`: saving, keeping, loading and resuming."""

    enable_save: bool = Field(default=True, description="save checkpoints; false: nothing is made below `save_path`")
    save_path: PathText = Field(default="", description="root of the checkpoints; empty: `checkpoint` in `output_dir`")
    save_max: Positive = Field(default=5, description="checkpoints kept, the oldest is removed first")
    save_interleaved_steps: Positive = Field(default=1000, description="save at every multiple of so many steps")
    no_save_optim: bool = Field(
        default=False, description="leave the optimizer out; such a checkpoint cannot be resumed from"
    )
    async_save: bool = Field(
        default=False,
        description="write in the background; a save that falls due meanwhile waits for the one under way",
    )
    prefix: FilePrefix = Field(
        default="checkpoint", description="what file names begin with: at most 100 characters, no slash"
    )
    remove_redundancy: bool = Field(default=True, description="write each distinct piece once over all ranks")
    load_path: PathText = Field(default="", description="what to load; empty: nothing")
    no_load_optim: bool = Field(default=False, description="load weights only and start at step 0")
    load_balanced: bool = Field(
        default=False, description="read each byte once over all ranks; no benefit on one process"
    )
    reshard_worker_num: Positive = Field(default=1, description="threads that read, where more than 8 shall")
    save_trainable_only: bool = Field(default=False, description="save adapter tensors only; needs `base_load_path`")
    base_load_path: PathText = Field(default="", description="the full weights below an adapter")
    auto_resume: bool = Field(
        default=False, description="resume from `save_path` where it holds a checkpoint, otherwise follow `load_path`"
    )
    on_corrupt: Literal["fallback", "error"] = Field(
        default="fallback", description="damage: load the parent checkpoint, or stop"
    )
    on_save_error: Literal["raise", "warn"] = Field(
        default="raise", description="a failed save: stop the run, or go on"
    )
    verify_on_load: Literal["inline", "first", "off"] = Field(
        default="inline", description="check contents while they arrive, all before the model is touched, or never"
    )
    load_healthy: bool = Field(default=False, description="take the newest checkpoint that was saved in good health")
    rename: RenameRules = Field(
        default=[],
        description="ordered rules for names in checkpoints of other programs, or of a model whose names were others",
    )
    staging_memory: ByteSize = Field(
        default="", description="most memory of a background save's snapshot, such as `8GiB`; empty: the rank's share"
    )

    @property
    def staging_bytes(self) -> int | None:
        """`staging_memory` in bytes; None when it is left to the rank's share."""
        return parse_byte_size(self.staging_memory)


class HealthCheckpointConfig(Section):
    """`monitor.health_checkpoint`: when a checkpoint counts as unhealthy."""

    embedding_local_norm_threshold: Threshold = Field(
        default=100.0, description="largest healthy gradient norm of the embedding"
    )
    global_norm_skip_threshold: Threshold = Field(
        default=100.0, description="largest healthy gradient norm of the model"
    )
    global_norm_skip_time: Positive = Field(default=10, description="steps above a threshold before health is lost")
    on_spike: Literal["mark", "skip", "rollback"] = Field(
        default="mark",
        description="an abnormal step: mark what is saved until training has settled; skip the update; or go back to "
        "the newest checkpoint before it, without its samples",
    )
    max_rollbacks: Count = Field(default=10, description="times that a run goes back by itself before it stops")


class TrainStateConfig(Section):
    """`monitor.train_state`: norms and losses of each rank."""

    local_norm: Annotated[Any, Words("text, or list of texts")] = Field(
        default="", description="parameters whose norms are told"
    )
    local_loss: bool = Field(default=False, description="loss of each rank")
    device_norm: bool = Field(default=False, description="gradient norm of each rank")
    device_loss: bool = Field(default=False, description="loss of each device")


class TensorboardConfig(Section):
    """`monitor.tensorboard`: event files beside metrics.jsonl."""

    output_dir: PathText = Field(default="", description="where event files go; empty: none are written")
    log_interval: Positive = Field(default=1, description="steps between two entries")
    queue_size: Positive = Field(default=1000, description="entries held before they are written")


class MonitorConfig(Section):
    """`monitor`: what is watched and told."""

    health_checkpoint: HealthCheckpointConfig = Field(default=HealthCheckpointConfig(), description="health")
    train_state: TrainStateConfig = Field(default=TrainStateConfig(), description="figures of each rank")
    tensorboard: TensorboardConfig = Field(default=TensorboardConfig(), description="TensorBoard")


class CallbackConfig(Section):
    """An item of `callbacks`: further keys go to the callback's constructor."""

    model_config = ConfigDict(extra="allow")

    type: TypeName = Field(description="a registered callback or an import path")


class LoraConfig(Section):
    """`lora_config`: low-rank adapters."""

    target_modules: TextList = Field(description="modules that get an adapter")
    exclude_layers: TextList | None = Field(default=None, description="layers that get none")
    lora_rank: Positive = Field(default=8, description="rank of the two factors")
    lora_alpha: Nonnegative = Field(default=16.0, description="scale of the adapter")
    lora_dropout: Ratio = Field(default=0.0, description="dropout before the adapter")
    lora_a_std: Nonnegative = Field(default=0.01, description="standard deviation of the first factor at the start")
    lora_b_std: Nonnegative = Field(default=0.0, description="standard deviation of the second factor at the start")
