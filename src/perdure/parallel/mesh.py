"""The ranks as a mesh: who sees which samples, who holds which part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perdure.config.ranks import RankLayout

__all__ = ["Mesh", "make_mesh"]


@dataclass(frozen=True)
class Mesh:
    """This rank's place.

    Attributes:
        data_rank, data_ranks: which share of each global batch this rank sees.
        counts: whether this rank's loss counts in sums over all ranks (one rank per tensor group and pipeline does,
            the one that holds the last stage).
        sharded: the mesh that FSDP2 shards over (two axes for HSDP), or None.
        tensor: the mesh of the tensor group, or None.
        pipeline: the mesh of the pipeline, in the order of the stages, or None.
        replicas: process group over which plain replicas sum gradients, or None.
        whole: all ranks, one axis for each kind of parallelism in use; None for one rank.
    """

    data_rank: int = 0
    data_ranks: int = 1
    counts: bool = True
    sharded: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    pipeline: DeviceMesh | None = None
    replicas: Any = None
    whole: DeviceMesh | None = None

    def is_first_holder(self, tensor: Tensor) -> bool:
        """Whether this rank is the first of those that hold the same part of a parameter or gradient.

        Stages of a pipeline hold different ones.
        """
        if self.whole is None:
            return True
        names = getattr(tensor, "device_mesh", self.whole).mesh_dim_names or ()
        cut = {
            name for name, how in zip(names, getattr(tensor, "placements", ()), strict=False) if not how.is_replicate()
        }
        shared = set(self.whole.mesh_dim_names or ()) - cut - {"pipeline"}
        return all(self.whole.get_local_rank(name) == 0 for name in shared)

    def pipeline_group(self, holders: tuple[int, ...]) -> Any:
        """The process group of these ranks (numbered by their place) of this rank's pipeline.

        Every rank of the job has to ask for the same; one that isn't a holder gets what it must not use.
        """
        assert self.pipeline is not None
        assert self.whole is not None
        if len(holders) == self.pipeline.size():
            return self.pipeline.get_group()
        pipelines = self.whole.mesh.reshape(self.pipeline.size(), -1).T.tolist()
        enumerated = [[ranks[place] for place in holders] for ranks in pipelines]
        return dist.new_subgroups_by_enumeration(enumerated)[0]  # type: ignore[no-untyped-call]


def make_mesh(layout: RankLayout, device: torch.device) -> Mesh:
    """Lays the ranks out as pipeline x replicate x shard x tensor, tensor groups being neighbours."""
    if layout.ranks == 1:
        return Mesh()
    axes = {
        "pipeline": layout.pipeline,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "tensor": layout.tensor,
    }
    axes = {name: size for name, size in axes.items() if size > 1}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    place = {name: mesh.get_local_rank(name) for name in axes}
    data_rank = place.get("replicate", 0) * layout.shard + place.get("shard", 0)
    sharded = None
    if layout.shard > 1:
        sharded = mesh["replicate", "shard"] if layout.replicate > 1 else mesh["shard"]
    return Mesh(
        data_rank=data_rank,
        data_ranks=layout.data_parallel,
        counts=place.get("tensor", 0) == 0 and place.get("pipeline", 0) == layout.pipeline - 1,
        sharded=sharded,
        tensor=mesh["tensor"] if layout.tensor > 1 else None,
        pipeline=mesh["pipeline"] if layout.pipeline > 1 else None,
        replicas=mesh.get_group("replicate") if layout.replicate > 1 and layout.shard == 1 else None,
        whole=mesh,
    )
