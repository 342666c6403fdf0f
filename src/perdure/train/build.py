"""From the sections of a configuration to live objects, with faults told at the key that causes them."""

from __future__ import annotations

import inspect
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from perdure.config.kinds import is_import_path
from perdure.config.load import load_config, load_config_mapping
from perdure.config.ranks import RankLayout, check_ranks
from perdure.config.schema import DataloaderConfig, TrainConfig
from perdure.data.columns import Columns
from perdure.data.iterable import is_iterable
from perdure.data.sources.registry import build_source, source_keys
from perdure.engine.launcher import check_joined, number_told
from perdure.engine.ranks import Ranks
from perdure.engine.same_settings import check_same_config, check_same_model
from perdure.errors import ConfigError, DataError, UsageError
from perdure.importing import KeyFaults, did_you_mean, import_object, section_keys
from perdure.models.build import build_model, computes_in_its_own
from perdure.models.lora import add_adapters
from perdure.optim.build import build_optimizer
from perdure.optim.scaler import LossScaler
from perdure.optim.schedules import build_schedule
from perdure.parallel.mesh import Mesh
from perdure.train.callbacks.base import Callback
from perdure.train.callbacks.tensorboard import TensorBoard
from perdure.train.evaluate import Evaluation
from perdure.train.feed import evaluation_feed
from perdure.train.given import needs_closure
from perdure.train.resume import drawing_layout
from perdure.train.step import LossFunction

__all__ = [
    "callbacks",
    "configuration",
    "data",
    "device",
    "evaluation",
    "evaluation_data",
    "idle_warning",
    "layout",
    "network",
    "optimizer_and_schedule",
    "settings_of",
]

# The reference's own callbacks; what they do is part of the Trainer here.
_BUILT_IN = {"MonitorCallback", "LossCallback", "CheckpointCallback"}
_REGISTERED = {"EMA": "perdure.train.callbacks.ema:EMA"}

Rate = Callable[[int, int, int], float]


def configuration(given: str | os.PathLike[str] | Mapping[str, Any] | TrainConfig) -> TrainConfig:
    """A configuration that was passed in any of its forms."""
    if isinstance(given, TrainConfig):
        return given
    return load_config_mapping(dict(given)) if isinstance(given, Mapping) else load_config(given)


def layout(config: TrainConfig, ranks: Ranks) -> RankLayout:
    """How the ranks share the work, once it is sure that they are of one run and go by one configuration."""
    check_joined(ranks.size)
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise UsageError(
            "the run is called within torch.autocast, whose copies of the weights would outlive each update of them",
            hint="enter it in compute_loss_func(model, batch), or set model.compute_dtype",
        )
    check_same_config(config, ranks)
    return check_ranks(config, ranks.size)


def data(config: TrainConfig, given: Any) -> Any:
    """The training data: what was passed, or what `train_dataset.dataloader` describes."""
    if given is not None:
        return _columns(config, config.train_dataset.dataloader, "train_dataset", given)
    config.require(train_dataset=True)
    return _source(config, config.train_dataset.dataloader, "train_dataset")


def evaluation_data(config: TrainConfig, given: Any) -> Any:
    """The evaluation data: what was passed, or what `eval_dataset.dataloader` describes."""
    config.require(eval_dataset=given is None)
    if config.eval_dataset is None:
        return given
    if given is not None:
        return _columns(config, config.eval_dataset.dataloader, "eval_dataset", given)
    return _source(config, config.eval_dataset.dataloader, "eval_dataset")


def evaluation(
    config: TrainConfig,
    given: Any,
    loss: LossFunction,
    ranks: Ranks,
    mesh: Mesh,
    device: torch.device,
    say: Callable[[str], None],
) -> Evaluation | None:
    """What evaluates between steps, on the data passed or described, where the configuration asks for it."""
    training = config.training
    if not training.eval_interleaved_steps:
        if given is not None or config.eval_dataset is not None:
            say("warning: eval_dataset is never used: training.eval_interleaved_steps is 0")
        return None
    loader = evaluation_feed(config, evaluation_data(config, given), mesh, ranks, say)
    return Evaluation(loader, loss=loss, ranks=ranks, mesh=mesh, device=device, seed=training.seed)


def _source(config: TrainConfig, section: DataloaderConfig, name: str) -> Any:
    def fault(key: str, text: str) -> ConfigError:
        return config.fault(f"{name}.dataloader.{key}", text)

    keys, takes_columns = section.extras(), "column_names" in source_keys(str(section.type), fault=fault)
    if takes_columns:
        keys = {"column_names": section.column_names, **keys}
    try:
        source = build_source(str(section.type), keys, fault=fault)
    except DataError as error:
        raise DataError(f"{name}.dataloader: {error.message}", hint=error.hint) from error
    return source if takes_columns else _columns(config, section, name, source)


def _columns(config: TrainConfig, section: DataloaderConfig, name: str, dataset: Any) -> Any:
    """The data set, with just the columns that were asked for."""
    if section.column_names == type(section).model_fields["column_names"].default:
        return dataset
    key = f"{name}.dataloader.column_names"
    if is_iterable(dataset):
        raise config.fault(key, "data that can only be read in a row are delivered as they are; leave it out")
    try:
        return Columns(dataset, section.column_names)
    except UsageError as error:
        raise config.fault(key, error.message) from error


def network(
    config: TrainConfig, given: nn.Module | None, dataset: Any, ranks: Ranks | None = None, *, policy: bool = False
) -> nn.Module:
    """The model: what was passed, or what `model` describes; the data say how many token ids there are.

    With `lora_config` all of it is frozen but the adapters that it gets.

    Args:
        ranks: of the job, which must all have the same one.
        policy: `compute_dtype` is FSDP2's to see to, so the model is not asked for it.
    """
    adapters = config.lora_config
    if adapters is not None and config.parallelism.tensor_parallel > 1:
        raise config.fault("lora_config", "not built yet: adapters on layers that are cut by tensor parallelism")
    config.require(model=given is None)
    try:
        model = given
        if model is None:
            section = {k: v for k, v in section_keys(config.model)[0].items() if v is not None and k != "compute_dtype"}
            described = section if policy else config.model
            model = build_model(described, vocab_size=getattr(dataset, "vocab_size", None))
        if adapters is not None:
            add_adapters(model, adapters)
    except KeyFaults as faults:
        raise config.faults(faults.faults) from faults
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                f"the model's {name} has no shape yet, as its module is a lazy one",
                hint="run a batch through the model first, or give the module its sizes",
            )
    if ranks is not None:
        check_same_model(model, ranks)
    return model


def loss_scaler(config: TrainConfig, model: nn.Module) -> LossScaler:
    """Dynamic where parameters are float16, or where that is what is computed in."""
    compute = config.model.extras().get("compute_dtype")
    return LossScaler.for_dtypes(*(p.dtype for p in model.parameters()), str(compute) if compute else None)


def policy_dtype(config: TrainConfig, given: nn.Module | None, mesh: Mesh) -> torch.dtype | None:
    """The dtype that FSDP2 is to compute in, its parameters staying as they are: `model.compute_dtype` of a model that
    does not compute in a dtype of its own."""
    compute = config.model.extras().get("compute_dtype")
    if mesh.sharded is None or compute is None or (given is None and computes_in_its_own(config.model)):
        return None
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if compute not in known:
        raise config.fault("model.compute_dtype", f"`{compute}` is not one of {', '.join(known)}")
    return known[compute]


def optimizer_and_schedule(
    config: TrainConfig, model: nn.Module, given: Any, mesh: Mesh, say: Callable[[str], None] = lambda line: None
) -> tuple[Any, Rate]:
    """The optimizer, and the learning rate at (step, consumed samples, batch size).

    An optimizer that was passed keeps the ratios of its groups' rates to `lr_scheduler.learning_rate`.

    Args:
        say: is told of a run whose last steps would have no rate.
    """
    if given is not None and config.lora_config is not None:
        raise config.fault("lora_config", "the optimizer that was passed does not know the adapters")
    if given is None and mesh.sharded is not None and config.optimizer.type == "Adafactor":
        raise config.fault(
            "optimizer.type",
            "torch's Adafactor does not work on sharded parameters",
            hint="use parallelism.data_parallel_replicate for all ranks, or another optimizer",
        )
    if given is not None and mesh.pipeline is not None:
        raise config.fault(
            "parallelism.pipeline_parallel",
            "the optimizer that was passed holds the parameters of the whole model, of which a rank has one stage",
            hint="describe it in the optimizer section",
        )
    if given is not None and not _holds(given, model):
        cut = mesh.sharded is not None
        raise UsageError(
            "the optimizer that was passed updates parameters that are not the model's"
            + (", which has got new ones by being sharded" if cut else ""),
            hint="describe it in the optimizer section"
            if cut
            else "pass the module that owns them as (part of) the model",
        )
    if mesh.pipeline is not None and not any(p.requires_grad for p in model.parameters()):
        raise config.fault(
            "parallelism.pipeline_parallel_layers_per_stage",
            "expected something to train on every rank of the pipeline, and one has frozen parameters only",
            hint="give that rank a layer that is trained, or use other degrees",
        )
    try:
        schedule = build_schedule(config.lr_scheduler, config.training.steps)
        peak = config.lr_scheduler.learning_rate
        if given is not None:
            _keep_ratios(given, peak)
        optimizer = given if given is not None else build_optimizer(config.optimizer, model, lr=peak)
    except KeyFaults as faults:
        raise config.faults(faults.faults) from faults
    if needs_closure(optimizer):
        text = f"{type(optimizer).__name__} evaluates the loss several times a step and is not supported"
        raise config.fault("optimizer.type", text) if given is None else UsageError(f"the optimizer passed: {text}")

    def rate(step: int, samples: int, size: int) -> float:
        return schedule.rate(global_step=step, consumed_samples=samples, global_batch_size=size)

    if warning := idle_warning(config, rate):
        say(f"warning: {warning}")
    return optimizer, rate


def idle_warning(config: TrainConfig, rate: Rate) -> str:
    """A line for a run whose last steps have no learning rate; empty where it has one to its end, or never."""
    steps, size = config.training.steps, config.training.global_batch_size

    def is_idle(step: int) -> bool:
        return rate(step, step * size, size) == 0

    # The last step alone may well be where a schedule arrives at 0.
    if config.lr_scheduler.learning_rate == 0 or steps < 3 or not (is_idle(steps - 1) and is_idle(steps - 2)):
        return ""
    first = bisect_left(range(steps), True, 1, key=is_idle) + 1
    return f"the learning rate is 0 from step {first} to the last, {steps} (lr_scheduler)"


def _holds(optimizer: Any, model: nn.Module) -> bool:
    """Whether all that an optimizer updates is the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _keep_ratios(optimizer: Any, peak: float) -> None:
    for group in optimizer.param_groups:
        group.setdefault("lr_ratio", float(group["lr"]) / peak if peak else 1.0)


def callbacks(config: TrainConfig, given: Sequence[Callback]) -> list[Callback]:
    """The configured callbacks, then the passed ones."""
    built: list[Callback] = []
    for number, section in enumerate(config.callbacks):
        if section.type in _BUILT_IN:
            continue
        if section.type not in _REGISTERED and not is_import_path(section.type):
            known = [*sorted(_BUILT_IN), *_REGISTERED]
            near = did_you_mean(section.type, known) or f"; known are {', '.join(known)}"
            text = f"expected a callback or an import path package.module:Object, found {section.type!r}{near}"
            raise config.fault(f"callbacks[{number}].type", text)
        try:
            target = import_object(_REGISTERED.get(section.type, section.type))
            inspect.signature(target).bind(**section.extras())
            callback = target(**section.extras())
            if not isinstance(callback, Callback):
                raise UsageError(f"{section.type} gives no perdure.Callback, but a {type(callback).__qualname__}")
        except (UsageError, TypeError) as error:
            text = error.message if isinstance(error, UsageError) else str(error)
            raise config.fault(f"callbacks[{number}]", text) from error
        built.append(callback)
    board = config.monitor.tensorboard
    if board.output_dir:
        built.append(TensorBoard(board.output_dir, board.log_interval, board.queue_size))
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
        "training.use_skip_step_on_nan": training.use_skip_step_on_nan,
        "training.rampup_batch_size": training.rampup_batch_size and list(training.rampup_batch_size),
        "training.skip_ranges": [list(pair) for pair in training.skip_ranges],
        **drawing_layout(config),
    }
    for key, value in config.model.extras().items():
        if value is None or isinstance(value, bool | int | float | str):
            settings[f"model.{key}"] = value
    for key, value in {**config.lr_scheduler.model_dump(), **config.lr_scheduler.extras()}.items():
        settings[f"lr_scheduler.{key}"] = value
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names", "lr", "initial_lr", "lr_ratio"):
                plain = list(value) if isinstance(value, tuple) else value
                if plain is None or isinstance(plain, bool | int | float | str | list):
                    settings[f"optimizer group {group.get('name', number)}: {key}"] = plain
    return settings


def device(deterministic: bool = False) -> torch.device:
    """This rank's device: its CUDA device where there is one.

    Raises:
        UsageError: this machine has fewer devices than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if deterministic:
        # cuBLAS asks for it, before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    index, count = number_told("LOCAL_RANK") or 0, torch.cuda.device_count()
    if index >= count:
        raise UsageError(
            f"local rank {index} has no CUDA device: there are {count} on this machine",
            hint="start at most as many ranks as there are devices: torchrun --nproc-per-node",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
