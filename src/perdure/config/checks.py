"""Checks across keys: combinations that cannot work, found before anything is built. Pure but for path names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from perdure.config.faults import found
from perdure.config.layer_ranges import layer_set, stage_ranges
from perdure.format.names import parse_iteration_dirname

if TYPE_CHECKING:
    from perdure.config.schema import TrainConfig

__all__ = ["Finding", "cross_checks", "nearest_multiples"]


class Finding(NamedTuple):
    """A fault at `key` that also rests on the keys in `about`; it is not told when one of them is faulty itself."""

    key: str
    text: str
    about: tuple[str, ...] = ()
    hint: str | None = None


def cross_checks(config: TrainConfig) -> Iterator[Finding]:
    """Everything that is wrong with a configuration of which each key is right by itself."""
    yield from _batch_sizes(config)
    yield from _data(config)
    yield from _parallelism(config)
    yield from _pipeline(config)
    yield from _recompute(config)
    yield from _checkpoint(config)


def _batch_sizes(config: TrainConfig) -> Iterator[Finding]:
    training = config.training
    size, unit, ramp = training.global_batch_size, training.local_batch_size, training.rampup_batch_size
    if size % unit:
        text = (
            f"expected a multiple of local_batch_size ({unit}), found {size}; nearest: {nearest_multiples(size, unit)}"
        )
        yield Finding("training.global_batch_size", text, ("training.local_batch_size",))
    if ramp is None:
        return
    start, increment, _ = ramp
    key, about = "training.rampup_batch_size", ("training.global_batch_size", "training.local_batch_size")
    if start > size:
        yield Finding(key, f"expected a start of at most global_batch_size ({size}), found {start}", about)
    elif (size - start) % increment:
        text = f"expected increments of {increment} that lead from {start} to global_batch_size ({size}) exactly"
        yield Finding(key, f"{text}, found a rest of {(size - start) % increment}", about)
    if start % unit or increment % unit:
        text = f"expected a start and an increment that are multiples of local_batch_size ({unit})"
        yield Finding(key, f"{text}, found {start} and {increment}", about)


def nearest_multiples(size: int, unit: int) -> str:
    """The multiples of `unit` around `size`: `48 or 64`."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _data(config: TrainConfig) -> Iterator[Finding]:
    training = config.training
    if training.ignore_data_skip and training.data_skip_steps:
        text = f"expected 0 together with ignore_data_skip, found {training.data_skip_steps}"
        yield Finding("training.data_skip_steps", text, ("training.ignore_data_skip",))


def _parallelism(config: TrainConfig) -> Iterator[Finding]:
    parallelism = config.parallelism
    if parallelism.tensor_parallel > 1 and not parallelism.sequence_parallel:
        text = f"expected sequence_parallel true with a degree above 1, found {found(parallelism.tensor_parallel)}"
        yield Finding("parallelism.tensor_parallel", text, ("parallelism.sequence_parallel",))


def _pipeline(config: TrainConfig) -> Iterator[Finding]:
    parallelism = config.parallelism
    ranks, chunks = parallelism.pipeline_parallel, parallelism.pipeline_parallel_interleave_num
    about = ("parallelism.pipeline_parallel", "parallelism.pipeline_parallel_interleave_num")
    if chunks > 1 and ranks == 1:
        text = f"expected 1 without pipeline_parallel, found {chunks}"
        yield Finding("parallelism.pipeline_parallel_interleave_num", text, about)
    if chunks > 1 and parallelism.pipeline_parallel_schedule == "gpipe":
        text = f"expected 1f1b or interleaved_1f1b with {chunks} chunks per rank, found 'gpipe'"
        yield Finding("parallelism.pipeline_parallel_schedule", text, about)
    key, wish = "parallelism.pipeline_parallel_layers_per_stage", parallelism.pipeline_parallel_layers_per_stage
    if wish in (None, "auto"):
        return
    if not isinstance(wish, list) or len(wish) != ranks:
        text = f"expected 'auto' or a list with one item for each of {ranks} pipeline ranks, found {found(wish)}"
        yield Finding(key, text, about)
        return
    try:
        stage_ranges(wish, chunks)
    except ValueError as error:
        yield Finding(key, str(error), about)


def _recompute(config: TrainConfig) -> Iterator[Finding]:
    recompute = config.recompute
    needed = {"full": "full_recompute_layer", "select": "select_module"}.get(recompute.mode)
    if needed is not None and not getattr(recompute, needed):
        yield Finding(f"recompute.{needed}", f"missing; mode {recompute.mode} requires it", ("recompute.mode",))
    lists = {"full_recompute_layer": recompute.full_recompute_layer}
    for key in ("select_module", "exclude_op"):
        lists |= {f"{key}.{name}": items for name, items in (getattr(recompute, key) or {}).items()}
    for key, items in lists.items():
        try:
            if items is not None and not isinstance(items, list):
                raise ValueError(f"expected a list of ranges of layers such as ['0-3'], found {found(items)}")
            layer_set(items or [])
        except ValueError as error:
            yield Finding(f"recompute.{key.partition('.')[0]}", str(error))


def _checkpoint(config: TrainConfig) -> Iterator[Finding]:
    checkpoint = config.checkpoint
    if checkpoint.save_trainable_only and not checkpoint.base_load_path:
        text = "expected base_load_path together with it, found an empty one"
        yield Finding("checkpoint.save_trainable_only", text, ("checkpoint.base_load_path",))
    if checkpoint.auto_resume and checkpoint.enable_save and checkpoint.no_save_optim:
        text = "expected false together with auto_resume, found true: nothing resumes without the optimizer"
        about = ("checkpoint.auto_resume", "checkpoint.enable_save")
        yield Finding("checkpoint.no_save_optim", text, about)
    if checkpoint.auto_resume and checkpoint.load_path:
        directory, name = os.path.split(os.path.realpath(checkpoint.load_path))
        iteration = parse_iteration_dirname(name)
        if iteration is not None and directory == os.path.realpath(config.save_path):
            yield Finding(
                "checkpoint.load_path",
                f"expected no iteration in save_path together with auto_resume, found {found(checkpoint.load_path)}",
                ("checkpoint.auto_resume", "checkpoint.save_path", "output_dir"),
                hint=f"`perdure rewind {config.save_path} --to {iteration}` goes back to it",
            )
