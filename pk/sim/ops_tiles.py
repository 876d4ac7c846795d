"""Meaning of arithmetic on register tiles beyond the operators, of reductions, and of moves from and to tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from pk.ir.layout import LANES, Layout
from pk.ir.types import Tile
from pk.sim.direct import put, see
from pk.sim.divisions import note
from pk.sim.machine import Role, Site, Wait, Window
from pk.sim.memory import clip, fit
from pk.sim.values import Array, decode, encode

Loading = Generator[Wait, None, Any]
_TINY = np.float32(2.0**-126)
_erf: Any = np.frompyfunc(__import__("math").erf, 1, 1)


# ----------------------------------------------------------------------------------------- element by element
def iota(role: Role, site: Site) -> Array:
    """0, 1, ... along the vector."""
    shape = site.tile.shape
    return np.arange(max(shape), dtype=np.int32).reshape(shape)


def where(role: Role, site: Site, cond: Array, x: Any, y: Any) -> Array:
    """``x`` where ``cond`` holds, else ``y``."""
    kind = np.float32 if site.tile.dtype.kind == "float" else np.int32
    return np.where(cond, np.asarray(x).astype(kind), np.asarray(y).astype(kind))


def fma(role: Role, site: Site, x: Any, y: Any, z: Any) -> Array:
    """``x * y + z``, rounded once (by way of float64, in which the product is exact)."""
    a, b, c = (np.asarray(v, np.float32).astype(np.float64) for v in (x, y, z))
    return (a * b + c).astype(np.float32)


def _function(of: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function of float32, computed in float64 and rounded once; the device is within what pk.<op> states."""

    def meaning(role: Role, site: Site, x: Any) -> Any:
        """The function of a scalar, or of each element of a tile."""
        values = np.asarray(x, np.float32)
        result = np.asarray(of(values.astype(np.float64))).astype(np.float32)
        return result if isinstance(site.type, Tile) else float(result)

    return meaning


def _exp2(x: Any) -> Any:
    y = np.exp2(x)
    return np.where(y < _TINY, 0.0, y)  # NaN stays


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def gelu(role: Role, site: Site, x: Any) -> Any:
    """x * Phi(x), exact or by tanh."""

    def exact(v: Any) -> Any:
        return 0.5 * v * (1.0 + np.asarray(_erf(v / np.sqrt(2.0)), np.float64))

    def by_tanh(v: Any) -> Any:
        return 0.5 * v * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (v + 0.044715 * v**3)))

    return _function(exact if site.attr("approximate") == "none" else by_tanh)(role, site, x)


# --------------------------------------------------------------------------------------------------- reductions
def total(role: Role, site: Site, x: Array) -> Array:
    """The sum along an axis, in the order that the role's layout fixes (``ordered_sum``)."""
    return ordered_sum(x, site.attr("axis"), site.attr("layout"))


def greatest(role: Role, site: Site, x: Array) -> Array:
    """The greatest along an axis; NaN if there is one."""
    return np.asarray(np.max(x, axis=site.attr("axis"), keepdims=True))


def least(role: Role, site: Site, x: Array) -> Array:
    """The least along an axis; NaN if there is one."""
    return np.asarray(np.min(x, axis=site.attr("axis"), keepdims=True))


def ordered_sum(x: Array, axis: int, layout: Layout) -> Array:
    """The sum of ``x`` along ``axis`` as the threads of ``layout`` make it.

    Each thread adds its elements in order, from 0; then lanes add in pairs (butterfly: distance 16, 8, ..., or 2, 1
    between the four lanes of a fragment's row, 16, 8, 4 between those of its column); then the partial sums of warps
    are added in the order of the warps, from that of the first.
    """
    if layout.kind == "fragment":
        return _fragment_rows(x) if axis == 1 else _fragment_cols(x, layout)
    return _linear_rows(x, layout) if axis == 1 else _linear_cols(x, layout)


def _in_turn(x: Array, start: bool) -> Array:
    """Sum over axis 0, one after the other, from 0 or from the first."""
    result = np.zeros_like(x[0]) if start else x[0].copy()
    for part in x if start else x[1:]:
        result = result + part
    return np.asarray(result)


def _butterfly(x: Array, axis: int) -> Array:
    """Sum over lanes: halves are added to each other until one is left."""
    while x.shape[axis] > 1:
        low, high = np.split(x, 2, axis)
        x = low + high
    return np.take(x, 0, axis)


def _linear_rows(x: Array, layout: Layout) -> Array:
    rows, cols = x.shape
    if cols == 1:
        return np.asarray(np.zeros_like(x) + x)
    v = layout.vector(cols)
    chunks = -(-cols // (v * layout.lanes))
    padded = np.zeros((rows, chunks * layout.lanes * v), x.dtype)
    padded[:, :cols] = x
    dealt = padded.reshape(rows, chunks, layout.share, LANES, v).transpose(1, 4, 0, 2, 3)
    lanes = _in_turn(dealt.reshape(chunks * v, rows, layout.share, LANES), start=True)
    return _in_turn(_butterfly(lanes, 2).T, start=False).reshape(rows, 1)


def _linear_cols(x: Array, layout: Layout) -> Array:
    rows, cols = x.shape
    if rows == 1:
        return np.asarray(np.zeros_like(x) + x)
    slots = layout.row_slots(rows)
    padded = np.zeros((slots * layout.groups, cols), x.dtype)
    padded[:rows] = x
    threads = _in_turn(padded.reshape(slots, layout.groups, cols), start=True)
    return _in_turn(threads, start=False).reshape(1, cols)


def _fragment_rows(x: Array) -> Array:
    rows, cols = x.shape
    if cols == 1:
        return np.asarray(np.zeros_like(x) + x)
    dealt = x.reshape(rows, cols // 8, 4, 2).transpose(1, 3, 0, 2).reshape(cols // 4, rows, 4)
    return _butterfly(_in_turn(dealt, start=True), 1).reshape(rows, 1)


def _fragment_cols(x: Array, layout: Layout) -> Array:
    rows, cols = x.shape
    if rows == 1:
        return np.asarray(np.zeros_like(x) + x)
    groups = layout.warps // 4
    slabs = rows // (64 * groups)
    dealt = x.reshape(groups, slabs, 4, 2, 8, cols).transpose(1, 3, 0, 2, 4, 5)  # slab, half; group, warp, lane, column
    lanes = _in_turn(dealt.reshape(2 * slabs, layout.warps, 8, cols), start=True)
    return _in_turn(_butterfly(lanes, 1), start=False).reshape(1, cols)


# ------------------------------------------------------------------------------------------ registers <-> tensors
def load_global(role: Role, site: Site, source: Window, other: int | float) -> Loading:
    """The values of the window: narrow floats as float32, ``other`` outside the tensor."""
    shape = site.tile.shape
    buffer = yield from _source(role, site, source, shape, other)
    raw = role.launch.memory.access(role.who, role.ident, "read", buffer, site.span, source.coord, shape)
    values = decode(raw, buffer.dtype).copy()
    note(role, site, (buffer.array.shape, source.coord, shape))
    if other != 0:
        extents = fit(shape, buffer.array.ndim)
        inside, part = clip(buffer.array.shape, source.coord, extents)
        outside = np.ones(extents, bool)
        if inside is not None:
            outside[part if part is not None else ...] = False
        values[outside.reshape(shape)] = other
    return values


def load_scalar(role: Role, site: Site, source: Window) -> Loading:
    """One element; 0 outside the tensor."""
    buffer = yield from _source(role, site, source, (), 0)
    raw = role.launch.memory.access(role.who, role.ident, "read", buffer, site.span, source.coord, ())
    return decode(raw, buffer.dtype).item()


def _source(role: Role, site: Site, source: Window, shape: tuple[int, ...], other: int | float) -> Loading:
    if role.launch.checker is not None:
        role.launch.checker.loading(role, site, source, shape, other)
    yield from role.reach(site, source)
    see(role, source.tensor)
    return role.launch.buffer(source.ranks[0], source.tensor)


def store_global(role: Role, site: Site, target: Window, values: Array, rows: int) -> Loading:
    """``target := values``, rounded to the tensor's dtype, but for rows from ``rows`` on and what lies outside."""
    kept = min(max(rows, 0), values.shape[0])
    if kept:
        yield from _store(role, site, target, values[:kept])


def store_scalar(role: Role, site: Site, target: Window, value: int | float) -> Loading:
    """The element := ``value``, rounded to the tensor's dtype."""
    yield from _store(role, site, target, np.asarray(value))


def _store(role: Role, site: Site, target: Window, values: Array) -> Loading:
    yield from role.reach(site, target, written=True)
    see(role, target.tensor)  # stores of one role to one place land in order
    dtype = role.launch.buffer(role.rank, target.tensor).dtype
    put(role, site, target, encode(values, dtype), values.shape)


MEANING: dict[str, Callable[..., Any]] = {
    "iota": iota,
    "where": where,
    "fma": fma,
    "exp2": _function(_exp2),
    "exp": _function(np.exp),
    "log2": _function(np.log2),
    "log": _function(np.log),
    "sqrt": _function(np.sqrt),
    "rsqrt": _function(lambda x: 1.0 / np.sqrt(x)),
    "tanh": _function(np.tanh),
    "sigmoid": _function(_sigmoid),
    "silu": _function(lambda x: x * _sigmoid(x)),
    "gelu": gelu,
    "sum": total,
    "max": greatest,
    "min": least,
    "load_global": load_global,
    "load_scalar": load_scalar,
    "store_global": store_global,
    "store_scalar": store_scalar,
}
