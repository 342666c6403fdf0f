"""Whether all ranks were started with one configuration: asked at start, because ranks that go by different ones
wait for each other at different places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from perdure.config.base import Section
from perdure.engine.ranks import Ranks
from perdure.errors import ConfigError, DataError, UsageError
from perdure.state.model import live_tensors
from perdure.state.shards import dtype_name

__all__ = ["check_same_config", "check_same_data", "check_same_model"]

# Where a rank finds and keeps things, and how it reads: hosts may differ in these. What is found is compared itself.
_MAY_DIFFER = re.compile(
    r"output_dir|checkpoint\.(save_path|reshard_worker_num|staging_memory)|monitor\.tensorboard\.output_dir|"
    r"(train|eval)_dataset\.(num_parallel_workers|prefetch_size|numa_enable|"
    r"dataloader\.(python_multiprocessing|(.*\.)?path(\[\d+\])?))"
)
_SHOWN = 8


def check_same_config(config: Section, ranks: Ranks, under: str = "") -> None:
    """Compares what is configured, but for what may differ from host to host.

    Args:
        under: the key of `config`, where it is a section.

    Raises:
        ConfigError: on every rank, with the keys that differ and their values by rank.
    """
    told = {key: text for key, text in _flat(config, under) if not _MAY_DIFFER.fullmatch(key)}
    if found := ranks.compare(told, "comparing the configurations of the ranks"):
        raise ConfigError(
            f"the ranks were started with different configurations: {_sentence(found)}",
            hint="start every rank with the same file and the same words",
        )


def check_same_data(identity: Mapping[str, object], ranks: Ranks) -> None:
    """Compares what the training data are.

    Raises:
        DataError: on every rank.
    """
    told = {key: repr(value) for key, value in identity.items()}
    if found := ranks.compare(told, "comparing the data of the ranks"):
        raise DataError(
            f"the ranks were given different training data: {_sentence(found)}",
            hint="give every rank the same, whole data set: each takes its own share of every batch",
        )


def check_same_model(model: nn.Module, ranks: Ranks) -> None:
    """Compares names, shapes and kinds of parameters and persistent buffers, before any of it is cut.

    Raises:
        UsageError: on every rank.
    """
    told = {
        name: f"{dtype_name(t.dtype)} {list(t.shape)}"
        + " frozen" * (isinstance(t, nn.Parameter) and not t.requires_grad)
        for name, t in live_tensors(model).items()
    }
    if found := ranks.compare(told, "comparing the models of the ranks"):
        raise UsageError(
            f"the ranks were given different models: {_sentence(found)}",
            hint="build the same model on every rank, from the same code",
        )


def _sentence(found: Mapping[str, Sequence[str]]) -> str:
    """`key is A on rank 0, B on ranks 1 to 3; ...`"""
    parts = []
    for key, texts in list(found.items())[:_SHOWN]:
        holders: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            holders.setdefault(text, []).append(rank)
        values = [f"{_short(text)} on {_ranks(where)}" for text, where in holders.items()]
        parts.append(f"{key} is {', '.join(values)}")
    more = len(found) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more else "")


def _short(text: str) -> str:
    return (text if len(text) <= 80 else f"{text[:77]}...") if text else "missing"


def _ranks(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"rank {first}"
    if last - first + 1 == len(numbers):
        return f"ranks {first} to {last}" if len(numbers) > 2 else f"ranks {first} and {last}"
    return "ranks " + ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")


def _flat(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Every value of a configuration as text, by its key."""
    inner: dict[str, object]
    dot = f"{key}." if key else ""
    if isinstance(value, Section):
        inner = {name: getattr(value, name) for name in type(value).model_fields} | value.extras()
        inner = {f"{dot}{name}": item for name, item in inner.items()}
    elif isinstance(value, Mapping):
        inner = {f"{dot}{name}": item for name, item in value.items()}
    elif isinstance(value, list | tuple):
        inner = {f"{key}[{number}]": item for number, item in enumerate(value)}
    else:
        plain = value is None or isinstance(value, bool | int | float | str)
        yield key, repr(value) if plain else type(value).__qualname__
        return
    for name, item in inner.items():
        yield from _flat(item, name)
