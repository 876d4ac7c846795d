"""The part of the language that computes on register tiles; :mod:`pk.dsl.language` exports all of it.

A register tile has the shape (R, C), (R, 1) or (1, C) and the type float32 or int32 (bool for conditions, narrow floats
after ``pk.cast``).  It lives in the registers of a consumer, or of the team of a class without role blocks.  In
arithmetic an extent of 1 stands for any: (R, 1) and (1, C) meet (R, C).  Every operation rounds once, and no two are
fused: ``x * y + z`` rounds twice on every device, ``pk.fma(x, y, z)`` once.
"""

from __future__ import annotations

from typing import Any

from pk.dsl.types import outside as _outside
from pk.ir.types import float32

inf = float("inf")

__all__ = [
    "abs", "cast", "exp", "exp2", "fma", "full", "gelu", "inf", "iota", "load", "log", "log2", "max", "min", "rsqrt",
    "sigmoid", "silu", "sqrt", "store", "sum", "tanh", "where", "zeros",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- making
def zeros(shape: tuple[int, ...], dtype: Any = float32) -> Any:
    """A register tile of zeros."""
    _outside("zeros")


def full(shape: tuple[int, ...], value: Any, dtype: Any = float32) -> Any:
    """A register tile of one value, a number that is known when the kernel is compiled.

    ``full((R,), value, pk.int32)`` is an index vector, in any role and in shared code.
    """
    _outside("full")


def iota(shape: tuple[int, ...]) -> Any:
    """0, 1, 2, ... along a vector of shape (R, 1) or (1, C), int32; (R,) makes an index vector.

    Masks are made of it: ``pk.where(n * 64 + pk.iota((1, 64)) < x.cols, tile, -pk.inf)``.
    """
    _outside("iota")


def cast(r: Any, dtype: Any) -> Any:
    """The same values in another dtype: to nearest even; 8-bit floats saturate; floats to int32 by truncation."""
    _outside("cast")


# ------------------------------------------------------------------------------------------- element by element
def where(cond: Any, x: Any, y: Any) -> Any:
    """``x`` where the tile of comparisons ``cond`` holds, else ``y``; both are tiles or scalars and are computed.

    Conditions are made with ``< <= > >= == !=`` and joined with ``& | ~``.
    """
    _outside("where")


def fma(x: Any, y: Any, z: Any) -> Any:
    """``x * y + z`` in float32, rounded once."""
    _outside("fma")


def abs(x: Any) -> Any:
    """The absolute value, float32 or int32; Python's ``abs`` is the same."""
    _outside("abs")


def exp2(x: Any) -> Any:
    """2 ** x of a tile or scalar in float32, within 2 ulp; results below 2 ** -126 are 0."""
    _outside("exp2")


def exp(x: Any) -> Any:
    """e ** x of a tile or scalar in float32, within 2 ulp.  ``exp2`` is faster."""
    _outside("exp")


def log2(x: Any) -> Any:
    """The logarithm to base 2 of a tile or scalar in float32, within 2 ulp; of 0 it is -inf."""
    _outside("log2")


def log(x: Any) -> Any:
    """The natural logarithm of a tile or scalar in float32, within 2 ulp; of 0 it is -inf."""
    _outside("log")


def sqrt(x: Any) -> Any:
    """The square root of a tile or scalar in float32, rounded to nearest."""
    _outside("sqrt")


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x) of a tile or scalar in float32, within 2 ulp."""
    _outside("rsqrt")


def tanh(x: Any) -> Any:
    """The hyperbolic tangent of a tile or scalar in float32, within 2 ulp."""
    _outside("tanh")


def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x) of a tile or scalar in float32, within 4 ulp."""
    _outside("sigmoid")


def silu(x: Any) -> Any:
    """x * sigmoid(x) = x / (1 + e ** -x) of a tile or scalar in float32, within 4 ulp."""
    _outside("silu")


def gelu(x: Any, approximate: str = "none") -> Any:
    """x * Phi(x) of a tile or scalar in float32, Phi the normal distribution function.

    ``"none"``: 0.5 x (1 + erf(x / sqrt 2)); ``"tanh"``: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))).  Within
    1e-6 (1 + abs(x)) of the formula.
    """
    _outside("gelu")


# --------------------------------------------------------------------------------------------------- reductions
def sum(r: Any, axis: int) -> Any:
    """The sum of a register tile along ``axis``, which stays: axis 1 makes (R, 1) of (R, C), axis 0 makes (1, C).

    float32 (or int32); the order is fixed by shape and role and the same on every device.  What is summed needs no
    registers: ``pk.sum(pk.where(j < i, x, 0), axis=1)`` with i (R, 1) and j (1, C) makes no (R, C) tile.
    """
    _outside("sum")


def min(*values: Any, axis: int | None = None) -> Any:
    """The least of scalars, or of register tiles element by element; with ``axis=`` along an axis of one tile.

    NaN if an element is NaN.
    """
    _outside("min")


def max(*values: Any, axis: int | None = None) -> Any:
    """The greatest of scalars, or of register tiles element by element; with ``axis=`` along an axis of one tile.

    NaN if an element is NaN.
    """
    _outside("max")


# --------------------------------------------------------------------------------------- registers and memory
def load(t: Any, coord: Any = None, shape: Any = None, other: Any = 0) -> Any:
    """To registers; 16-bit and 8-bit floats widen to float32.

    ``load(t)``: a shared tile, in a consumer; ``t.T`` is read transposed.

    ``load(x, coord, shape)``: the tile of ``shape`` at ``coord`` of a tensor, ``other`` outside it, in a consumer or in
    a class without role blocks.  As everywhere the trailing entries of a coordinate count tiles and those of ``pk.at``
    elements.  Sixteen bytes a lane where the window lies inside the tensor and is aligned, else element by element.

    ``load(x, coord)``: one element, a scalar, in any role and in shared code; 0 outside.

    ``load(x, coord, (R,))`` of an int32 tensor: an index vector, R (at most 128) elements in a row, ``other`` outside
    it, in any role and in shared code.  ``load(x, coord)`` with index vectors in ``coord``: one element a lane.

    ``x`` may be a peer's copy ``c[r]``.  A load sees what this role stored before, and what another block or rank
    stored before a signal that this role has waited for; it promises nothing about other writes.
    """
    _outside("load")


def store(t: Any, r: Any, coord: Any = None, rows: Any = None, rank: Any = None) -> None:
    """Registers to memory, rounded to its dtype.

    ``store(t, r)``: to a shared tile, in a consumer, in ``fill``; ``t.T`` stores transposed.

    ``store(x, r, coord, rows=n)``: a register tile to the window at ``coord`` of a tensor, of one rank or (a whole
    ``Parallel``) of all, in a consumer or in a class without role blocks; outside the tensor it is dropped, and so are
    the rows of the tile from ``n`` on.

    ``store(x, scalar, coord)``: one element; also in a storer.

    ``store(x, value, coord, rank=)`` with index vectors for ``value``, in ``coord`` or as ``rank``: one element of an
    int32 tensor a lane; outside the tensor (a negative coordinate) it is dropped; also in a storer.  ``rank=`` says
    whose copy of a whole ``Parallel`` or scratch.
    """
    _outside("store")
