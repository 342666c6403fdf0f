"""Optimizer state of frozen parameters: no optimizer's now, kept in host memory and saved on, until they are trained
again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import TensorRecord
from perdure.state.shards import NamedTensor, Piece, blank, describe, local_pieces

__all__ = ["Dormant", "lay_to_rest"]


@dataclass
class Dormant:
    """What is kept: tensors by their names in a checkpoint, and what metadata.json says of them.

    Attributes:
        parameters: the frozen parameters.
        keys: label -> key in the optimizer's state, as for the others.
        values: how a number is to be given back, by name.
    """

    parameters: tuple[str, ...] = ()
    tensors: list[NamedTensor] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def become(self, other: Dormant) -> None:
        """Keeps what `other` keeps, and nothing else."""
        self.parameters, self.tensors = other.parameters, other.tensors
        self.keys, self.values = other.keys, other.values


def lay_to_rest(
    frozen: Mapping[str, Tensor],
    unused: Collection[str],
    described: Mapping[str, Any],
    records: Mapping[str, TensorRecord],
    labels: Collection[str],
) -> tuple[Dormant, list[NamedTensor]]:
    """Makes room for the state that a checkpoint has for frozen parameters.

    Args:
        frozen: the model's parameters that are not the optimizer's, by name.
        unused: optimizer tensors of the checkpoint that no parameter of the optimizer takes.
        labels: what may stand in front of a parameter's name.

    Returns:
        What is kept, and its tensors under the names of the checkpoint's, to be filled.
    """
    dormant = Dormant()
    targets: list[NamedTensor] = []
    values = described.get("values", {})
    known = {name for group in described.get("groups", ()) for name in group["params"]}
    step = values.get("$shared_step")
    sharing = known.difference(values.get("$without_step", ())) if step in records else set()
    kept = []
    for name, parameter in frozen.items():
        sources = {f"{label}.{name}": f"{label}.{name}" for label in labels if f"{label}.{name}" in unused}
        if sources and name in sharing:
            sources[f"{step}.{name}"] = str(step)
        for own, source in sources.items():
            record, how = records[source], values.get(source)
            tensor = _room(own, parameter, record)
            dormant.tensors.append(tensor)
            targets.append(NamedTensor("optimizer", source, *_rest(tensor)))
            if how is not None:
                dormant.values[own] = how
        if sources:
            kept.append(name)
    dormant.parameters = tuple(kept)
    if kept:
        dormant.keys = dict(described.get("keys", {}))
    return dormant, targets


def _rest(tensor: NamedTensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.logical, tensor.shape, tensor.pieces


def _room(name: str, parameter: Tensor, record: TensorRecord) -> NamedTensor:
    """Host memory for this rank's part of a state that is cut like its parameter, or for all of one that isn't."""
    shape, pieces = local_pieces(parameter)
    if tuple(record.shape) != shape or record.logical:
        return describe("optimizer", name, blank(record))
    dtype: torch.dtype = getattr(torch, BY_SAFETENSORS[record.dtype].torch)
    own = tuple(Piece(p.box, torch.zeros(p.box.shape, dtype=dtype, device="cpu")) for p in pieces)
    return NamedTensor("optimizer", name, record.dtype, "", shape, own)
