"""What tensors hold, as numbers that no cut over ranks and no storing precision changes.

Each element, as float32 (or as it is, where it is no float or a wider one), is weighed by its place in the whole
tensor, and all are summed modulo 2^64. Made to tell another set of weights apart, not to withstand malice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from perdure.format.box import Box
from perdure.format.digest import digest_bytes
from perdure.state.shards import NamedTensor

__all__ = ["digest_of_sums", "piece_sums", "total_sums"]

_CHUNK = 1 << 18
_WORD = (1 << 64) - 1
# Odd, so that no bit of an element is lost; as a signed number, since torch has no other 64-bit arithmetic.
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def piece_sums(tensors: Sequence[NamedTensor]) -> dict[str, dict[str, int]]:
    """The sum of every piece that this rank holds: tensor name -> box, in words -> sum."""
    return {t.name: {_label(p.box): _sum(p.tensor, p.box, t.shape) for p in t.pieces} for t in tensors}


def total_sums(ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, int]:
    """The sum of every tensor from the pieces of all ranks; a piece that several ranks hold counts once."""
    pieces: dict[str, dict[str, int]] = {}
    for held in ranks:
        for name, boxes in held.items():
            pieces.setdefault(name, {}).update(boxes)
    return {name: sum(boxes.values()) & _WORD for name, boxes in sorted(pieces.items())}


def digest_of_sums(sums: Mapping[str, int]) -> str:
    """One tag for named sums."""
    return digest_bytes("\n".join(f"{name} {value:016x}" for name, value in sorted(sums.items())).encode())


def _label(box: Box) -> str:
    return f"{list(box.offset)} {list(box.shape)}"


def _sum(tensor: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """Rows of a few MiB at a time, so that memory stays bounded."""
    if tensor.dim() == 0:
        return _weigh(tensor.reshape(1), torch.zeros(1, dtype=torch.int64, device=tensor.device))
    total, row = 0, max(prod(box.shape[1:]), 1)
    step = max(1, _CHUNK // row)
    for first in range(0, box.shape[0], step):
        part = tensor[first : first + step]
        at = Box((box.offset[0] + first, *box.offset[1:]), tuple(part.shape))
        total += _weigh(part.reshape(-1), _places(at, shape, tensor.device))
    return total & _WORD


@torch.no_grad()
def _weigh(values: Tensor, places: Tensor) -> int:
    if values.dtype.is_floating_point:
        wide = values if values.dtype == torch.float64 else values.float()
        bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    else:
        bits = values
    weights = (places + 1) * _STRIDE
    weights ^= weights >> 29
    return int(((weights | 1) * bits.to(torch.int64)).sum()) & _WORD


def _places(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Row-major index in the whole tensor of every element of a box."""
    places = torch.zeros(box.shape, dtype=torch.int64, device=device)
    for dim, (start, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        line = (torch.arange(extent, dtype=torch.int64, device=device) + start) * prod(shape[dim + 1 :])
        places += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return places.reshape(-1)
