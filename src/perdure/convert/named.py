"""A state dictionary of torch (model, optimizer, progress) as a `State`, and a `State` as such a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from perdure.convert.state import Item, State
from perdure.errors import DamagedCheckpointError, MismatchError
from perdure.format.common import CommonInfo
from perdure.format.jsonio import decode
from perdure.state.optimizer import MASTER, OptimizerView, collect_optimizer
from perdure.state.shards import NamedTensor, describe, held
from perdure.state.stateful import references

__all__ = ["EXTRA", "from_dictionary", "own_record"]

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
STEP_KEYS = ("global_step", "step", "iteration", "global_steps", "iter_num")

EXTRA = "extra"
"""Where the tensors of registered objects lie."""

_OWN_KEY = "perdure"

Load = Callable[[Tensor], Tensor]


def from_dictionary(
    where: str, tree: Mapping[Any, Any], *, load: Load = lambda tensor: tensor, optimizer_type: str = "AdamW"
) -> State:
    """What a dictionary holds: a plain state dictionary, or one with a model (and an optimizer) inside.

    Args:
        tree: tensors may be placeholders of the right shape and dtype.
        load: gives the tensor for a placeholder.
        optimizer_type: what the optimizer is; the dictionary doesn't say.

    Raises:
        MismatchError: no weights are found in it.
        UnsupportedStateError: a tensor that cannot be held.
    """
    key = next((k for k in MODEL_KEYS if _is_weights(tree.get(k))), None)
    weights = tree[key] if key is not None else tree
    if not _is_weights(weights):
        shown = ", ".join(str(k)[:40] for k in list(tree)[:8]) or "nothing"
        raise MismatchError(
            f"{where}: no weights found: expected tensors by name, alone or under {' or '.join(MODEL_KEYS)}; it holds "
            f"{shown}"
        )
    named = {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}
    own = _own(tree, where) if key is not None else _Own(CommonInfo())
    tied = {alias: name for name, others in own.ties.items() for alias in others if {name, alias} <= set(named)}
    state = State(where, _weights(named, tied, load), training=dict(own.training), common=own.common)
    left = [str(name) for name, value in weights.items() if not isinstance(value, Tensor)]
    if left:
        state.notes.append(f"{len(left)} entries that are no tensors were left out: {', '.join(left[:3])[:200]}")
    optimizer = next((k for k in OPTIMIZER_KEYS if isinstance(tree.get(k), Mapping)), None) if key else None
    if optimizer is not None:
        _add_optimizer(state, tree[optimizer], named, load, optimizer_type)
    taken = {key, optimizer, EXTRA, _OWN_KEY, *STEP_KEYS}
    beside = [str(name) for name, value in tree.items() if name not in taken and value is not None] if key else []
    if beside:
        state.notes.append(f"{len(beside)} entries beside the model were left out: {', '.join(beside[:5])[:200]}")
    if "extra" in own.training:
        _add_objects(state, tree.get(EXTRA), load, where)
    return state


def own_record(state: State) -> dict[str, str]:
    """What a state dictionary has no place for, as JSON under a key of ours: progress, ties, what a resume compares."""
    ties = {item.name: list(item.aliases) for item in state.items if item.aliases}
    training = {key: value for key, value in state.training.items() if key not in ("optimizer", "ranks")}
    record = _Own(state.common, ties, training)
    return {_OWN_KEY: msgspec.json.encode(record).decode()}


def _is_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values())


def _weights(named: Mapping[str, Tensor], tied: Mapping[str, str], load: Load) -> list[Item]:
    """One item per tensor; names that share all of their memory, or are said to be tied, are aliases."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in named.items():
        place: tuple[object, ...] = (name,)
        if tensor.numel() and tensor.layout is torch.strided:
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        aliases.setdefault(tied.get(name) or first.setdefault(place, name), []).append(name)
    return [
        _item(describe("model", n, named[n], tuple(a for a in same if a != n)), named[n], load)
        for n, same in aliases.items()
    ]


def _item(described: NamedTensor, tensor: Tensor, load: Load) -> Item:
    return Item(
        described.section,
        described.name,
        described.dtype,
        described.logical,
        described.shape,
        described.aliases,
        lambda: held(load(tensor)),
    )


class _Own(msgspec.Struct):
    """What `own_record` keeps."""

    common: CommonInfo
    ties: dict[str, list[str]] = {}
    training: dict[str, Any] = {}


def _own(tree: Mapping[Any, Any], where: str) -> _Own:
    """Our own record where there is one; else the step that others write beside the model."""
    text = tree.get(_OWN_KEY)
    if isinstance(text, str):
        return decode(text.encode(), _Own, f"{where}: {_OWN_KEY}")
    step = next((tree[k] for k in STEP_KEYS if type(tree.get(k)) is int and 0 <= tree[k] < 1 << 60), 0)
    return _Own(CommonInfo(global_step=step))


def _add_optimizer(
    state: State, saved: Mapping[Any, Any], weights: Mapping[str, Tensor], load: Load, kind: str
) -> None:
    """The optimizer's state under its parameters' names, where it has them."""
    by_number = saved.get("state")
    groups = saved.get("param_groups", [])
    sound = isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple) for group in groups
    )
    if not sound or not isinstance(by_number, Mapping) or not all(isinstance(v, Mapping) for v in by_number.values()):
        state.notes.append("the optimizer is not a state dictionary of torch.optim and was left out")
        return
    names = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group.get("param_names", group["params"]), strict=False)
    }
    states = {str(names.get(key, key)): value for key, value in by_number.items()}
    lost = [name for name in states if name not in weights]
    if lost:
        state.notes.append(
            f"the optimizer was left out: its state is numbered, not named ({lost[0][:80]} is no weight); save "
            "it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which gives names"
        )
        return
    masters = {name: value[MASTER] for name, value in states.items() if isinstance(value.get(MASTER), Tensor)}
    listed = [
        {
            **{k: _small(v, load) for k, v in group.items() if k not in ("params", "param_names")},
            "params": [weights[name] for p in group["params"] if (name := str(names[p])) in weights],
        }
        for group in groups
    ]
    optimizer = type(kind, (), {})()
    optimizer.param_groups = listed or [{"params": [weights[name] for name in states]}]
    optimizer.state = {
        weights[name]: {k: _small(v, load) for k, v in value.items() if k != MASTER} for name, value in states.items()
    }
    view = OptimizerView(optimizer, {id(tensor): name for name, tensor in weights.items()}, masters)
    described, tensors = collect_optimizer(view)
    state.training["optimizer"] = described
    state.items += [_item(t, t.pieces[0].tensor, load) for t in tensors]


def _add_objects(state: State, saved: Any, load: Load, where: str) -> None:
    """The registered objects, which our own record describes."""
    tensors = saved if isinstance(saved, Mapping) else {}
    wanted = [name for each in state.training["extra"].values() for name in references(each.get("trees"))]
    for name in dict.fromkeys(wanted):
        tensor = tensors.get(name)
        if not isinstance(tensor, Tensor):
            raise DamagedCheckpointError(
                f"{where}: {EXTRA}: {name}: missing, though our own record names it", tensor=name
            )
        state.items.append(_item(describe("extra", name, tensor), tensor, load))


def _small(value: Any, load: Load) -> Any:
    """Numbers are read at once: they are compared, and decide what is stored."""
    return load(value) if isinstance(value, Tensor) and value.numel() <= 1 else value
