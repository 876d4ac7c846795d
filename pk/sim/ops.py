"""The definition of the operations of the language.

``MEANING`` has one function for each row of ``pk.ir.ops.TABLE``; what it does *is* what the operation means, and the
code that the templates emit must agree with it.  A function takes the role that executes the op, the op's ``Site``, and
its operands:

    shared    SharedTile (``.T`` already applied)        memory    Window         scalar    int, float or bool
    register  array of values, never changed in place    signal    CounterRef

Functions of ops that may wait are generators.  An op with a result returns it; one that writes a register tile returns
its new value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pk.ir.types import DType, float32
from pk.sim import ops_collective, ops_tiles, ops_vectors
from pk.sim.machine import CounterRef, Load, Program, Role, SharedTile, Site, Window
from pk.sim.values import Array, decode, encode, greatest, least, rounded, tensor_float32


# ---------------------------------------------------------------------------------------------- moving tiles
def load_async(role: Role, site: Site, tile: SharedTile, source: Window) -> Program:
    """``tile := source``; what lies outside the tensor is 0.

    Memory is read at some moment between here and the publication of the stage.
    """
    yield from role.reach(site, source)
    role.launch.issue(Load(role, site, tile, source))


def store_async(role: Role, site: Site, target: Window, tile: SharedTile) -> Program:
    """``target := tile`` on each rank of the window; what lies outside the tensor is dropped.

    The stage is read later and stays held until then; the data lands later still, in no order, at the latest before a
    later signal of this role arrives or the launch ends.
    """
    yield from role.reach(site, target, written=True)
    role.store(site, target, tile, add=False)


def store_add_async(role: Role, site: Site, target: Window, tile: SharedTile) -> Program:
    """``target += tile``, as ``store_async``; each sum is rounded to the tensor's dtype when it lands."""
    yield from role.reach(site, target, written=True)
    role.store(site, target, tile, add=True)


def load(role: Role, site: Site, tile: SharedTile) -> Array:
    """The values of the tile: narrow floats as float32."""
    return decode(_read(role, site, tile), tile.buffer.dtype).copy()


def store(role: Role, site: Site, tile: SharedTile, values: Array) -> None:
    """``tile := values``, rounded to the tile's dtype."""
    raw = encode(np.broadcast_to(values, tile.buffer.array.shape), tile.buffer.dtype)
    role.launch.memory.access(role.who, role.ident, "write", tile.buffer, site.span, values=raw)


# -------------------------------------------------------------------------------------------- register tiles
def full(role: Role, site: Site) -> Array:
    """A tile with ``value`` everywhere."""
    return rounded(np.full(site.tile.shape, site.attr("value")), site.tile.dtype)


def columns(role: Role, site: Site, x: Array) -> Array:
    """Columns ``start`` to ``stop`` (excluded) of ``x``."""
    return x[:, site.attr("start") : site.attr("stop")]


def cast(role: Role, site: Site, x: Array) -> Array:
    """``x`` rounded to the result's dtype (to nearest even; floats to int32 by truncation)."""
    return rounded(x, site.tile.dtype)


def mma(role: Role, site: Site, acc: Array, a: SharedTile | Array, b: SharedTile) -> Array:
    """``acc + a @ b``, or ``a @ b`` alone: exact products, float32 sums.  float32 operands are read as tf32."""
    product = np.matmul(_factor(role, site, a), _factor(role, site, b))
    return product if ("accumulate", False) in site.attrs else np.add(acc, product, out=product)


# --------------------------------------------------------------------------------------------------- signals
def signal(role: Role, site: Site, counter: CounterRef, rank: int, value: int) -> Program:
    """Add ``value`` to ``rank``'s counter, some time after this role's earlier stores and signals are there.

    In no order to other signals of the same statement.
    """
    if role.peer(site, rank) != role.rank:
        yield from role.enter(site)
    role.signal(site, counter, (rank,), value)


def signal_all(role: Role, site: Site, counter: CounterRef, value: int) -> Program:
    """``signal`` to every rank, this one too; the signals arrive in any order."""
    yield from role.enter(site)
    role.signal(site, counter, tuple(range(role.world)), value)


def wait(role: Role, site: Site, counter: CounterRef, value: int) -> Program:
    """Until this rank's counter is, or was since the wait began, at least ``value``; not at all for 0 and below."""
    yield role.launch.signal_counter(role.rank, counter), value, site


def barrier(role: Role, site: Site, counter: CounterRef) -> Program:
    """``signal_all`` of 1, then ``wait`` for as many as there are ranks."""
    yield from signal_all(role, site, counter, 1)
    yield from wait(role, site, counter, role.world)


MEANING: dict[str, Callable[..., Any]] = {
    "load_async": load_async,
    "store_async": store_async,
    "store_add_async": store_add_async,
    "load": load,
    "store": store,
    "full": full,
    "columns": columns,
    "cast": cast,
    "mma": mma,
    "signal": signal,
    "signal_all": signal_all,
    "wait": wait,
    "barrier": barrier,
    **ops_collective.MEANING,
    **ops_tiles.MEANING,
    **ops_vectors.MEANING,
}


# ------------------------------------------------------------------------------------- arithmetic on registers
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "//": np.floor_divide,
    "%": np.remainder,
    "min": least,
    "max": greatest,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
}

UNARY: dict[str, Callable[[Any], Any]] = {"-": np.negative, "not": np.logical_not, "abs": np.abs}


def binary(op: str, x: Any, y: Any, dtype: DType) -> Array:
    """``x op y`` element by element, each result rounded to ``dtype``."""
    if op in ("and", "or"):
        return np.asarray(BINARY[op](x, y))
    floating = op == "/" or any(isinstance(v, float) or getattr(v, "dtype", None) == np.float32 for v in (x, y))
    kind = np.float32 if floating else np.int32
    return rounded(BINARY[op](np.asarray(x).astype(kind), np.asarray(y).astype(kind)), dtype)


def unary(op: str, x: Array, dtype: DType) -> Array:
    """``op x`` element by element."""
    return rounded(UNARY[op](x), dtype)


def _read(role: Role, site: Site, tile: SharedTile) -> Array:
    return role.launch.memory.access(role.who, role.ident, "read", tile.buffer, site.span)


def _factor(role: Role, site: Site, tile: SharedTile | Array) -> Array:
    if not isinstance(tile, SharedTile):
        return tile
    values = decode(_read(role, site, tile), tile.buffer.dtype)
    return tensor_float32(values) if tile.buffer.dtype == float32 else values
