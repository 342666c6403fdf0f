"""From the configuration to the loader that feeds a run, whatever kind of data it has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from perdure.config.schema import DatasetConfig, TrainConfig
from perdure.data.group_reading import SharedLoader
from perdure.data.iterable import IterableLoader, is_iterable
from perdure.data.loader import ResumableLoader
from perdure.data.numa import worker_cpus
from perdure.data.stepping import SteppedLoader
from perdure.engine.ranks import DEADLINE_S, Ranks
from perdure.engine.same_settings import check_same_data
from perdure.parallel.mesh import Mesh
from perdure.train.resume import ResumePoint

__all__ = ["data_state", "evaluation_feed", "feed", "place"]


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
    section, training = config.train_dataset, config.training
    settings = _settings(config, section, mesh)
    settings |= {"skip_ranges": training.skip_ranges, "rampup": training.rampup_batch_size}
    loader: IterableLoader | ResumableLoader
    if is_iterable(dataset):
        loader = IterableLoader(dataset, exact=section.dataloader.exact, **settings)
    else:
        loader = ResumableLoader(dataset, shuffle=section.dataloader.shuffle, **settings)
    if ranks is not None and not loader.by_state:
        check_same_data(loader.identity(), ranks)
    for warning in loader.warnings:
        say(f"warning: {warning}")
    return _read(loader, section, "train_dataset", mesh, ranks, say)


def evaluation_feed(
    config: TrainConfig, dataset: Any, mesh: Mesh, ranks: Ranks, say: Callable[[str], None] = lambda line: None
) -> SteppedLoader:
    """The loader over the evaluation data on this rank."""
    # Data that were passed without a section are read by the run itself.
    section = config.eval_dataset or DatasetConfig(num_parallel_workers=0)
    loader = ResumableLoader(dataset, shuffle=section.dataloader.shuffle, **_settings(config, section, mesh))
    return _read(loader, section, "eval_dataset", mesh, ranks, say)


def _settings(config: TrainConfig, section: DatasetConfig, mesh: Mesh) -> dict[str, Any]:
    training = config.training
    return {
        "global_batch_size": training.global_batch_size,
        "local_batch_size": training.local_batch_size,
        "seed": training.seed,
        "rank": mesh.data_rank,
        "ranks": mesh.data_ranks,
        "num_workers": section.num_parallel_workers,
        "prefetch": section.prefetch_size,
    }


def _read(
    loader: IterableLoader | ResumableLoader,
    section: DatasetConfig,
    name: str,
    mesh: Mesh,
    ranks: Ranks | None,
    say: Callable[[str], None],
) -> SteppedLoader:
    """The loader, its workers bound to their memory node and its batches shared as the section asks for."""
    if section.numa_enable:
        loader.worker_cpus = worker_cpus()
        if loader.worker_cpus is None:
            say(f"{name}.numa_enable changes nothing: the processors of this rank lie on one memory node")
    return loader if ranks is None or not section.use_distribute_dataset else _shared(loader, mesh, ranks)


def _shared(loader: SteppedLoader, mesh: Mesh, ranks: Ranks) -> SteppedLoader:
    """A loader that reads on one rank for all that need the same; the loader itself where no two do."""
    if mesh.data_ranks == ranks.size:
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
