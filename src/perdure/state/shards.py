"""A live tensor as named, boxed pieces of memory: what this rank holds of a tensor, and how it lies in a file."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from perdure.errors import UnsupportedStateError
from perdure.format.box import Box, whole
from perdure.format.dtypes import BY_SAFETENSORS, BY_TORCH
from perdure.format.metadata import Section, TensorRecord

__all__ = ["NamedTensor", "Piece", "blank", "describe", "dtype_name", "held", "is_plain", "local_pieces"]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor and the memory that holds it; `tensor.shape == box.shape`, any stride, any device."""

    box: Box
    tensor: Tensor


class NamedTensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor as this rank sees it.

    `dtype` is the stored dtype (safetensors' name), `logical` the torch dtype it is a view of or "",
    `shape` the global shape in stored elements, `pieces` what this rank holds (maybe nothing).
    """

    section: Section
    name: str
    dtype: str
    logical: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    aliases: tuple[str, ...] = ()


_AS_IS: dict[torch.dtype, str] = {
    getattr(torch, name): how.stored for name, how in BY_TORCH.items() if not how.is_view and hasattr(torch, name)
}
_whole = lru_cache(maxsize=4096)(whole)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def blank(record: TensorRecord, device: torch.device | str = "cpu") -> Tensor:
    """Zeros with the shape and dtype of a stored tensor, to be filled."""
    how = BY_TORCH[record.logical] if record.logical else None
    shape = record.shape[:-1] if how is not None and how.trailing == 2 else record.shape
    dtype: torch.dtype = getattr(torch, record.logical or BY_SAFETENSORS[record.dtype].torch)
    return torch.zeros(shape, dtype=dtype, device=device)


def held(tensor: Tensor) -> Tensor:
    """The tensor as elements of its stored dtype, sharing memory wherever that is possible."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    how = BY_TORCH[dtype_name(plain.dtype)]
    if how.trailing == 2:
        return torch.view_as_real(plain)
    return plain.view(torch.uint8) if how.is_view else plain


def describe(
    section: Section, name: str, tensor: Tensor, aliases: tuple[str, ...] = (), *, values: bool = True
) -> NamedTensor:
    """A live tensor (plain or DTensor) as a `NamedTensor`.

    Args:
        values: whether values matter; False lets one of the meta device pass, which has a layout only.

    Raises:
        UnsupportedStateError: its kind cannot be held in a checkpoint; the name is given.
    """
    if (dtype := _ordinary(name, tensor)) is not None:
        box = _whole(tensor.shape)
        plain = tensor.detach() if tensor.requires_grad else tensor
        return NamedTensor(section, name, dtype, "", box.shape, (Piece(box, plain),), aliases)
    _refuse(section, name, tensor, values)
    shape, pieces = local_pieces(tensor)
    how = BY_TORCH[dtype_name(tensor.dtype)]
    tail = (2,) if how.trailing == 2 else ()
    stored = tuple(Piece(Box(p.box.offset + (0,) * len(tail), p.box.shape + tail), held(p.tensor)) for p in pieces)
    logical = dtype_name(tensor.dtype) if how.is_view else ""
    return NamedTensor(section, name, how.stored, logical, shape + tail, stored, aliases)


def _ordinary(name: str, tensor: Tensor) -> str | None:
    """The stored dtype of a tensor that nothing is peculiar about, as almost all are: seen several times sooner."""
    plain = type(tensor) in (Parameter, Tensor) and tensor.layout is torch.strided and not tensor.is_nested
    if plain and name.isascii() and not (tensor.is_meta or tensor.is_conj() or tensor.is_neg()):
        return _AS_IS.get(tensor.dtype)
    return None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one run of strided memory of its own: not sharded, lazy, sparse, nested or a subclass's."""
    usual = type(tensor) in (Parameter, Tensor) or (
        not is_lazy(tensor) and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
    return usual and tensor.layout is torch.strided and not tensor.is_nested


def _refuse(section: Section, name: str, tensor: Tensor, values: bool) -> None:
    why, hint = None, "convert it to an ordinary dense tensor before saving, or leave it out of the state"
    if is_lazy(tensor):
        why = "it is not initialised yet (a lazy module that has seen no input)"
        hint = "call the model once on an example before saving or loading"
    elif tensor.is_nested:
        why = "it is a nested tensor"
    elif tensor.layout is not torch.strided:
        why = f"its layout is {layout_name(tensor)}"
    elif tensor.is_quantized:
        why = "it is quantized"
    elif values and tensor.device.type == "meta":
        why = "it is on the meta device, without values"
        hint = "give the model memory before saving or loading: model.to_empty(device='cpu')"
    elif dtype_name(tensor.dtype) not in BY_TORCH:
        why = f"its dtype is {dtype_name(tensor.dtype)}, which safetensors cannot hold"
    elif hasattr(tensor, "placements"):
        if any(placement.is_partial() for placement in tensor.placements):
            why = "it has a pending reduction (Partial placement)"
    elif not is_plain(tensor):
        why = f"it is of the tensor class {type(tensor).__qualname__}, which keeps its values in its own way"
    elif section != "extra" and (tensor.is_conj() or tensor.is_neg()):
        why = "it is a lazily conjugated or negated view, which cannot be filled in place"
    if why is None and not _encodable(name):
        why = "its name is not valid Unicode"
    if why is not None:
        raise UnsupportedStateError(f"{section}: {name[:300]!r} cannot be held in a checkpoint: {why}", hint=hint)


def layout_name(tensor: Tensor) -> str:
    """`sparse_coo` for `torch.sparse_coo`."""
    return str(tensor.layout).removeprefix("torch.")


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def local_pieces(tensor: Tensor) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Global shape, and what this rank holds of a tensor.

    The boxes of a DTensor are computed here: torch's own offsets are wrong for some uneven cuts of
    one dimension by two mesh axes.
    """
    if not hasattr(tensor, "placements"):
        return tuple(tensor.shape), (Piece(whole(tensor.shape), tensor.detach()),)
    return _dtensor_pieces(tensor)


def _dtensor_pieces(tensor: Any) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    shape = tuple(tensor.shape)
    local = tensor.to_local().detach()
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return shape, ()
    offset, size = [0] * len(shape), list(shape)
    # A strided shard is a cut made within what the later mesh axes have cut already.
    order = [a for a, p in enumerate(tensor.placements) if not _is_strided(p)]
    order += [a for a, p in enumerate(tensor.placements) if _is_strided(p)]
    for axis in order:
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim, count, index = placement.dim, tensor.device_mesh.size(axis), coordinate[axis]
        chunk = -(-size[dim] // count)
        begin = min(index * chunk, size[dim])
        offset[dim] += begin
        size[dim] = min(chunk, size[dim] - begin)
    if tuple(local.shape) != tuple(size):
        raise UnsupportedStateError(
            f"a sharded tensor of shape {list(shape)} with placements {tensor.placements} holds {list(local.shape)} "
            f"here, where {size} was expected"
        )
    box = Box(tuple(offset), tuple(size))
    return shape, (Piece(box, local),) if box.numel else ()


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"
