"""The ranks as a mesh: who sees which samples, who holds which part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perdure.config.ranks import RankLayout

__all__ = ["Mesh", "make_mesh"]


@dataclass(frozen=True)
class Mesh:
    """This rank's place.

    Attributes:
        data_rank, data_ranks: which share of each global batch this rank sees.
        counts: whether this rank's loss counts in sums over all ranks (one rank per tensor group does).
        sharded: the mesh that FSDP2 shards over (two axes for HSDP), or None.
        tensor: the mesh of the tensor group, or None.
        replicas: process group over which plain replicas sum gradients, or None.
    """

    data_rank: int = 0
    data_ranks: int = 1
    counts: bool = True
    sharded: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    replicas: Any = None

    @property
    def mean_over(self) -> int:
        """Over how many ranks gradients arrive as a mean (FSDP2's way) instead of a sum."""
        return self.data_ranks if self.sharded is not None else 1


def make_mesh(layout: RankLayout, device: torch.device) -> Mesh:
    """Lays the ranks out as replicate x shard x tensor, tensor groups being neighbours."""
    if layout.ranks == 1:
        return Mesh()
    names, sizes = [], []
    for name, size in (("replicate", layout.replicate), ("shard", layout.shard), ("tensor", layout.tensor)):
        if size > 1:
            names.append(name)
            sizes.append(size)
    mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(names))
    place = {name: mesh.get_local_rank(name) for name in names}
    data_rank = place.get("replicate", 0) * layout.shard + place.get("shard", 0)
    sharded = None
    if layout.shard > 1:
        sharded = mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
    return Mesh(
        data_rank=data_rank,
        data_ranks=layout.data_parallel,
        counts=place.get("tensor", 0) == 0,
        sharded=sharded,
        tensor=mesh["tensor"] if layout.tensor > 1 else None,
        replicas=mesh.get_group("replicate") if layout.replicate > 1 and layout.shard == 1 else None,
    )
