"""What each rank of a job would hold and read, found out by one process and without the memory for it.

The model is built on the meta device, and cut as rank after rank of a process group that exchanges nothing would.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perdure import errors
from perdure.config.ranks import RankLayout
from perdure.config.schema import TrainConfig
from perdure.engine.live import Live
from perdure.engine.load import LoadPlan, check_config, held_names
from perdure.engine.reader import bytes_to_read
from perdure.errors import PerdureError, UsageError
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import CheckpointMetadata
from perdure.format.rename import parse_rules, rename
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
        metadata: of what is loaded; None for a fresh start.
        where: what is loaded, for messages.

    Raises:
        MismatchError: checkpoint and model, or optimizer, don't fit together, as a load would say.
        PerdureError: the model or the layout cannot be built.
    """
    found = Forecast(layout.ranks)
    if config.checkpoint.load_balanced and layout.ranks > 1 and metadata is not None:
        found.notes.append("load_balanced: what several ranks need is read by one of them, so less than told by rank")
    for rank in range(min(layout.ranks, MOST)):
        seen = _in_child(lambda rank=rank: _look(config, layout, dataset, metadata, where, weights_only, rank))  # type: ignore[misc]
        found.held.append(seen["held"])
        if seen["reads"] is not None:
            found.reads.append(seen["reads"])
        found.settings = found.settings or seen["settings"]
        found.notes += seen["notes"] if rank == 0 else []
    return found


def _look(
    config: TrainConfig,
    layout: RankLayout,
    dataset: Any,
    metadata: CheckpointMetadata | None,
    where: str,
    weights_only: bool,
    rank: int,
) -> dict[str, Any]:
    """What one rank would hold and read, as JSON has it."""
    _become(rank, layout.ranks)
    mesh, meta = make_mesh(layout, torch.device("cpu")), torch.device("meta")
    with meta:
        compute = build.policy_dtype(config, None, mesh)
        model = build.network(config, None, dataset, policy=compute is not None)
        plan = LoadPlan(where)
        if metadata is not None:
            metadata = _as_named(model, metadata, config, where)
            check_config(model, metadata, where)
            # Names are compared with the whole model, of which a rank may hold some layers only.
            plan.add_model(model_tensors(model, values=False), metadata.model, _elsewhere(model, metadata))
            plan.fills.clear()
        model = parallelize(model, mesh, meta, config, compute).model
        optimizer, _ = build.optimizer_and_schedule(config, model, None, mesh)
    tensors = model_tensors(model, values=False)
    held = sum(prod(p.box.shape) * BY_SAFETENSORS[t.dtype].itemsize for t in tensors for p in t.pieces)
    settings = build.settings_of(config, optimizer)
    if metadata is None:
        return {"held": held, "reads": None, "settings": settings, "notes": []}
    notes, names = list(plan.notes), {name for t in tensors for name in (t.name, *t.aliases)}
    records = {n: r for n, r in metadata.model.items() if not names.isdisjoint((n, *r.aliases))}
    plan.add_model(tensors, records, frozenset(names))
    if not weights_only:
        view = Live(model, optimizer, {}).view()
        assert view is not None
        plan.add_optimizer(view, metadata, restore_settings=False)
        # What a stage lacks is no news.
        notes += plan.optimizer.notes if plan.optimizer is not None and layout.pipeline == 1 else []
    return {"held": held, "reads": bytes_to_read(plan.fills), "settings": settings, "notes": notes}


def _as_named(model: nn.Module, metadata: CheckpointMetadata, config: TrainConfig, where: str) -> CheckpointMetadata:
    """The record by the rules of `checkpoint.rename`, where its own names are not the model's."""
    tensors = model_tensors(model, values=False)
    if not config.checkpoint.rename or len(held_names(tensors, metadata.model)) == len(tensors):
        return metadata
    return rename(metadata, parse_rules(config.checkpoint.rename), where).metadata


def _elsewhere(model: nn.Module, metadata: CheckpointMetadata) -> frozenset[str]:
    """What a checkpoint may lack: of an adapter, everything below it."""
    names = (t.name for t in model_tensors(model, values=False))
    return frozenset(names) if isinstance(metadata.training.get("base"), dict) else frozenset()


def _in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work` in a forked process: torch remembers meshes, and which rank it was, for good.

    Raises:
        PerdureError: what the work raised.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The child starts no thread and needs none of this process's.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        answer: dict[str, Any] = {"error": ["PerdureError", "the process that looked at a rank ended early", None]}
        try:
            answer = work()
        except PerdureError as error:
            answer = {"error": [type(error).__name__, error.message, error.hint]}
        except BaseException as error:
            told = " ".join(str(error).split())[:300]
            text = f"what its ranks would hold cannot be told: {type(error).__name__}: {told}"
            answer = {"error": ["PerdureError", text, None]}
        finally:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(answer).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(data) if data else {"error": ["PerdureError", "the process that looked at a rank died", None]}
    if "error" in answer:
        name, message, hint = answer["error"]
        kind: type[PerdureError] = getattr(errors, name)
        raise kind(message, hint=hint)
    return answer


def _become(rank: int, ranks: int) -> None:
    """This process, from now on, as one rank of many that are not there: collectives return at once."""
    if ranks == 1:
        return
    if dist.is_initialized():
        raise UsageError("what ranks would do can only be told by a process that is none of them")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
