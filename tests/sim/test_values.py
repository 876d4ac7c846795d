"""Rounding and decoding, bit by bit, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pk.ir import types as ir
from pk.sim.values import STORAGE, Array, decode, encode, poisoned, rounded, tensor_float32

TORCH = {
    ir.bfloat16: torch.bfloat16,
    ir.float16: torch.float16,
    ir.float8_e4m3: torch.float8_e4m3fn,
    ir.float8_e5m2: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16}
NARROW = pytest.mark.parametrize("dtype", TORCH, ids=str)
FP8 = pytest.mark.parametrize("dtype", [ir.float8_e4m3, ir.float8_e5m2], ids=str)


def torch_decode(raw: Array, dtype: ir.DType) -> Array:
    bits = torch.from_numpy(raw.view(np.int16) if dtype.itemsize == 2 else raw)
    return bits.view(TORCH[dtype]).float().numpy()


def torch_encode(x: Array, dtype: ir.DType) -> Array:
    bits = torch.from_numpy(x).to(TORCH[dtype]).view(BITS[dtype.itemsize])
    return bits.numpy().view(STORAGE[dtype])


def every_pattern(dtype: ir.DType) -> Array:
    return np.arange(1 << dtype.bits).astype(STORAGE[dtype])


@NARROW
def test_decode_every_pattern(dtype: ir.DType) -> None:
    raw = every_pattern(dtype)
    got, want = decode(raw, dtype), torch_decode(raw, dtype)
    finite = ~np.isnan(want)
    assert np.array_equal(np.isnan(got), ~finite)
    assert np.array_equal(got[finite].view(np.uint32), want[finite].view(np.uint32))  # zeros keep their sign


@NARROW
def test_every_value_survives(dtype: ir.DType) -> None:
    raw = every_pattern(dtype)
    x = decode(raw, dtype)
    keep = np.isfinite(x) if dtype.itemsize == 1 else ~np.isnan(x)
    assert np.array_equal(encode(x, dtype)[keep], raw[keep])
    assert np.isnan(decode(encode(x[np.isnan(x)], dtype), dtype)).all()


@NARROW
def test_encode_rounds_as_torch_does(dtype: ir.DType) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    near = (rng.standard_normal(1 << 16) * 2.0 ** rng.integers(-20, 18, 1 << 16)).astype(np.float32)
    x = np.concatenate([bits, near])
    x = x[~np.isnan(x)]
    if dtype.itemsize == 1:  # torch overflows to NaN or infinity where the device saturates
        x = x[np.abs(x) <= np.nanmax(np.where(np.isinf(t := decode(every_pattern(dtype), dtype)), np.nan, t))]
    assert np.array_equal(encode(x, dtype), torch_encode(x, dtype))


@NARROW
def test_ties_go_to_even(dtype: ir.DType) -> None:
    positive = decode(every_pattern(dtype)[: 1 << (dtype.bits - 1)], dtype)
    finite = positive[np.isfinite(positive)].astype(np.float64)
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)  # exact in float32, but for the subnormals of bfloat16
    exact = middle.astype(np.float64) * 2 == finite[:-1] + finite[1:]
    middle = middle[exact]
    assert len(middle) > len(finite) * 0.9
    assert not (encode(middle, dtype) & 1).any()
    assert np.array_equal(encode(middle, dtype), torch_encode(middle, dtype))


@FP8
def test_float8_saturates(dtype: ir.DType) -> None:
    largest = {ir.float8_e4m3: 448.0, ir.float8_e5m2: 57344.0}[dtype]
    x = np.array([largest * 1.04, 1e30, np.inf, -1e30, -np.inf], np.float32)
    assert decode(encode(x, dtype), dtype).tolist() == [largest, largest, largest, -largest, -largest]


def test_sixteen_bits_overflow_to_infinity() -> None:
    x = np.array([65520.0, -1e6, 3.4e38], np.float32)
    assert decode(encode(x, ir.float16), ir.float16).tolist() == [np.inf, -np.inf, np.inf]
    assert np.isinf(decode(encode(np.array([3.4e38], np.float32), ir.bfloat16), ir.bfloat16)).all()


@pytest.mark.parametrize("dtype", [d for d in STORAGE if d.kind == "float"], ids=str)
def test_poison_is_nan(dtype: ir.DType) -> None:
    assert np.isnan(decode(poisoned((2, 3), dtype), dtype)).all()


def test_rounded_and_views() -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    for view in (x, x.T, x[::2, 1:]):
        assert np.array_equal(rounded(view, ir.bfloat16), torch.from_numpy(view.copy()).bfloat16().float().numpy())
    assert rounded(np.array([1.9, -1.9]), ir.int32).tolist() == [1, -1]
    assert rounded(x, ir.float32) is x


def test_tf32_drops_thirteen_bits() -> None:
    x = np.array([1 + 2.0**-10, 1 + 2.0**-11, -(1 + 2.0**-10 + 2.0**-12)], np.float32)
    assert tensor_float32(x).tolist() == [1 + 2.0**-10, 1.0, -(1 + 2.0**-10)]
