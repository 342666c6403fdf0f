"""Keys of features that are not built yet: refused in words when set to anything but their default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from perdure.config.base import Section
from perdure.config.faults import Fault, found, parse_key

if TYPE_CHECKING:
    from perdure.config.schema import TrainConfig

__all__ = ["BUILT_VALUES", "FEATURES_NOT_BUILT", "not_built"]

FEATURES_NOT_BUILT: dict[str, str] = {
    "parallelism.data_parallel_shard_strategy": "sharding the optimizer state alone",
    "parallelism.context_parallel": "context parallelism",
    "parallelism.context_parallel_method": "context parallelism",
    "parallelism.context_parallel_async": "context parallelism",
    "parallelism.ulysses_degree_in_cp": "context parallelism",
    "parallelism.expert_parallel": "expert parallelism",
    "eval_dataset.drop_remainder": "evaluating a last batch that is not full",
    "monitor.train_state": "figures of each rank",
}
"""Key or whole section -> the feature that is missing. Remove a line when its feature is built."""

BUILT_VALUES: dict[str, tuple[object, ...]] = {"parallelism.data_parallel_shard_strategy": ("optim_grads",)}
"""Values beside the default that are accepted all the same."""


def not_built(config: TrainConfig) -> Iterator[Fault]:
    """A fault for each key of the table that is set to something else than its default."""
    for key, feature in FEATURES_NOT_BUILT.items():
        yield from _differing(config, key.split("."), "", key, feature)


def _differing(section: Section, names: list[str], prefix: str, key: str, feature: str) -> Iterator[Fault]:
    for name in names[:1] or type(section).model_fields:
        value = getattr(section, name)
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        here = f"{prefix}.{name}" if prefix else name
        # A section is compared key by key; one that is null by default is the feature itself.
        if isinstance(value, Section) and (len(names) > 1 or default is not None):
            yield from _differing(value, names[1:], here, key, feature)
        elif value is not None and value != default and value not in BUILT_VALUES.get(key, ()):
            accepted = " or ".join(_plain(each) for each in (default, *BUILT_VALUES.get(key, ())))
            yield Fault(parse_key(here), f"not built yet: {feature}; expected {accepted}, found {_plain(value)}")


def _plain(value: object) -> str:
    """A value as it is told here: text without the word."""
    return "null" if value is None else found(value).removeprefix("the text ")
