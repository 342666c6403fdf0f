"""Samples to a batch, as torch's `default_collate` does it, without its detour for small tensors.

In a worker that one stacks into shared memory, which takes longer than a small batch and its sending by value do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from perdure.data.transfer import BY_VALUE

__all__ = ["stack_samples"]


def stack_samples(samples: list[Any] | tuple[Any, ...]) -> Any:
    """What `default_collate(samples)` gives, with what a program has changed in its table of types."""
    first = samples[0]
    kind = type(first)
    if kind is Tensor:
        if _is_small(first, len(samples)) and default_collate_fn_map[Tensor] is collate_tensor_fn:
            return torch.stack(samples)
    elif kind in (dict, tuple, list) and kind not in default_collate_fn_map:
        if kind is dict:
            return {key: stack_samples([sample[key] for sample in samples]) for key in first}
        if len(set(map(len, samples))) == 1:
            return [stack_samples(column) for column in zip(*samples, strict=True)]
    return default_collate(samples)  # type: ignore[arg-type]


def _is_small(tensor: Tensor, count: int) -> bool:
    dense = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.numel() * tensor.element_size() * count <= BY_VALUE
