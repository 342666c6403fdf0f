"""What each rank of a job would hold and read, found out by one process and without the memory for it.

The model is built on the meta device, and cut as rank after rank of a process group that exchanges nothing would.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from perdure.config.ranks import RankLayout
from perdure.config.schema import TrainConfig
from perdure.engine.live import Live
from perdure.engine.load import LoadPlan
from perdure.engine.reader import bytes_to_read
from perdure.errors import MismatchError, PerdureError
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata
from perdure.parallel.apply import parallelize
from perdure.parallel.mesh import make_mesh
from perdure.state.model import model_tensors
from perdure.train import build

__all__ = ["Forecast", "forecast"]

MOST = 16
"""Ranks that are looked at; of more, the first ones."""


@dataclass
class Forecast:
    """What the ranks would do.

    Attributes:
        held: bytes of weights by rank.
        reads: bytes read by rank; empty where nothing is loaded.
        ranks: how many ranks there are; `held` and `reads` may be of the first ones only.
        settings: what affects the run, as the Trainer records it.
        notes: what a load would say.
    """

    ranks: int
    held: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def forecast(
    config: TrainConfig,
    layout: RankLayout,
    dataset: Any,
    metadata: CheckpointMetadata | None,
    where: str,
    *,
    weights_only: bool,
) -> Forecast:
    """Builds and plans as each rank would.

    Args:
        metadata: of what is loaded, under the names that the model has; None for a fresh start.
        where: what is loaded, for messages.

    Raises:
        MismatchError: checkpoint and model, or optimizer, don't fit together, as a load would say.
        PerdureError: the model or the layout cannot be built.
    """
    found = Forecast(layout.ranks)
    for rank in range(min(layout.ranks, MOST)):
        with _as_rank(rank, layout.ranks):
            mesh = make_mesh(layout, torch.device("cpu"))
            with torch.device("meta"):
                network = build.network(config, None, dataset)
                model = parallelize(network, mesh, torch.device("meta"), config).model
                optimizer, _ = build.optimizer_and_schedule(config, model, None, mesh)
            tensors = model_tensors(model, values=False)
            found.held.append(
                sum(prod(p.box.shape) * BY_SAFETENSORS[t.dtype].itemsize for t in tensors for p in t.pieces)
            )
            if rank == 0:
                found.settings = build.settings_of(config, optimizer)
            if metadata is None:
                continue
            plan = LoadPlan(where)
            plan.add_model(tensors, metadata.model)
            if not weights_only:
                view = Live(model, optimizer, {}).view()
                assert view is not None
                plan.add_optimizer(view, metadata, restore_settings=False)
            found.reads.append(bytes_to_read(plan.fills))
            found.notes = found.notes or plan.notes
    return found


@contextmanager
def _as_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process as one rank of many, none of which is there: collectives return at once and carry nothing."""
    if ranks == 1:
        yield
        return
    if dist.is_initialized():
        raise MismatchError("what ranks would do can only be told by a process that is none of them")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    except PerdureError:
        raise
    finally:
        dist.destroy_process_group()
