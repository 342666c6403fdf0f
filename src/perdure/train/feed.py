"""From the configuration to the loader that feeds a run, whatever kind of data it has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from perdure.config.schema import TrainConfig
from perdure.data.group_reading import SharedLoader
from perdure.data.iterable import IterableLoader, is_iterable
from perdure.data.loader import ResumableLoader
from perdure.data.stepping import SteppedLoader
from perdure.engine.ranks import DEADLINE_S, Ranks
from perdure.parallel.mesh import Mesh
from perdure.train.resume import ResumePoint

__all__ = ["data_state", "feed", "place"]


def feed(
    config: TrainConfig,
    dataset: Any,
    mesh: Mesh,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> SteppedLoader:
    """The loader over the training data on this rank.

    Args:
        ranks: of the job, where they may read for each other.
        say: is told what of a resume will not be exact.
    """
    loader = _loader(config, dataset, mesh)
    for warning in loader.warnings:
        say(f"warning: {warning}")
    return loader if ranks is None else _shared(config, loader, mesh, ranks)


def _loader(config: TrainConfig, dataset: Any, mesh: Mesh) -> SteppedLoader:
    section, training = config.train_dataset, config.training
    settings: dict[str, Any] = {
        "global_batch_size": training.global_batch_size,
        "local_batch_size": training.local_batch_size,
        "seed": training.seed,
        "rank": mesh.data_rank,
        "ranks": mesh.data_ranks,
        "skip_ranges": training.skip_ranges,
        "rampup": training.rampup_batch_size,
        "num_workers": section.num_parallel_workers,
        "prefetch": max(section.prefetch_size, 1),
    }
    if is_iterable(dataset):
        return IterableLoader(dataset, exact=section.dataloader.exact, **settings)
    return ResumableLoader(dataset, shuffle=section.dataloader.shuffle, **settings)


def _shared(config: TrainConfig, loader: SteppedLoader, mesh: Mesh, ranks: Ranks) -> SteppedLoader:
    """The loader itself, or with `use_distribute_dataset` one that reads on one rank for all that need the same."""
    if not config.train_dataset.use_distribute_dataset or mesh.data_ranks == ranks.size:
        return loader
    groups: dict[int, list[int]] = {}
    for rank, data_rank in enumerate(ranks.gather(mesh.data_rank, "grouping the readers of data")):
        groups.setdefault(data_rank, []).append(rank)
    made: Any = None
    for data_rank, members in groups.items():
        # Every rank has to take part in making every group.
        group = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
        made = group if data_rank == mesh.data_rank else made
    return SharedLoader(loader, made, groups[mesh.data_rank])


def place(loader: SteppedLoader, point: ResumePoint) -> None:
    """Puts a loader where a run goes on."""
    loader.use_stretches(point.stretches)
    loader.set_init_step(point.global_step)
    if loader.consumed_samples != point.consumed_samples:
        loader.seek(point.consumed_samples)


def data_state(loader: SteppedLoader) -> dict[str, Any]:
    """What is registered with the checkpoint, by name: a loader whose position is a state of the data set."""
    return {"train_dataset": loader} if loader.by_state else {}
