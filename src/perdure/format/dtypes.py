"""One table of dtypes: safetensors name, bytes, torch name, MindSpore name; and how the rest is held as a view."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BY_MINDSPORE", "BY_SAFETENSORS", "BY_TORCH", "DType", "Held", "as_held"]


class DType(NamedTuple):
    """A dtype that safetensors holds: `bits` per element; `torch` and `mindspore` are names, not objects."""

    safetensors: str
    bits: int
    torch: str
    mindspore: str

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.bits // 8


class Held(NamedTuple):
    """How a torch dtype lies in a file: as `stored` elements, `trailing` of them per element (1: same shape)."""

    stored: str
    trailing: int
    is_view: bool


_TABLE = (
    DType("BOOL", 8, "bool", "Bool"),
    DType("U8", 8, "uint8", "UInt8"),
    DType("I8", 8, "int8", "Int8"),
    DType("F8_E5M2", 8, "float8_e5m2", "Float8E5M2"),
    DType("F8_E4M3", 8, "float8_e4m3fn", "Float8E4M3FN"),
    DType("F8_E8M0", 8, "float8_e8m0fnu", "Float8E8M0FNU"),
    DType("I16", 16, "int16", "Int16"),
    DType("U16", 16, "uint16", "UInt16"),
    DType("F16", 16, "float16", "Float16"),
    DType("BF16", 16, "bfloat16", "BFloat16"),
    DType("I32", 32, "int32", "Int32"),
    DType("U32", 32, "uint32", "UInt32"),
    DType("F32", 32, "float32", "Float32"),
    DType("I64", 64, "int64", "Int64"),
    DType("U64", 64, "uint64", "UInt64"),
    DType("F64", 64, "float64", "Float64"),
)

BY_SAFETENSORS = {d.safetensors: d for d in _TABLE}
BY_MINDSPORE = {d.mindspore: d for d in _TABLE}

# Complex numbers are held as pairs of reals; the rarer small floats as their bytes.
BY_TORCH = {d.torch: Held(d.safetensors, 1, False) for d in _TABLE} | {
    "complex32": Held("F16", 2, True),
    "complex64": Held("F32", 2, True),
    "complex128": Held("F64", 2, True),
    "float8_e4m3fnuz": Held("U8", 1, True),
    "float8_e5m2fnuz": Held("U8", 1, True),
    "float4_e2m1fn_x2": Held("U8", 1, True),
}

# What others store and we hold as a view: their name -> the torch dtype.
_FOREIGN = {
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


def as_held(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], str] | None:
    """A dtype of safetensors with a shape, as (stored dtype, shape in stored elements, logical torch dtype or "").

    Files of others may hold dtypes that ours hold as a view; the bytes are the same. None for what torch has no dtype
    for, or a shape that the dtype cannot have (an odd number of 4-bit numbers in a row).
    """
    if dtype in BY_SAFETENSORS:
        return dtype, shape, ""
    logical = _FOREIGN.get(dtype)
    if logical is None:
        return None
    how = BY_TORCH[logical]
    if dtype == "F4":
        # Two numbers to a byte; torch counts the pairs.
        return None if not shape or shape[-1] % 2 else (how.stored, (*shape[:-1], shape[-1] // 2), logical)
    return how.stored, (*shape, how.trailing) if how.trailing > 1 else shape, logical
