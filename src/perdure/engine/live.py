"""The live objects of a run, as a checkpoint sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from perdure.engine.ranks import Ranks
from perdure.engine.writer import memory_of
from perdure.errors import SaveError, UnsupportedStateError, UsageError
from perdure.format.digest import digest_bytes
from perdure.format.jsonio import encode
from perdure.state.dormant import Dormant
from perdure.state.merge import common_step, merge_optimizers
from perdure.state.model import (
    extra_states,
    model_tensors,
    named_parameters,
    refuse_hidden,
    reshard,
)
from perdure.state.optimizer import OptimizerView, collect_optimizer
from perdure.state.shards import NamedTensor
from perdure.state.stateful import check_registered, collect

__all__ = ["Live"]


class Live:
    """Model, optimizer and registered objects.

    Raises:
        UsageError: they are of other kinds.
        UnsupportedStateError: a registered object cannot be saved.
    """

    def __init__(self, model: nn.Module, optimizer: Any, extra: Mapping[str, Any]) -> None:
        _check_kinds(model, optimizer, extra)
        check_registered(extra)
        self.model, self.optimizer, self.extra = model, optimizer, dict(extra)
        self._dormant = Dormant()

    def tensors(self) -> list[NamedTensor]:
        """The model's parameters and persistent buffers."""
        reshard(self.model)
        return model_tensors(self.model)

    def elsewhere(self) -> frozenset[str]:
        """Those of them that a checkpoint may lack."""
        return frozenset()

    def host_bytes(self, ranks: int) -> int:
        """About how many bytes a rank saves of model and optimizer, where all of them lie in host memory; else 0.

        Args:
            ranks: how many share what each holds whole.
        """
        states = getattr(self.optimizer, "inner", self.optimizer)
        values = (v for state in getattr(states, "state", {}).values() for v in state.values())
        masters = self.optimizer.main_params().values() if hasattr(self.optimizer, "main_params") else ()
        tensors = [*self.model.parameters(), *self.model.buffers(), *masters, *values]
        total = 0.0
        for tensor in (t for t in tensors if isinstance(t, Tensor)):
            if tensor.device.type != "cpu":
                return 0
            sharded: Any = tensor if hasattr(tensor, "placements") else None
            here: Tensor = tensor if sharded is None else sharded.to_local()
            total += here.numel() * here.element_size() / (ranks if sharded is None else 1)
        # Headers, and the edges of files.
        return int(total) + 512 * len(tensors) + (1 << 20)

    def view(self) -> OptimizerView | None:
        """The optimizer with the names of its parameters, or None without one."""
        if self.optimizer is None:
            return None
        reshard(self.model)
        named_here = named_parameters(self.model)
        names = {id(p): name for p, name in named_here}
        masters = {}
        if hasattr(self.optimizer, "main_params"):
            masters = {names[id(p)]: m for p, m in self.optimizer.main_params().items() if id(p) in names}
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        frozen = {name: p for p, name in named_here if id(p) not in trained}
        named = getattr(self.optimizer, "inner", self.optimizer)
        return OptimizerView(self.optimizer, names, masters, named, frozen, self._dormant)

    def registered(self) -> dict[str, Any]:
        """The registered objects, and the modules of the model that keep state of their own."""
        modules = extra_states(self.model)
        return {**self.extra, **{f"model.{name}": _ModuleState(m) for name, m in modules.items()}}

    @torch.no_grad()
    def collect(
        self, ranks: Ranks, *, with_optimizer: bool, leave_out: frozenset[str] = frozenset()
    ) -> tuple[dict[str, Any], list[NamedTensor]]:
        """What metadata.json says of the state, and every tensor of it that this rank holds.

        Args:
            leave_out: names of the model's tensors that are not collected.

        Raises:
            UnsupportedStateError: something cannot be held; it is named.
            SaveError: a replicated object differs between ranks.
        """

        tensors: list[NamedTensor] = []
        objects: list[_Collected] = []

        def own() -> dict[str, dict[str, Any]]:
            refuse_hidden(self.model)
            tensors.extend(t for t in self.tensors() if t.name not in leave_out)
            objects.extend(_collect(name, value, ranks.rank) for name, value in self.registered().items())
            return {o.name: o.shared for o in objects}

        training: dict[str, Any] = {"ranks": ranks.size}
        shared = ranks.exchange(own, "collecting the state")
        if self.optimizer is not None and with_optimizer:
            training["optimizer"], state = self._collect_optimizer(ranks)
            tensors += state
        if any(shared):
            training["extra"] = ranks.together(lambda: _agree(objects, shared), "comparing objects")
            for held in objects:
                tensors += held.tensors
        return training, tensors

    def _collect_optimizer(self, ranks: Ranks) -> tuple[dict[str, Any], list[NamedTensor]]:
        """The optimizer as one over all ranks, which in a pipeline hold different parameters."""
        doing = "collecting the optimizer"
        view = self.view()
        assert view is not None
        if ranks.size == 1:
            return ranks.together(lambda: collect_optimizer(view), doing)
        collected: tuple[dict[str, Any], list[NamedTensor]] = {}, []

        def own(share_step: bool) -> dict[str, Any]:
            nonlocal collected
            collected = collect_optimizer(view, share_step=share_step)
            return collected[0]

        alike = ranks.exchange(lambda: (digest_bytes(encode(own(True))), common_step(view)), doing)
        if all(each == alike[0] for each in alike):
            return collected
        if len({tuple(steps) for _, steps in alike if steps is not None}) > 1:
            every = ranks.exchange(lambda: own(False), doing)
        else:
            every = ranks.gather(collected[0], doing)
        return merge_optimizers(every), collected[1]


def _check_kinds(model: Any, optimizer: Any, extra: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: expected a torch.nn.Module, found {type(model).__name__}",
            hint="put several models into one: torch.nn.ModuleDict",
        )
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")):
        raise UsageError(
            f"optimizer: expected one torch.optim.Optimizer, found {type(optimizer).__name__}",
            hint="where there are several, or a scheduler, register the others in `extra`",
        )
    if not isinstance(extra, Mapping):
        raise UsageError(f"extra: expected objects by name, found {type(extra).__name__}")


@dataclass(frozen=True)
class _Collected:
    """One object's state on this rank; `shared` is what the other ranks need of it: its tree, or a digest."""

    name: str
    tree: Any
    tensors: list[NamedTensor]
    shared: dict[str, Any]


def _collect(name: str, value: Any, rank: int) -> _Collected:
    per_rank = bool(getattr(value, "per_rank", False))
    lies = hasattr(value, "layout_of")
    try:
        state = value.state_dict()
    except Exception as error:
        raise UnsupportedStateError(
            f"`{name}` has no state to save: its own code failed: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    tree, tensors = collect(f"{name}@{rank}" if per_rank else name, state, sharded=lies)
    # A module may be on some pipeline stages only, and rank 0 is to know what it keeps.
    of_module = isinstance(value, _ModuleState)
    shared = {
        "per_rank": per_rank,
        "everywhere": not of_module,
        # Each rank has parts of its own of tensors that lie as the model's do.
        "digest": "" if per_rank else _digest(tree, [] if lies else tensors),
        "tree": tree if per_rank or of_module else None,
    }
    return _Collected(name, tree, tensors, shared)


def _agree(objects: list[_Collected], shared: list[dict[str, Any]]) -> dict[str, Any]:
    """What metadata.json says of the objects; a replicated one must be the same everywhere."""
    own = {held.name: held.tree for held in objects}
    described = {}
    for name in dict.fromkeys(name for each in shared for name in each):
        held = [each[name] for each in shared if name in each]
        if len(held) < len(shared) and held[0]["everywhere"]:
            raise SaveError(
                f"`{name}` is registered on {len(held)} of {len(shared)} ranks",
                hint="register the same objects on every rank",
            )
        per_rank = held[0]["per_rank"]
        if len({each["digest"] for each in held}) > 1:
            raise SaveError(
                f"`{name}` differs between ranks, but is saved once for all",
                hint="set `per_rank = True` on the object to save each rank's own",
            )
        trees = [each["tree"] for each in held] if per_rank else [own.get(name, held[0]["tree"])]
        described[name] = {"mode": "per_rank" if per_rank else "replicated", "trees": trees}
    return described


class _ModuleState:
    """A module's own extra state, as a registered object."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._module.get_extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._module.set_extra_state(state["value"])


def _digest(tree: Any, tensors: list[NamedTensor]) -> str:
    hasher = xxhash.xxh3_128(repr(tree).encode())
    for tensor in tensors:
        for piece in tensor.pieces:
            plain = piece.tensor.contiguous().cpu()
            hasher.update(memory_of(plain))
    return hasher.hexdigest()
