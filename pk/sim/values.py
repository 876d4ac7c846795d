"""Numbers as the device stores them: raw bits to float32 and back, rounding to nearest even.

Memory and shared tiles hold *storage*: uint16 for bfloat16 and float16, uint8 for the 8-bit floats, float32 and int32
as they are.  Arithmetic is done on *values*: float32, int32 or bool arrays.  A register tile of a narrow dtype is a
float32 array whose entries that dtype can represent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pk.ir import types as ir

Array = NDArray[Any]

STORAGE: dict[ir.DType, np.dtype[Any]] = {
    ir.bfloat16: np.dtype(np.uint16),
    ir.float16: np.dtype(np.uint16),
    ir.float8_e4m3: np.dtype(np.uint8),
    ir.float8_e5m2: np.dtype(np.uint8),
    ir.float32: np.dtype(np.float32),
    ir.int32: np.dtype(np.int32),
    ir.boolean: np.dtype(np.bool_),
}

# What memory holds that nothing has written: a NaN of every float type, and an integer that no index survives.
POISON: dict[ir.DType, Any] = {
    ir.bfloat16: 0xFFFF,
    ir.float16: 0xFFFF,
    ir.float8_e4m3: 0xFF,
    ir.float8_e5m2: 0xFF,
    ir.float32: np.uint32(0xFFFFFFFF).view(np.float32),  # a NaN that no arithmetic makes
    ir.int32: -0x21524111,
    ir.boolean: True,
}


def poisoned(shape: tuple[int, ...], dtype: ir.DType) -> Array:
    """Storage of ``shape`` that nothing has written yet."""
    return np.full(shape, POISON[dtype], STORAGE[dtype])


def decode(raw: Array, dtype: ir.DType) -> Array:
    """Storage -> values; exact.  Keeps shape and layout; may share memory with ``raw``."""
    if dtype == ir.bfloat16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == ir.float16:
        return raw.view(np.float16).astype(np.float32)
    if dtype in (ir.float8_e4m3, ir.float8_e5m2):
        return _table(dtype)[raw]
    return raw


def encode(x: Array, dtype: ir.DType) -> Array:
    """Values -> storage, to nearest, ties to even.

    16-bit types overflow to infinity; the 8-bit types saturate at their largest finite value, infinities
    too (``cvt.rn.satfinite``).  NaN stays NaN.  Floats become int32 by truncation.
    """
    if dtype == ir.bfloat16:
        return _encode_bfloat16(np.asarray(x, np.float32))
    if dtype == ir.float16:
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float32).astype(np.float16).view(np.uint16)
    if dtype in (ir.float8_e4m3, ir.float8_e5m2):
        return _encode_float8(np.asarray(x, np.float32), dtype)
    return np.asarray(x).astype(STORAGE[dtype], copy=False)


def rounded(x: Array, dtype: ir.DType) -> Array:
    """The values of a register tile of ``dtype`` nearest to ``x``."""
    if dtype.kind == "float" and dtype.bits < 32:
        return decode(encode(x, dtype), dtype)
    return np.asarray(x).astype(STORAGE[dtype], copy=False)


def tensor_float32(x: Array) -> Array:
    """What the tensor core sees of a float32: the low 13 mantissa bits are ignored (tf32)."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def single(x: float) -> float:
    """A float scalar of a kernel: float32 on the device."""
    return float(np.float32(x))


def _encode_bfloat16(x: Array) -> Array:
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    out = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)  # the one NaN that cvt.rn.bf16.f32 makes


@cache
def _table(dtype: ir.DType) -> Array:
    """The value of each of the 256 patterns."""
    mantissa_bits, bias = (3, 7) if dtype == ir.float8_e4m3 else (2, 15)
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    exponent = (code & 0x7F) >> mantissa_bits
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    subnormal = fraction * 2.0 ** (1 - bias)
    value = sign * np.where(exponent == 0, subnormal, normal)
    if dtype == ir.float8_e4m3:  # no infinities, one NaN
        value[(code & 0x7F) == 0x7F] = np.nan
    else:
        special = exponent == 31
        value[special] = np.where(fraction[special] == 0, sign[special] * np.inf, np.nan)
    return value.astype(np.float32)


@cache
def _midpoints(dtype: ir.DType) -> Array:
    """Halfway between neighbouring finite magnitudes; entry i lies between patterns i and i + 1.  Exact in float32."""
    magnitudes = _table(dtype)[:128]
    finite = magnitudes[np.isfinite(magnitudes)]
    return (finite[:-1] + finite[1:]) / np.float32(2)


def _encode_float8(x: Array, dtype: ir.DType) -> Array:
    middle = _midpoints(dtype)
    magnitude = np.abs(x)
    code = np.searchsorted(middle, magnitude)  # patterns grow with the magnitude; above the last midpoint: saturated
    tie = magnitude == middle[np.minimum(code, len(middle) - 1)]
    code += tie & (code & 1 == 1)
    out = np.where(np.isnan(x), np.uint8(0x7F), code.astype(np.uint8))
    return out | (np.signbit(x).astype(np.uint8) << np.uint8(7))


def least(x: Any, y: Any) -> Array:
    """The smaller of two, element by element; NaN if either is, and -0 is less than +0, as PTX ``min`` has it."""
    return _zeros(np.minimum(x, y), x, y, np.logical_or)


def greatest(x: Any, y: Any) -> Array:
    """The larger of two, element by element; NaN if either is, and +0 is more than -0 (PTX ``max``)."""
    return _zeros(np.maximum(x, y), x, y, np.logical_and)


def _zeros(found: Array, x: Any, y: Any, negative: Any) -> Array:
    zero = (found == 0) & (np.asarray(x) == y)
    if found.dtype.kind != "f" or not zero.any():
        return found
    signed = np.where(negative(np.signbit(x), np.signbit(y)), found.dtype.type(-0.0), found.dtype.type(0.0))
    return np.where(zero, signed, found)
