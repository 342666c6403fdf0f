"""How the ranks are divided, once their number is known."""

from __future__ import annotations

from collections.abc import Iterator
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

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees above 1, by their names, as metadata.json has them under `training.mesh`."""
        named = {
            "pipeline": self.pipeline,
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
        }
        return {name: degree for name, degree in named.items() if degree > 1}


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
    if shard > 0 and "data_parallel_replicate" not in parallelism.model_fields_set and data_parallel % shard == 0:
        # As in the reference, where the shard degree alone says how many replicas there are.
        replicate = data_parallel // shard
    if data_parallel % replicate:
        text = f"expected a divisor of the {data_parallel} data-parallel ranks, found {replicate}"
        raise config.fault("parallelism.data_parallel_replicate", text)
    if shard == -1:
        shard = data_parallel // replicate
    if replicate * shard != data_parallel:
        text = f"expected {data_parallel // replicate} or -1 for {ranks}, found {shard}"
        raise config.fault("parallelism.data_parallel_shard", text)

    dense = parallelism.dense_fsdp_shard_size
    if dense is not None and dense < shard:
        if shard % dense:
            text = f"expected a divisor of the {shard} ranks that weights are sharded over, found {dense}"
            raise config.fault("parallelism.dense_fsdp_shard_size", text)
        replicate, shard = replicate * shard // dense, dense
    if parallelism.cpu_offload and shard == 1:
        text = "expected false where nothing is sharded, found true"
        raise config.fault("parallelism.cpu_offload", text, hint="set parallelism.data_parallel_shard above 1")

    unit = training.local_batch_size * data_parallel
    of = f"{unit} (local_batch_size {training.local_batch_size} x {data_parallel} data-parallel ranks)"
    size, ramp = training.global_batch_size, training.rampup_batch_size
    if size % unit:
        text = f"expected a multiple of {of}, found {size}; nearest: {nearest_multiples(size, unit)}"
        faults.append(("training.global_batch_size", text))
    if ramp is not None and (ramp[0] % unit or ramp[1] % unit):
        text = f"expected a start and an increment that are multiples of {of}, found {ramp[0]} and {ramp[1]}"
        faults.append(("training.rampup_batch_size", text))
    if not faults:
        faults.extend(_micro_batch_faults(config, {size // unit, *(n // unit for n in _ramp_sizes(config))}))
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


def _ramp_sizes(config: TrainConfig) -> Iterator[int]:
    """The global batch sizes on the way to the full one."""
    ramp = config.training.rampup_batch_size
    if ramp is not None:
        yield from range(ramp[0], config.training.global_batch_size, ramp[1])


def _micro_batch_faults(config: TrainConfig, counts: set[int]) -> Iterator[tuple[str, str]]:
    """What the schedule of a pipeline can't do with so many micro-batches per step."""
    parallelism = config.parallelism
    ranks, schedule = parallelism.pipeline_parallel, parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_microbatch_size not in (1, *counts):
        text = "expected 1 or what follows from the batch sizes, global_batch_size / (data-parallel ranks * "
        text += f"local_batch_size) = {max(counts)}; found {parallelism.pipeline_parallel_microbatch_size}"
        yield "parallelism.pipeline_parallel_microbatch_size", text
    if ranks == 1 or schedule == "gpipe":
        return
    interleaved = schedule == "interleaved_1f1b" or parallelism.pipeline_parallel_interleave_num > 1
    key = "training.global_batch_size"
    for count in sorted(counts):
        if not interleaved and count < ranks:
            text = f"expected at least {ranks} micro-batches per step for the {ranks} stages of 1f1b, found {count}"
            yield key, f"{text}; raise it, lower local_batch_size, or set pipeline_parallel_schedule to gpipe"
        elif interleaved and count % max(1, count // ranks):
            text = f"expected micro-batches per step that divide into {count // ranks} rounds of interleaved_1f1b"
            yield key, f"{text}, found {count}; a multiple of {ranks} always does"
