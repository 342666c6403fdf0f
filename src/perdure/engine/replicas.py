"""Whether ranks that hold the same part of a tensor hold the same values of it: a save takes them from one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
import xxhash
from torch import Tensor

from perdure.engine.plan import SavePlan
from perdure.engine.ranks import Ranks
from perdure.errors import SaveError, few
from perdure.state.shards import NamedTensor

__all__ = ["check_replicas", "digest_of_edges"]

_EDGE = 32
_DOING = "comparing what several ranks hold"
Place = tuple[int, int]
"""Number of a cut of the plan, number of a box in it."""


def check_replicas(plan: SavePlan, tensors: Sequence[NamedTensor], buffers: Collection[str], ranks: Ranks) -> None:
    """Compares the first and the last elements of parameters and optimizer states that several ranks hold.

    Ranks that were never made alike, and parts of a tensor that its ranks take for the whole, differ there too. Buffers
    are not compared: the statistics of a batch norm are each rank's own.

    Args:
        tensors: what this rank holds, as planned.
        buffers: names of the model's buffers.

    Raises:
        SaveError: on every rank; some differ. They are named.
    """
    if ranks.size == 1:
        return
    held = _held_by_others_too(plan, tensors, buffers, ranks.rank)
    told = ranks.exchange(
        lambda: [(*place, digest_of_edges(values.values())) for place, values in held.items()], _DOING
    )
    if (found := _first_differing(told)) is None:
        return
    one, other = found
    sums = ranks.exchange(
        lambda: {
            f"{name}@{place}": digest_of_edges([v]) for place, values in held.items() for name, v in values.items()
        },
        _DOING,
    )
    differing = [key for key, digest in sums[one].items() if sums[other].get(key, digest) != digest]
    names = list(dict.fromkeys(key.rpartition("@")[0] for key in differing))
    raise SaveError(
        f"nothing was saved, for ranks {one} and {other} hold different values of the same tensors: {few(names)}",
        hint="start alike on all ranks: broadcast the parameters (DistributedDataParallel does), or load a checkpoint; "
        "parts of one tensor must be DTensors; what is each rank's own on purpose belongs into a registered object "
        "with `per_rank = True`",
    )


def _first_differing(told: Sequence[Sequence[tuple[int, int, int]]]) -> tuple[int, int] | None:
    """Two ranks that differ somewhere; `told` is (cut, box, digest) of each rank."""
    first: dict[Place, tuple[int, int]] = {}
    for rank, places in enumerate(told):
        for cut, box, digest in places:
            one, expected = first.setdefault((cut, box), (rank, digest))
            if digest != expected:
                return one, rank
    return None


def _held_by_others_too(
    plan: SavePlan, tensors: Sequence[NamedTensor], buffers: Collection[str], rank: int
) -> dict[Place, dict[str, Tensor]]:
    """What this rank has that others have too, by name."""
    compared = {
        (t.section, t.name): t
        for t in tensors
        if t.section == "optimizer" or (t.section == "model" and t.name not in buffers)
    }
    found: dict[Place, dict[str, Tensor]] = defaultdict(dict)
    for number, (cut, keys) in enumerate(plan.cuts):
        shared = {cut.box(box): box for box in cut.held_by(rank) if cut.counts[box] > 1}
        for key in keys if shared else ():
            for piece in compared[key].pieces if key in compared else ():
                if piece.box in shared:
                    found[number, shared[piece.box]][": ".join(key)] = piece.tensor
    return found


def digest_of_edges(values: Iterable[Tensor]) -> int:
    """What tells tensors from others of the same shapes that were drawn or read differently, at little cost."""
    edges: dict[torch.device, list[Tensor]] = defaultdict(list)
    for value in values:
        edges[value.device] += _edges(value)
    hasher = xxhash.xxh3_64()
    for each in edges.values():
        hasher.update(torch.cat(each).cpu().numpy().tobytes())
    return hasher.intdigest()


def _edges(value: Tensor) -> list[Tensor]:
    """The bytes at the beginning of the first row and at the end of the last one."""
    if not value.numel():
        return []
    first = last = value.reshape(1) if not value.dim() else value
    while first.dim() > 1:
        first, last = first[0], last[-1]
    return [edge.contiguous().view(torch.uint8) for edge in (first[:_EDGE], last[-_EDGE:])]
