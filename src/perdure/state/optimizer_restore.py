"""Optimizer state from a checkpoint into a live optimizer, by parameter name, without ever stepping it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from perdure.errors import DamagedCheckpointError, MismatchError, few
from perdure.format.dtypes import BY_SAFETENSORS, BY_TORCH
from perdure.format.metadata import TensorRecord
from perdure.state.arena import Arena
from perdure.state.dormant import lay_to_rest
from perdure.state.groups import group_settings, moved_parameters, refuse_missing_state
from perdure.state.jsonable import from_json
from perdure.state.optimizer import MASTER, OptimizerView
from perdure.state.shards import NamedTensor, blank, describe, dtype_name

__all__ = ["OptimizerRestore", "prepare_optimizer"]

_FLOATS = ("F64", "F32", "F16", "BF16")


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
    weights: Mapping[str, TensorRecord] | None = None,
) -> OptimizerRestore:
    """Allocates state for what the checkpoint holds; nothing of the optimizer changes before the targets are filled.

    State tensors that the optimizer has already are filled in place.

    Args:
        described: metadata's `training.optimizer` as `collect_optimizer` made it.
        records: metadata's `optimizer` section.
        restore_settings: set parameter-group settings as saved (the Trainer's configuration wins over them).
        others: names of parameters that other ranks hold.
        weights: the checkpoint's weights, by each of their names; state of their precision follows a change of it.

    Raises:
        MismatchError: another type of optimizer, or a master of another shape.
    """
    saved_type = described.get("type", view.type)
    if saved_type != view.type:
        raise MismatchError(
            f"the checkpoint's optimizer is {saved_type}, this run's is {view.type}",
            hint=f"use {saved_type}, or start from the weights only: checkpoint.no_load_optim=True",
        )
    room = _Room(described.get("values", {}), records)
    restore = OptimizerRestore(room.targets, lambda: None)
    groups = described.get("groups", [])
    known = {name for group in groups for name in group["params"]}
    slept = set(described.get("dormant", ()))
    keys = described.get("keys", {})
    shared_step = described.get("values", {}).get("$shared_step")
    sharers = _step_sharers(view, described, known, records)
    states: dict[int, dict[str, Any]] = {}
    claimed: set[str] = set()
    for name, parameter in view.parameters():
        state = states[id(parameter)] = {}
        held = view.optimizer.state.get(parameter, {})
        change = _change_of_precision(name, view.masters.get(name, parameter), weights or {}, records)
        for label, key in keys.items():
            own = f"{label}.{name}"
            source = label if label == shared_step and name in sharers else own
            room.take(state, key, source, own, parameter, held.get(key), change)
            claimed.add(source)
        if known and name not in known and name not in slept:
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
    labels = [*keys, MASTER]
    dormant, asleep = lay_to_rest(view.frozen, set(unused), described, records, labels)
    restore.targets += asleep
    unused = sorted(set(unused).difference(target.name for target in asleep))
    woken = [name for name, _ in view.parameters() if name in slept]
    for names, what in (
        (dormant.parameters, "parameters are frozen; their optimizer state is kept"),
        (woken, "parameters are trained again, with the optimizer state from before they were frozen"),
    ):
        if names:
            restore.notes.append(f"{len(names)} {what}: {few(names)}")
    if unused:
        restore.notes.append(f"{len(unused)} optimizer tensors of the checkpoint have no parameter here: {few(unused)}")
    if restore.fresh:
        restore.notes.append(f"{len(restore.fresh)} parameters start with fresh optimizer state: {few(restore.fresh)}")
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if restore_settings:
        settings = group_settings(view.optimizer.param_groups, view.names, groups, restore.notes)
    else:
        refuse_missing_state(view.optimizer.param_groups, view.names, states, view.type)
        if moved := moved_parameters(view.optimizer.param_groups, view.names, groups):
            restore.notes.append(f"{len(moved)} parameters are in another group than before: {few(moved)}")

    def install() -> None:
        room.finish()
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


class _Room:
    """Room for the states of parameters: `targets` are to be filled, then `finish` makes of them what they stand for.

    Args:
        values: what metadata say of states that aren't tensors, by name.
        records: metadata's `optimizer` section.
    """

    def __init__(self, values: Mapping[str, Any], records: Mapping[str, TensorRecord]) -> None:
        self.targets: list[NamedTensor] = []
        self._values, self._records = values, records
        self._arena = Arena()
        self._numbers: dict[str, Tensor] = {}
        self._takers: list[tuple[dict[str, Any], str, Tensor, str]] = []

    def finish(self) -> None:
        """To be called when the targets are filled."""
        for state, key, number, kind in self._takers:
            state[key] = _value(number, kind)

    def take(
        self,
        state: dict[str, Any],
        key: str,
        source: str,
        own: str,
        parameter: Tensor,
        held: Any,
        change: tuple[str, torch.dtype] | None,
    ) -> None:
        """Puts under `key` what the checkpoint calls `source`: a tensor to be filled, or a value.

        `held` is what the optimizer has there now; a tensor of the same kind is filled in place. `change` is the stored
        dtype that the parameter was updated in, and the one that it is updated in now.
        """
        how = self._values.get(source)
        kind = how.get("kind") if how is not None else None
        if how is not None and kind == "json":
            state[key] = from_json(how["value"], partial(self._inside, own, parameter.device), f"optimizer: {own}")
            return
        record = self._records.get(source)
        if record is None:
            return
        if kind is not None:
            state[key] = number = self._number(source, record, kind)
            self._takers.append((state, key, number, kind))
            return
        dtype = getattr(torch, record.logical or BY_SAFETENSORS[record.dtype].torch)
        shape = record.shape[:-1] if record.logical.startswith("complex") else record.shape
        if shape == parameter.shape:
            follows = change is not None and not record.logical and record.dtype == change[0]
            tensor = self._arena.like(parameter, change[1] if change is not None and follows else dtype, held)
        else:
            tensor = blank(record, parameter.device)
        state[key] = tensor
        self.targets.append(_target(source, tensor))

    def _number(self, source: str, record: TensorRecord, kind: str) -> Tensor:
        """Room for a single number in host memory: one, however many parameters share it."""
        number = self._numbers.get(source)
        if number is None:
            # Other programs count steps in whole numbers, maybe of shape [1]; torch in one float32 number.
            number = torch.zeros(record.shape, dtype=torch.float32, device="cpu") if kind == "step" else blank(record)
            self._numbers[source] = number
            self.targets.append(_target(source, number))
        return number

    def _inside(self, own: str, device: torch.device, reference: str) -> Tensor:
        """Room for a tensor within a value that is JSON."""
        if reference not in self._records:
            raise DamagedCheckpointError(f"optimizer: {own}: its tensor {reference[:300]!r} is not there")
        tensor = blank(self._records[reference], device)
        self.targets.append(_target(reference, tensor))
        return tensor


def _value(number: Tensor, kind: str) -> Any:
    """A number that was read, as the optimizer has it; each parameter has its own."""
    if kind in ("int", "float"):
        return int(number) if kind == "int" else float(number)
    return (number.reshape(()) if number.dim() else number).clone()


def _change_of_precision(
    name: str, owner: Tensor, weights: Mapping[str, TensorRecord], records: Mapping[str, TensorRecord]
) -> tuple[str, torch.dtype] | None:
    """The stored dtype in which a parameter was updated and the dtype in which it is now, where they differ."""
    record = records.get(f"{MASTER}.{name}", weights.get(name))
    if record is None or record.dtype not in _FLOATS or record.dtype == BY_TORCH[dtype_name(owner.dtype)].stored:
        return None
    return record.dtype, owner.dtype


def _counters_to_device(parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Kernels that count by themselves want the step where the parameter is."""
    for parameter in parameters:
        step = states[parameter].get("step") if parameter in states else None
        if isinstance(step, Tensor) and step.device != parameter.device:
            states[parameter]["step"] = step.to(parameter.device)


def _expect(name: str, record: TensorRecord, shape: tuple[int, ...]) -> None:
    if tuple(record.shape) != shape:
        raise MismatchError(f"optimizer: {name}: shape {list(record.shape)} in the checkpoint, {list(shape)} here")
