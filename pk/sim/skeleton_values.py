"""Values of a kernel's scalars and index vectors, as far as they are known without any data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pk.ir import nodes as ir
from pk.ir.types import Tile
from pk.sim import ops


class _Unknown:
    """A value that comes out of a tensor, or is a tile of registers."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Final = _Unknown()

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "min": min,
    "max": max,
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}


def is_vector(kind: object) -> bool:
    """Whether ``kind`` is the type of an index vector."""
    return isinstance(kind, Tile) and kind.space == "register" and len(kind.shape) == 1


def combine(e: ir.Binary, x: Any, y: Any) -> Any:
    """``x op y`` of a scalar or an index vector; ``and`` and ``or`` are decided by one side where it suffices."""
    if e.op in ("and", "or") and not isinstance(e.type, Tile):
        deciding = e.op == "or"
        if any(v is not UNKNOWN and bool(v) == deciding for v in (x, y)):
            return deciding
        return UNKNOWN if UNKNOWN in (x, y) else bool(y)
    if x is UNKNOWN or y is UNKNOWN:
        return UNKNOWN
    if isinstance(e.type, Tile):
        return ops.binary(e.op, x, y, e.type.dtype) if is_vector(e.type) else UNKNOWN
    return BINARY[e.op](x, y)


def negated(e: ir.Unary, x: Any) -> Any:
    """``op x`` of a scalar or an index vector."""
    if x is UNKNOWN or (isinstance(e.type, Tile) and not is_vector(e.type)):
        return UNKNOWN
    if isinstance(e.type, Tile):
        return ops.unary(e.op, x, e.type.dtype)
    return -x if e.op == "-" else abs(x) if e.op == "abs" else not x


def made(e: ir.Call, operands: list[Any]) -> Any:
    """The value of a call that only reckons."""
    if not is_vector(e.type) or any(x is UNKNOWN for x in operands):
        return UNKNOWN
    assert isinstance(e.type, Tile)
    attrs = dict(e.attrs)
    if e.op == "iota":
        return np.arange(e.type.shape[0], dtype=np.int32)
    if e.op == "full":
        return np.full(e.type.shape, attrs["value"], np.int32)
    if e.op == "where":
        cond, x, y = operands
        return np.where(cond, x, y).astype(np.int32)
    return UNKNOWN


def spread(value: Any, count: int) -> list[int]:
    """``value``, a scalar or a vector, for each of ``count`` lanes."""
    return [int(v) for v in np.broadcast_to(value, (count,))]


def lanes(values: list[Any]) -> int:
    """How many lanes the vectors among ``values`` have; 1 without any."""
    return next((len(v) for v in values if isinstance(v, np.ndarray)), 1)
