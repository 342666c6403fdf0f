"""Buffers that training changes, such as a BatchNorm's: one truth for all ranks that see different samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perdure.parallel.mesh import Mesh

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The persistent buffers of a model, which follow those of the first data-parallel rank.

    Each rank counts its own samples into them. A checkpoint holds one value, so that only a run in which all ranks
    have that value goes on after a resume as it would have without; `DistributedDataParallel` does the same.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._groups: list[Any] = []
        if mesh.whole is not None:
            names = mesh.whole.mesh_dim_names or ()
            self._groups = [mesh.whole.get_group(name) for name in ("shard", "replicate") if name in names]
        modules = model.modules() if self._groups else ()
        self._buffers = [
            buffer
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]

    @torch.no_grad()
    def follow(self) -> None:
        """Gives every rank the first one's values. To be called on all ranks, after each step."""
        for buffer in self._buffers:
            for group in self._groups:
                dist.broadcast(_local(buffer), src=dist.get_global_rank(group, 0), group=group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
