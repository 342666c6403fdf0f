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

from perdure.errors import DamagedCheckpointError, MismatchError, UnsupportedStateError
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import TensorRecord
from perdure.state.arena import Arena
from perdure.state.dormant import Dormant, lay_to_rest
from perdure.state.groups import few, group_settings, moved_parameters, setting_tensor
from perdure.state.jsonable import from_json, to_json
from perdure.state.shards import NamedTensor, blank, describe

__all__ = ["MASTER", "OptimizerRestore", "OptimizerView", "collect_optimizer", "prepare_optimizer"]

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
    described = {"type": view.type, "keys": {**dormant.keys, **keys}, "groups": groups, "values": values}
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
        if not hasattr(value, "placements") and value.dim() == 0 and value.device.type == "cpu":
            values[name] = {"kind": "host"}
    elif type(value) is int and abs(value) < 1 << 63:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.int64)))
        values[name] = {"kind": "int"}
    elif type(value) is float:
        tensors.append(describe("optimizer", name, torch.tensor(value, dtype=torch.float64)))
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


@dataclass
class OptimizerRestore:
    """What a load will do to an optimizer: tensors to be filled, then `install`.

    `notes` are the differences worth a line to the user; `fresh` names the parameters that the
    checkpoint's optimizer did not know; `missing_masters` those whose master it lacks; `from_masters` those
    that are held in full precision here and take a master's values instead of the rounded weight's.
    """

    targets: list[NamedTensor]
    install: Callable[[], None]
    notes: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    missing_masters: list[str] = field(default_factory=list)
    from_masters: list[str] = field(default_factory=list)


def prepare_optimizer(
    view: OptimizerView,
    described: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    *,
    restore_settings: bool,
    others: frozenset[str] = frozenset(),
) -> OptimizerRestore:
    """Allocates state for what the checkpoint holds; nothing of the optimizer changes before the targets are filled.

    State tensors that the optimizer has already are filled in place.

    Args:
        described: metadata's `training.optimizer` as `collect_optimizer` made it.
        records: metadata's `optimizer` section.
        restore_settings: set parameter-group settings as saved (the Trainer's configuration wins over them).
        others: names of parameters that other ranks hold.

    Raises:
        MismatchError: another type of optimizer, or a master of another shape.
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
    slept = set(described.get("dormant", ()))
    shared_step = described.get("values", {}).get("$shared_step")
    sharers = _step_sharers(view, described, known, records)
    states: dict[int, dict[str, Any]] = {}
    arena = Arena()
    finishers: list[Callable[[], None]] = []
    claimed: set[str] = set()
    for name, parameter in view.parameters():
        state: dict[str, Any] = {}
        for label, key in described.get("keys", {}).items():
            own = f"{label}.{name}"
            source = label if label == shared_step and name in sharers else own
            values, held = described.get("values", {}), view.optimizer.state.get(parameter, {}).get(key)
            _allocate(state, key, source, parameter, values, records, restore, finishers, own, held, arena)
            claimed.add(source)
        states[id(parameter)] = state
        if known and name not in known | slept:
            restore.fresh.append(name)
    for name, master in view.masters.items():
        own = f"{MASTER}.{name}"
        if own in records:
            _expect(own, records[own], tuple(master.shape))
            restore.targets.append(_target(own, master))
            claimed.add(own)
        else:
            restore.missing_masters.append(name)
    for name, parameter in view.parameters():
        own = f"{MASTER}.{name}"
        if name not in view.masters and own in records and parameter.dtype in (torch.float32, torch.float64):
            _expect(own, records[own], tuple(parameter.shape))
            restore.targets.append(_target(own, parameter))
            restore.from_masters.append(name)
            claimed.add(own)
    claimed.update(target.name for target in restore.targets)
    unused = sorted(set(records) - claimed - set(described.get("set_aside", ())))
    unused = [name for name in unused if not _is_state_of(name, others)]
    labels = [*described.get("keys", {}), MASTER]
    dormant, asleep = lay_to_rest(view.frozen, set(unused), described, records, labels)
    restore.targets += asleep
    unused = sorted(set(unused).difference(target.name for target in asleep))
    woken = [name for name, _ in view.parameters() if name in slept]
    for names, what in (
        (dormant.parameters, "parameters are frozen; their optimizer state is kept"),
        (woken, "parameters are trained again, with the optimizer state from before they were frozen"),
    ):
        if names:
            restore.notes.append(f"{len(names)} {what}: {few(list(names))}")
    if unused:
        restore.notes.append(f"{len(unused)} optimizer tensors of the checkpoint have no parameter here: {few(unused)}")
    if restore.fresh:
        restore.notes.append(f"{len(restore.fresh)} parameters start with fresh optimizer state: {few(restore.fresh)}")
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if restore_settings:
        settings = group_settings(view.optimizer.param_groups, view.names, groups, restore.notes)
    elif moved := moved_parameters(view.optimizer.param_groups, view.names, groups):
        restore.notes.append(f"{len(moved)} parameters are in another group than before: {few(moved)}")

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
        view.dormant.become(dormant)
        for group in view.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):
                _counters_to_device(group["params"], view.optimizer.state)

    restore.install = install
    return restore


def _is_state_of(name: str, parameters: frozenset[str]) -> bool:
    """Whether `<state>.<parameter>` is of one of these parameters; either part may hold dots."""
    parts = name.partition("#")[0].split(".")
    return bool(parameters) and any(".".join(parts[first:]) in parameters for first in range(1, len(parts)))


def _target(name: str, tensor: Tensor) -> NamedTensor:
    """State to be filled; that of a model without values has none either, which the model itself is refused for."""
    return describe("optimizer", name, tensor, values=False)


def _step_sharers(
    view: OptimizerView, described: Mapping[str, Any], known: set[str], records: Mapping[str, TensorRecord]
) -> set[str]:
    """The parameters that have the step which is stored once for all."""
    names = [name for name, _ in view.parameters()]
    values = described.get("values", {})
    if "$without_step" in values:
        return known.intersection(names).difference(values["$without_step"])
    # Other programs don't say which have none: a parameter that never got a gradient has no state at all.
    others = [label for label in described.get("keys", {}) if label != values.get("$shared_step")]
    return {name for name in names if any(f"{label}.{name}" in records for label in others)}


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
    held: Any,
    arena: Arena,
) -> None:
    """Puts under `key` what the checkpoint calls `source`: a tensor to be filled, or a value.

    `held` is what the optimizer has there now; a tensor of the same kind is filled in place.
    """
    how = values.get(source, {})
    if how.get("kind") == "json":

        def inside(reference: str) -> Tensor:
            if reference not in records:
                raise DamagedCheckpointError(f"optimizer: {own}: its tensor {reference[:300]!r} is not there")
            tensor = blank(records[reference], parameter.device)
            restore.targets.append(_target(reference, tensor))
            return tensor

        state[key] = from_json(how["value"], inside, f"optimizer: {own}")
        return
    record = records.get(source)
    if record is None:
        return
    if how.get("kind") == "step":
        # Other programs count in whole numbers, maybe of shape [1]; torch in one float32 number.
        counter = torch.zeros(record.shape, dtype=torch.float32)
        restore.targets.append(_target(source, counter))
        state[key] = counter
        finishers.append(lambda: state.__setitem__(key, counter.reshape(())))
        return
    dtype = getattr(torch, record.logical or _torch_name(record.dtype))
    shape = record.shape[:-1] if record.logical.startswith("complex") else record.shape
    if how.get("kind") in ("int", "float"):
        number = torch.zeros((), dtype=dtype)
        restore.targets.append(_target(source, number))
        state[key] = number
        finishers.append(lambda: state.__setitem__(key, int(number) if how["kind"] == "int" else float(number)))
        return
    if tuple(shape) == tuple(parameter.shape) and not (how.get("kind") == "host" and len(shape) == 0):
        tensor = arena.like(parameter, dtype, held)
    else:
        device = "cpu" if how.get("kind") == "host" else parameter.device
        tensor = blank(record, device)
    state[key] = tensor
    restore.targets.append(_target(source, tensor))


def _counters_to_device(parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Kernels that count by themselves want the step where the parameter is."""
    for parameter in parameters:
        step = states[parameter].get("step") if parameter in states else None
        if isinstance(step, Tensor) and step.device != parameter.device:
            states[parameter]["step"] = step.to(parameter.device)


def _torch_name(stored: str) -> str:
    return BY_SAFETENSORS[stored].torch


def _expect(name: str, record: TensorRecord, shape: tuple[int, ...]) -> None:
    if tuple(record.shape) != shape:
        raise MismatchError(f"optimizer: {name}: shape {list(record.shape)} in the checkpoint, {list(shape)} here")
