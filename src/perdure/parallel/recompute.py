"""Activations computed again in the backward pass instead of kept: less memory for more time, the same bits.

The forward of a module is replaced, not wrapped by another module, so that no name changes. Random streams are put
back for the second forward, so that dropout draws the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perdure.config.layer_ranges import layer_set
from perdure.config.schema import RecomputeConfig
from perdure.errors import UsageError

__all__ = ["apply_recompute"]


def apply_recompute(layers: Sequence[nn.Module], recompute: RecomputeConfig) -> None:
    """Makes layers, or modules in them, compute their activations again.

    Args:
        layers: all layers of the model, in order.

    Raises:
        UsageError: a layer, a module or an operator is named that is not there.
    """
    if recompute.mode == "None":
        return
    if not layers:
        raise UsageError(
            "recompute.mode: the model has no layers in a ModuleList or ModuleDict",
            hint="give it a method pipeline_plan() that names its layers, or leave recompute out",
        )
    kept = _by_layer("exclude_op", recompute.exclude_op or {}, len(layers))
    whole = _layers("full_recompute_layer", recompute.full_recompute_layer or [], len(layers))
    for index in sorted(whole):
        _recompute(layers[index], _operators(kept.get(index, [])))
    if recompute.mode != "select":
        return
    matched: set[str] = set()
    patterns = recompute.select_module or {}
    for index, wanted in _by_layer("select_module", patterns, len(layers)).items():
        inside = [(name, module) for name, module in layers[index].named_modules() if name]
        chosen: list[str] = []
        for name, module in inside:
            found = [pattern for pattern in wanted if re.fullmatch(pattern, name)]
            matched.update(found)
            covered = index in whole or any(name.startswith(f"{outer}.") for outer in chosen)
            if found and not covered:
                chosen.append(name)
                _recompute(module, _operators(kept.get(index, [])))
    for pattern in set(patterns) - matched:
        known = sorted({name for name, _ in layers[0].named_children()})
        raise UsageError(
            f"recompute.select_module: no module of the layers matches {pattern!r}; a layer has {', '.join(known)}"
        )


def _recompute(module: nn.Module, kept: list[Any]) -> None:
    """Replaces a module's forward; `kept` are operators whose results are kept all the same."""
    forward = module.forward
    contexts: dict[str, Any] = {}
    if kept:
        contexts["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy(kept))

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    module.forward = recomputed


def _policy(kept: list[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _operators(names: Sequence[str]) -> list[Any]:
    """All overloads of torch operators: `mm`, or `library.operator`."""
    found: list[Any] = []
    for name in names:
        library, _, operator = name.rpartition(".")
        packet = getattr(getattr(torch.ops, library or "aten"), operator, None)
        if packet is None:
            raise UsageError(
                f"recompute.exclude_op: torch has no operator {name!r}",
                hint="name it as torch.ops does: mm, or _scaled_dot_product_flash_attention, or library.operator",
            )
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


def _by_layer(key: str, patterns: dict[str, Any], count: int) -> dict[int, list[str]]:
    """Layer -> the names that a mapping from names to ranges of layers has for it."""
    found: dict[int, list[str]] = {}
    for name, items in patterns.items():
        for index in _layers(f"{key}.{name}", items, count):
            found.setdefault(index, []).append(name)
    return found


def _layers(key: str, items: Sequence[object], count: int) -> set[int]:
    layers = layer_set(items)
    if layers and max(layers) >= count:
        raise UsageError(f"recompute.{key}: expected layers from 0 to {count - 1}, found {max(layers)}")
    return layers
