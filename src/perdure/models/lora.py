"""Low-rank adapters on linear layers (LoRA, Hu et al., 2021): y = W x + (alpha / rank) · B A dropout(x).

The layers stay what they are and keep their names; each gets two parameters, `lora_a` [rank, in] and `lora_b`
[out, rank], and everything else is frozen. So weights from before, and those of the base alone, fit by name.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perdure.importing import KeyFaults, did_you_mean

__all__ = ["add_adapters"]


def add_adapters(model: nn.Module, section: Any) -> list[str]:
    """Freezes the model and gives adapters to the linear layers that a `lora_config:` section names.

    A target is a module's name, its last part (`q_proj`), or a glob over whole names. `lora_a` is drawn from torch's
    default generator with `lora_a_std`, in float32 and then rounded to the layer's dtype; likewise `lora_b`.

    Args:
        section: `perdure.config`'s LoraConfig, or anything with its attributes.

    Returns:
        The names of the layers.

    Raises:
        KeyFaults: a target that no linear layer matches, or that only excluded layers match.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept = {name: m for name, m in linear.items() if not any(_in(pattern, name) for pattern in _excluded(section))}
    faults = []
    for number, target in enumerate(section.target_modules):
        if not any(_is(target, name) for name in kept):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            near = did_you_mean(target, ends) or f"; the model has {', '.join(ends) or 'none'}"
            why = "is excluded" if any(_is(target, name) for name in linear) else "names no linear layer"
            faults.append((f"lora_config.target_modules[{number}]", f"`{target}` {why}{near}"))
    if faults:
        raise KeyFaults(faults)
    model.requires_grad_(False)
    chosen = [name for name in kept if any(_is(target, name) for target in section.target_modules)]
    for name in chosen:
        _adapt(kept[name], section)
    return chosen


class _Adapter:
    """What a layer's output gets on top; the parameters are looked up in the layer, as wrappers replace them there."""

    def __init__(self, scale: float, dropout: float) -> None:
        self._scale, self._dropout = scale, dropout

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = F.dropout(inputs[0], self._dropout, layer.training) if self._dropout else inputs[0]
        low: Tensor = F.linear(x, layer.get_parameter("lora_a").to(x.dtype))
        return output + F.linear(low, layer.get_parameter("lora_b").to(x.dtype)).to(output.dtype) * self._scale


def _adapt(layer: nn.Linear, section: Any) -> None:
    rank = int(section.lora_rank)
    sizes = {"lora_a": (rank, layer.in_features), "lora_b": (layer.out_features, rank)}
    for name, std in (("lora_a", section.lora_a_std), ("lora_b", section.lora_b_std)):
        drawn = torch.empty(sizes[name], device=layer.weight.device).normal_(0.0, float(std))
        layer.register_parameter(name, nn.Parameter(drawn.to(layer.weight.dtype)))
    layer.register_forward_hook(_Adapter(float(section.lora_alpha) / rank, float(section.lora_dropout)))


def _is(target: str, name: str) -> bool:
    if any(sign in target for sign in "*?["):
        return fnmatch.fnmatchcase(name, target)
    return name == target or name.endswith(f".{target}")


def _in(pattern: str, name: str) -> bool:
    """Whether an exclusion covers a layer: by its name, a module above it, or a glob."""
    return _is(pattern, name) or f".{pattern}." in f".{name}."


def _excluded(section: Any) -> Iterable[str]:
    return section.exclude_layers or ()
