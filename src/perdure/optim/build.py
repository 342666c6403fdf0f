"""The `optimizer:` section -> an optimizer over a model's trainable parameters."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from perdure.importing import KeyFaults, accepted_keys, check_keys, resolve, section_keys
from perdure.optim.masters import MixedPrecisionOptimizer, needs_master

__all__ = ["build_optimizer"]

_OWN = ("type", "weight_decay_include", "weight_decay_exclude")


def build_optimizer(section: Any, model: nn.Module, lr: float) -> Any:
    """Build what the section describes: any class of `torch.optim`, or a third-party class by import path.

    Two parameter groups, `decay` and `no_decay`, by name rules: `weight_decay_include` beats
    `weight_decay_exclude` beats "one-dimensional or bias: none". Frozen parameters are left out. Parameters
    in bfloat16 or float16 get FP32 masters.

    Raises:
        KeyFaults: an unknown type, or keys that the class does not take.
    """
    values, written = section_keys(section)
    name = str(values.pop("type", None) or "AdamW")
    classes = {
        k: v for k, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)
    }
    kind = resolve(name, classes, key="optimizer.type")
    include, exclude = values.pop("weight_decay_include", None), values.pop("weight_decay_exclude", None)
    accepted = accepted_keys(kind)
    keys = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in values.items()
        if v is not None and (k in written or accepted is None or k in accepted)
    }
    faults = check_keys(kind, {"params": [], **keys})
    if faults:
        raise KeyFaults([(f"optimizer.{key}", text) for key, text in faults])
    groups = _groups(model, include, exclude)

    def build(listed: list[dict[str, Any]]) -> Any:
        return kind(listed, lr=lr, **keys)

    if any(needs_master(p) for group in groups for p in group["params"]):
        return MixedPrecisionOptimizer(groups, build)
    return build(groups)


def _groups(model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str] | None) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {
        "decay": {"params": [], "name": "decay"},
        "no_decay": {"params": [], "name": "no_decay", "weight_decay": 0.0},
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = parameter.dim() > 1 and not name.endswith("bias")
            decays = True if _matches(name, include) else False if _matches(name, exclude) else plain
            groups["decay" if decays else "no_decay"]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def _matches(name: str, rules: Sequence[str] | None) -> bool:
    return any(rule == name or rule in name or fnmatch.fnmatchcase(name, rule) for rule in rules or ())
