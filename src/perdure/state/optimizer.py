"""Optimizer state by parameter name, as a save takes it.

Names (FORMAT.md): `<state>.<parameter>`; Adam's states are `adam_m`, `adam_v` and `adam_step`, masters
`main_param`; a step that all parameters share is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perdure.errors import UnsupportedStateError
from perdure.state.dormant import Dormant
from perdure.state.groups import setting_tensor
from perdure.state.jsonable import to_json
from perdure.state.shards import NamedTensor, describe

__all__ = ["MASTER", "OptimizerView", "collect_optimizer"]

MASTER = "main_param"
_ADAM = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "step": "adam_step"}


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as the checkpoint sees it.

    `optimizer` holds groups and state; `names` gives each of its parameters (a master stands for its
    model parameter) a fully qualified name; `masters` are the FP32 copies by that name; `named` is the
    optimizer whose type a resume compares (default: `optimizer`); `frozen` are the model's parameters
    that are not the optimizer's, and `dormant` the state that is kept for them.
    """

    optimizer: Any
    names: Mapping[int, str]
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    named: Any = None
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    dormant: Dormant = field(default_factory=Dormant)

    @property
    def type(self) -> str:
        """Class name of the optimizer that does the arithmetic."""
        return type(self.optimizer if self.named is None else self.named).__name__

    def parameters(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of all groups, in order.

        Raises:
            UnsupportedStateError: a parameter is not one of the model's, so that it has no name.
        """
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter))
                if name is None:
                    raise UnsupportedStateError(
                        f"optimizer: parameter {position} of group {number}, of shape {list(parameter.shape)}, "
                        "is not a parameter of the model, so its state has no name",
                        hint="pass the module that owns it as (part of) the model",
                    )
                found.append((name, parameter))
        return found


def collect_optimizer(view: OptimizerView, *, share_step: bool = True) -> tuple[dict[str, Any], list[NamedTensor]]:
    """What metadata.json says of the optimizer, and its tensors.

    Args:
        share_step: store a step that is the same for all parameters once, under a name without a parameter.

    Raises:
        UnsupportedStateError: a state or a setting cannot be held; it is named.
    """
    tensors: list[NamedTensor] = []
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    steps: dict[tuple[str, str], Any] = {}
    parameters = view.parameters()
    _refuse_hidden_state(view.optimizer)
    for name, parameter in parameters:
        # Asked first: some states make an entry when they are asked for one, by `get` too.
        known = parameter in view.optimizer.state
        state = view.optimizer.state[parameter] if known else {}
        adam = "exp_avg" in state
        for key, value in state.items():
            if type(key) is not str:
                raise UnsupportedStateError(f"optimizer: state {key!r} of {name[:300]} has a key that is not a text")
            label = _ADAM.get(key, key) if adam else key
            keys[label] = key
            if key == "step":
                steps[label, name] = value
            else:
                _collect_value(f"{label}.{name}", value, tensors, values)
    labels = {label for label, _ in steps}
    if share_step and len(steps) > 1 and len(labels) == 1 and _all_equal(list(steps.values())):
        (label,) = labels
        values["$shared_step"] = label
        values["$without_step"] = [name for name, _ in parameters if (label, name) not in steps]
        _collect_value(label, next(iter(steps.values())), tensors, values)
    else:
        for (label, name), value in steps.items():
            _collect_value(f"{label}.{name}", value, tensors, values)
    tensors += [describe("optimizer", f"{MASTER}.{name}", master) for name, master in view.masters.items()]
    groups = [
        {
            "params": [view.names[id(p)] for p in group["params"]],
            "settings": {
                str(k): to_json(v, f"optimizer: group {n}: {k}", setting_tensor)
                for k, v in group.items()
                if k not in ("params", "param_names")
            },
        }
        for n, group in enumerate(view.optimizer.param_groups)
    ]
    dormant = view.dormant
    tensors += dormant.tensors
    _refuse_repeated(tensors)
    described: dict[str, Any] = {"type": view.type, "keys": dormant.keys | keys, "groups": groups, "values": values}
    if dormant.parameters:
        described |= {"dormant": list(dormant.parameters), "values": {**values, **dormant.values}}
    return described, tensors


def _refuse_hidden_state(optimizer: Any) -> None:
    """State that belongs to no parameter has no name here; that of an optimizer inside another would be lost."""
    for name, inner in vars(optimizer).items():
        # A state that is no plain dictionary is a window on the inner one's.
        own = isinstance(optimizer.state, dict)
        if isinstance(inner, torch.optim.Optimizer) and own and inner.state is not optimizer.state:
            raise UnsupportedStateError(
                f"optimizer: {type(optimizer).__name__} keeps {type(inner).__name__} in its {name!r}, "
                "with state of its own that would not be saved",
                hint="let both share one `state`, keyed by parameter; to shard an optimizer over ranks, shard the "
                "model with torch.distributed.fsdp.fully_shard",
            )
    for key in optimizer.state:
        if not isinstance(key, Tensor):
            raise UnsupportedStateError(
                f"optimizer: {type(optimizer).__name__} keeps state under {key!r}, which is not a parameter",
                hint="such state cannot be saved by parameter name: keep it in the state of a parameter or in a group",
            )


def _refuse_repeated(tensors: list[NamedTensor]) -> None:
    """A dot in the name of a state could make one name of two."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise UnsupportedStateError(f"optimizer: two states are both called {tensor.name[:300]}")
        seen.add(tensor.name)


def _collect_value(name: str, value: Any, tensors: list[NamedTensor], values: dict[str, Any]) -> None:
    """A tensor goes among the tensors; a number too, with its kind noted; anything else is JSON."""
    if isinstance(value, Tensor):
        tensors.append(describe("optimizer", name, value))
        if value.dim() == 0 and not hasattr(value, "placements") and value.device.type == "cpu":
            values[name] = {"kind": "host"}
    elif type(value) is int and abs(value) < 1 << 63:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.int64, device="cpu")))
        values[name] = {"kind": "int"}
    elif type(value) is float:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.float64, device="cpu")))
        values[name] = {"kind": "float"}
    else:
        where = f"optimizer: {name}"

        def reference(tensor: Tensor, path: str) -> Any:
            unique = f"{path.removeprefix('optimizer: ')}#{len(tensors)}"
            tensors.append(describe("optimizer", unique, tensor))
            return {"$tensor": unique}

        values[name] = {"kind": "json", "value": to_json(value, where, reference)}


def _all_equal(steps: list[Any]) -> bool:
    first = steps[0]
    if isinstance(first, Tensor):
        return (
            all(
                isinstance(s, Tensor) and s.shape == first.shape and s.dtype == first.dtype and s.device == first.device
                for s in steps
            )
            and len({s.item() for s in steps}) == 1
            and first.dim() == 0
        )
    return all(type(s) is type(first) and s == first for s in steps)
