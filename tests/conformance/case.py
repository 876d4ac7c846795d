"""What a conformance case is: a small kernel, its arguments, and what it means in NumPy.

A ``Case`` is data.  ``make(rank, world)`` gives one rank's arguments; ``meaning(arguments of all ranks)`` says what
every rank's outputs are, in NumPy and without pk.  ``run.py`` runs a case on the simulator or on a GPU.

What is expected is an array, or a ``Within``: an array and how far a result may lie from it, element by element.  A
plain array is exact: it is rounded to the output's dtype once (by torch, not by pk) and must be met bit for bit, NaN
included.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import pk
from pk.ir import nodes as ir

Array = NDArray[Any]

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MOVED = (BF16, F16, E4M3, E5M2, F32, I32)
ADDED = (BF16, F16, F32)
WORLDS = (1, 2, 3, 4, 8)
GPU_WORLDS = (1, 2, 4, 8)

UNTOUCHED = -1163005939  # what an int32 output holds before the launch; floats hold NaN


@dataclass(frozen=True)
class Arg:
    """A tensor argument: what it holds at launch, as float32, float64 or int32 values that ``dtype`` can represent."""

    value: Array
    dtype: torch.dtype
    parallel: bool = False


@dataclass(frozen=True)
class Within:
    """An expected array and the largest error allowed, element by element.

    ``same``: simulator and GPU agree bit for bit all the same, because the order of operations is defined.
    """

    value: Array
    slack: Array
    same: bool = False


Want = Array | Within
Arguments = dict[str, Arg]
Meaning = Callable[[list[Arguments]], list[dict[str, Want]]]


@dataclass(frozen=True, eq=False)
class Case:
    """One kernel with its constants, and its problem as a function of the world size."""

    name: str
    kernel: pk.Kernel
    make: Callable[[int, int], Arguments]
    meaning: Meaning
    constants: dict[str, Any] = field(default_factory=dict)
    scalars: dict[str, int | float] = field(default_factory=dict)
    worlds: tuple[int, ...] = WORLDS
    signed: bool = True  # whether -0.0 is told from 0.0

    def __str__(self) -> str:
        return self.name

    @cached_property
    def specs(self) -> dict[str, Any]:
        """Arguments for ``kernel.specialise``: types only."""
        tensors = self.make(0, self.worlds[-1])
        return {n: pk.spec(a.dtype, a.value.ndim) for n, a in tensors.items()} | self.scalars | self.constants

    def program(self) -> Any:
        """The specialisation that the case runs."""
        return self.kernel.specialise(**self.specs)

    def ir(self) -> ir.Kernel:
        """Its IR."""
        return self.program().ir

    def arguments(self, world: int) -> list[Arguments]:
        """Every rank's arguments."""
        return _arguments(self, world)


@lru_cache(maxsize=64)
def _arguments(case: Case, world: int) -> list[Arguments]:
    """Rows that TMA stores to are whole chunks of 16 bytes, else it overwrites what is behind them, and pk refuses.

    The widths that such outputs share with their inputs are made whole together; all other tails stay.
    """
    made = [case.make(rank, world) for rank in range(world)]
    stored = case.program().stored
    ragged = {
        mine[name].value.shape[-1]
        for mine in made
        for name in stored & mine.keys()
        if mine[name].value.shape[-1] * mine[name].dtype.itemsize % 16
    }
    return [{name: _whole(arg) if arg.value.shape[-1] in ragged else arg for name, arg in m.items()} for m in made]


def _whole(arg: Arg) -> Arg:
    """The last dimension lengthened to a multiple of 16 elements, with what it begins with."""
    extra = -arg.value.shape[-1] % 16
    width = [(0, 0)] * (arg.value.ndim - 1) + [(0, extra)]
    return Arg(np.pad(arg.value, width, mode="wrap"), arg.dtype, arg.parallel)


# ------------------------------------------------------------------------------------------------------- numbers
def short(dtype: torch.dtype) -> str:
    """``bfloat16``, ``float8_e4m3``, ..."""
    return str(dtype).removeprefix("torch.").replace("e4m3fn", "e4m3")


def limits(dtype: torch.dtype) -> float:
    """The largest finite value."""
    return float(torch.finfo(dtype).max)


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """``x`` rounded to ``dtype`` by torch, as float32 or int32 values.  8-bit floats saturate, as in pk."""
    if dtype == I32:
        return np.asarray(x).astype(np.int32)
    t = torch.from_numpy(np.ascontiguousarray(np.asarray(x, np.float32)))
    if dtype in (E4M3, E5M2):
        t = t.clamp(-limits(dtype), limits(dtype))  # NaN stays NaN
    value: Array = t.to(dtype).to(torch.float32).numpy()
    return value


def generator(*key: object) -> np.random.Generator:
    """A generator that depends on ``key`` and nothing else, the same in every process."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def integers(shape: tuple[int, ...], low: int, high: int, *key: object) -> Array:
    """Whole numbers low..high: sums and products of a few of them are exact in every dtype."""
    return generator("integers", *key).integers(low, high + 1, shape).astype(np.float32)


def normals(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> Array:
    """Normal numbers that ``dtype`` can represent (int32: whole numbers of any size)."""
    gen = generator("normals", *key)
    if dtype == I32:
        return gen.integers(-(2**31), 2**31, shape).astype(np.int32)
    return rounded(gen.standard_normal(shape), dtype)


def untouched(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """What an output holds before the launch, so that what a kernel left alone can be told."""
    return np.full(shape, UNTOUCHED if dtype == I32 else np.nan, np.int32 if dtype == I32 else np.float32)


def blank(shape: tuple[int, ...], dtype: torch.dtype, parallel: bool = False) -> Arg:
    """An output."""
    return Arg(untouched(shape, dtype), dtype, parallel)


# --------------------------------------------------------------------------------------------------- comparison
def bits(t: torch.Tensor) -> Array:
    """The storage of ``t`` as integers; all NaNs alike."""
    if t.dtype == I32:
        return t.numpy()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
    plain: Array = t.contiguous().view(width).numpy()
    return np.where(t.to(torch.float32).isnan().numpy(), 0x7F, plain)


def exact(want: Want) -> bool:
    """Whether ``want`` is to be met bit for bit."""
    return not isinstance(want, Within)


def complain(got: torch.Tensor, want: Want, signed: bool = True) -> str:
    """What is wrong with ``got``, in a line; empty if nothing is."""
    if isinstance(want, Within):
        return _outside(got, want.value, want.slack)
    value = torch.from_numpy(np.ascontiguousarray(rounded(want, got.dtype)))
    if tuple(value.shape) != tuple(got.shape):
        raise AssertionError(f"the meaning has shape {tuple(value.shape)}, the tensor {tuple(got.shape)}")
    return _told(got, value.numpy(), _differ(got, value.to(got.dtype), signed), "what is wanted, bit for bit")


def disagree(got: torch.Tensor, other: torch.Tensor, want: Want, signed: bool = True) -> str:
    """How ``got`` (the GPU's) differs from ``other`` (the simulator's), more than ``want`` allows; empty if not."""
    values = other.to(torch.float64).numpy()
    if isinstance(want, Within) and not want.same:
        return _outside(got, values, 2 * want.slack)
    return _told(got, values, _differ(got, other, signed), "the simulator's, bit for bit")


def _differ(x: torch.Tensor, y: torch.Tensor, signed: bool) -> Array:
    both_zero = (x.to(torch.float32) == 0) & (y.to(torch.float32) == 0)
    return (bits(x) != bits(y)) & (~both_zero.numpy() | signed)


def _outside(got: torch.Tensor, value: Array, slack: Array) -> str:
    x = got.to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        near = (np.abs(x - value) <= slack) | (x == value) | (np.isnan(x) & np.isnan(value))
    return _told(got, value, ~near, "what is wanted by more than its bound")


def _told(got: torch.Tensor, want: Array, different: Array, what: str) -> str:
    if not different.any():
        return ""
    where = tuple(int(i) for i in np.argwhere(different)[0])
    return (
        f"{int(different.sum())} of {different.size} elements differ from {what}; the first at {where}: "
        f"got {got[where].item()!r}, wanted {want[where].item()!r}"
    )
