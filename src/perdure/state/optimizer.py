"""Optimizer state by parameter name, read and set without ever stepping an optimizer.

Names (FORMAT.md): `<state>.<parameter>`; Adam's states are `adam_m`, `adam_v` and `adam_step`, masters
`main_param`; a step that all parameters share is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perdure.errors import MismatchError, UnsupportedStateError
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import TensorRecord
from perdure.state.jsonable import from_json, to_json
from perdure.state.shards import NamedTensor, describe

__all__ = ["MASTER", "OptimizerRestore", "OptimizerView", "collect_optimizer", "prepare_optimizer"]

MASTER = "main_param"
_ADAM = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v", "step": "adam_step"}


@dataclass(frozen=True)
class OptimizerView:
    """An optimizer as the checkpoint sees it.

    `optimizer` holds groups and state; `names` gives each of its parameters (a master stands for its
    model parameter) a fully qualified name; `masters` are the FP32 copies by that name; `named` is the
    optimizer whose type a resume compares (default: `optimizer`).
    """

    optimizer: Any
    names: Mapping[int, str]
    masters: Mapping[str, Tensor] = field(default_factory=dict)
    named: Any = None

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


def collect_optimizer(view: OptimizerView) -> tuple[dict[str, Any], list[NamedTensor]]:
    """What metadata.json says of the optimizer, and its tensors.

    Raises:
        UnsupportedStateError: a state or a setting cannot be held; it is named.
    """
    tensors: list[NamedTensor] = []
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for name, parameter in view.parameters():
        state = view.optimizer.state.get(parameter, {})
        adam = "exp_avg" in state
        for key, value in state.items():
            label = _ADAM.get(key, key) if adam else key
            keys[label] = key
            if key == "step":
                steps[f"{label}.{name}"] = value
            else:
                _collect_value(f"{label}.{name}", value, tensors, values)
    if len(steps) > 1 and _all_equal(list(steps.values())):
        label = next(iter(steps)).partition(".")[0]
        steps = {label: next(iter(steps.values()))}
        values["$shared_step"] = label
    for name, value in steps.items():
        _collect_value(name, value, tensors, values)
    tensors += [describe("optimizer", f"{MASTER}.{name}", master) for name, master in view.masters.items()]
    groups = [
        {
            "params": [view.names[id(p)] for p in group["params"]],
            "settings": {
                k: to_json(v, f"optimizer: group {n}: {k}", _tensor_setting)
                for k, v in group.items()
                if k not in ("params", "param_names")
            },
        }
        for n, group in enumerate(view.optimizer.param_groups)
    ]
    return {"type": view.type, "keys": keys, "groups": groups, "values": values}, tensors


def _collect_value(name: str, value: Any, tensors: list[NamedTensor], values: dict[str, Any]) -> None:
    """A tensor goes among the tensors; a number too, with its kind noted; anything else is JSON."""
    if isinstance(value, Tensor):
        tensors.append(describe("optimizer", name, value))
        if not hasattr(value, "placements") and value.dim() == 0 and value.device.type == "cpu":
            values[name] = {"kind": "host"}
    elif type(value) is int and abs(value) < 1 << 63:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.int64)))
        values[name] = {"kind": "int"}
    elif type(value) is float:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.float64)))
        values[name] = {"kind": "float"}
    else:
        values[name] = {"kind": "json", "value": to_json(value, f"optimizer: {name}", _tensor_setting)}


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


def _tensor_setting(value: Tensor, where: str) -> Any:
    if value.numel() > 64 or hasattr(value, "placements"):
        raise UnsupportedStateError(f"{where}: a tensor of {value.numel()} elements is not a setting")
    listed = value.detach().cpu()
    return {"$dict": [["dtype", str(listed.dtype)], ["value", to_json(listed.tolist(), where, _tensor_setting)]]}


@dataclass
class OptimizerRestore:
    """What a load will do to an optimizer: tensors to be filled, then `install`.

    `notes` are the differences worth a line to the user; `fresh` names the parameters that the
    checkpoint's optimizer did not know; `missing_masters` those whose master it lacks.
    """

    targets: list[NamedTensor]
    install: Callable[[], None]
    notes: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    missing_masters: list[str] = field(default_factory=list)


def prepare_optimizer(
    view: OptimizerView, described: Mapping[str, Any], records: Mapping[str, TensorRecord], *, restore_settings: bool
) -> OptimizerRestore:
    """Allocates state for what the checkpoint holds; nothing of the optimizer changes before `install`.

    Args:
        described: metadata's `training.optimizer` as `collect_optimizer` made it.
        records: metadata's `optimizer` section.
        restore_settings: set parameter-group settings as saved (the Trainer's configuration wins over them).

    Raises:
        MismatchError: another type of optimizer, or state of another shape.
    """
    saved_type = described.get("type", view.type)
    if saved_type != view.type:
        raise MismatchError(
            f"the checkpoint's optimizer is {saved_type}, this run's is {view.type}",
            hint=f"use {saved_type}, or start from the weights only: checkpoint.no_load_optim=True",
        )
    restore = OptimizerRestore([], lambda: None)
    groups = described.get("groups", [])
    known = {name for group in groups for name in group["params"]}
    states: dict[int, dict[str, Any]] = {}
    finishers: list[Callable[[], None]] = []
    claimed: set[str] = set()
    for name, parameter in view.parameters():
        state: dict[str, Any] = {}
        for label, key in described.get("keys", {}).items():
            own = f"{label}.{name}"
            shared = own not in records and described.get("values", {}).get("$shared_step") == label
            source = label if shared and _has_own_state(name, described, records) else own
            _allocate(state, key, source, parameter, described.get("values", {}), records, restore, finishers, own)
            claimed.add(source)
        states[id(parameter)] = state
        if known and name not in known:
            restore.fresh.append(name)
    for name, master in view.masters.items():
        own = f"{MASTER}.{name}"
        if own in records:
            _expect(own, records[own], tuple(master.shape))
            restore.targets.append(describe("optimizer", own, master))
            claimed.add(own)
        else:
            restore.missing_masters.append(name)
    unused = sorted(set(records) - claimed)
    if unused:
        restore.notes.append(
            f"{len(unused)} optimizer tensors of the checkpoint have no parameter here: {_few(unused)}"
        )
    if restore.fresh:
        restore.notes.append(f"{len(restore.fresh)} parameters start with fresh optimizer state: {_few(restore.fresh)}")
    settings = _group_settings(view, groups, restore.notes) if restore_settings else []

    def install() -> None:
        for finish in finishers:
            finish()
        for _, parameter in view.parameters():
            state = states[id(parameter)]
            if state:
                view.optimizer.state[parameter] = state
            else:
                view.optimizer.state.pop(parameter, None)
        for group, saved in settings:
            group.update(saved)

    restore.install = install
    return restore


def _has_own_state(name: str, described: Mapping[str, Any], records: Mapping[str, TensorRecord]) -> bool:
    """Whether a parameter has state besides a shared step: one that never got a gradient has none."""
    values = described.get("values", {})
    shared = values.get("$shared_step")
    others = [label for label in described.get("keys", {}) if label != shared]
    return not others or any(f"{label}.{name}" in records or f"{label}.{name}" in values for label in others)


def _allocate(
    state: dict[str, Any],
    key: str,
    source: str,
    parameter: Tensor,
    values: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    restore: OptimizerRestore,
    finishers: list[Callable[[], None]],
    own: str,
) -> None:
    """Puts under `key` what the checkpoint calls `source`: a tensor to be filled, or a value."""
    how = values.get(source, {})
    if how.get("kind") == "json":
        state[key] = from_json(how["value"], lambda reference: torch.tensor(reference), f"optimizer: {own}")
        return
    record = records.get(source)
    if record is None:
        return
    dtype = getattr(torch, record.logical or _torch_name(record.dtype))
    shape = record.shape[:-1] if record.logical.startswith("complex") else record.shape
    if how.get("kind") in ("int", "float"):
        number = torch.zeros((), dtype=dtype)
        # Filled under a name of its own: several parameters may share one source.
        restore.targets.append(describe("optimizer", source, number))
        finishers.append(lambda: state.__setitem__(key, int(number) if how["kind"] == "int" else float(number)))
        return
    if tuple(shape) == tuple(parameter.shape) and not (how.get("kind") == "host" and len(shape) == 0):
        tensor = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        tensor = tensor.detach()
    else:
        device = "cpu" if how.get("kind") == "host" else parameter.device
        tensor = torch.zeros(shape, dtype=dtype, device=device)
    state[key] = tensor
    restore.targets.append(describe("optimizer", source, tensor))


def _torch_name(stored: str) -> str:
    return BY_SAFETENSORS[stored].torch


def _expect(name: str, record: TensorRecord, shape: tuple[int, ...]) -> None:
    if tuple(record.shape) != shape:
        raise MismatchError(f"optimizer: {name}: shape {list(record.shape)} in the checkpoint, {list(shape)} here")


def _few(names: list[str], most: int = 3) -> str:
    shown = ", ".join(n if len(n) <= 80 else n[:77] + "..." for n in names[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"


def _group_settings(
    view: OptimizerView, groups: list[Any], notes: list[str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each live group, the settings that the checkpoint has for its parameters, matched by name."""
    home = {name: number for number, group in enumerate(groups) for name in group["params"]}
    found: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, group in enumerate(view.optimizer.param_groups):
        names = [view.names[id(p)] for p in group["params"]]
        sources = {home[name] for name in names if name in home}
        if len(sources) == 1:
            saved = groups[sources.pop()]["settings"]
            found.append((group, {k: _setting(from_json(v, torch.tensor), group.get(k)) for k, v in saved.items()}))
        elif sources:
            moved = [n for n in names if home.get(n) not in (None, min(sources))]
            mixed = f"group {number} mixes parameters of {len(sources)} saved groups and keeps its own settings"
            notes.append(f"{mixed}: {_few(moved)}")
    return found


def _setting(value: Any, live: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"dtype", "value"}:
        tensor = torch.tensor(value["value"], dtype=getattr(torch, str(value["dtype"]).removeprefix("torch.")))
        return tensor.to(live.device) if isinstance(live, Tensor) else tensor
    return value
