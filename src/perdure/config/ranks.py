"""How the ranks are divided, once their number is known."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from perdure.config.checks import nearest_multiples
from perdure.config.schema import TrainConfig

__all__ = ["RankLayout", "check_ranks"]


@dataclass(frozen=True)
class RankLayout:
    """Degrees of parallelism; their product is `ranks`.

    Attributes:
        ranks: number of processes.
        data_parallel: ranks that see different samples: `replicate` × `shard`.
        micro_batches: micro-batches of each data-parallel rank per step (at the full global batch size).
    """

    ranks: int
    replicate: int
    shard: int
    tensor: int
    context: int
    pipeline: int
    micro_batches: int

    @property
    def data_parallel(self) -> int:
        return self.replicate * self.shard


def check_ranks(config: TrainConfig, world_size: int) -> RankLayout:
    """Divide `world_size` ranks as the configuration asks, and check that the batches divide among them.

    Raises:
        ConfigError: the degrees do not make up `world_size`, or a batch size does not divide.
    """
    parallelism, training = config.parallelism, config.training
    faults: list[tuple[str, str]] = []
    degrees = {
        "tensor_parallel": parallelism.tensor_parallel,
        "pipeline_parallel": parallelism.pipeline_parallel,
        "context_parallel": parallelism.context_parallel,
    }
    inner = prod(degrees.values())
    told = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    if world_size % inner:
        key = next(name for name, degree in degrees.items() if degree > 1)
        raise config.fault(f"parallelism.{key}", f"expected {told} to divide {ranks}, found {inner}")
    data_parallel = world_size // inner
    replicate, shard = parallelism.data_parallel_replicate, parallelism.data_parallel_shard
    if data_parallel % replicate:
        text = f"expected a divisor of the {data_parallel} data-parallel ranks, found {replicate}"
        raise config.fault("parallelism.data_parallel_replicate", text)
    if shard == -1:
        shard = data_parallel // replicate
    if replicate * shard != data_parallel:
        text = f"expected {data_parallel // replicate} or -1 for {ranks}, found {shard}"
        raise config.fault("parallelism.data_parallel_shard", text)

    unit = training.local_batch_size * data_parallel
    of = f"{unit} (local_batch_size {training.local_batch_size} x {data_parallel} data-parallel ranks)"
    size, ramp = training.global_batch_size, training.rampup_batch_size
    if size % unit:
        text = f"expected a multiple of {of}, found {size}; nearest: {nearest_multiples(size, unit)}"
        faults.append(("training.global_batch_size", text))
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit):
        text = f"expected a start and an increment that are multiples of {of}, found {ramp[0]} and {ramp[1]}"
        faults.append(("training.rampup_batch_size", text))
    if faults:
        raise config.faults(faults)
    return RankLayout(
        world_size,
        replicate,
        shard,
        parallelism.tensor_parallel,
        parallelism.context_parallel,
        parallelism.pipeline_parallel,
        size // unit,
    )
