"""Calls on index vectors: from the user's arguments to the operands of the op table.

``operations`` hands over to this module where a coordinate, a rank, an index or a value is an index vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pk import errors
from pk.dsl import language
from pk.dsl.arguments import constant, integer
from pk.dsl.values import At, CopyValue, SignalsValue, TensorValue, describe, is_tile
from pk.ir import index, rules, vectors
from pk.ir import nodes as ir
from pk.ir.types import INT, Tile

if TYPE_CHECKING:
    from pk.dsl.expressions import Expressions

Arguments = dict[str, Any]


def is_vector(value: Any) -> bool:
    """Whether ``value`` is an index vector."""
    return is_tile(value) and vectors.is_vector(value.type)


def any_vector(*values: Any) -> bool:
    """Whether one of ``values`` is an index vector, or a tuple or ``pk.at`` with one."""
    return any(is_vector(e) for v in values for e in _entries(v))


def one_dimension(shape: Any) -> bool:
    """Whether ``shape`` is that of an index vector."""
    return isinstance(shape, tuple) and len(shape) == 1


def _entries(coord: Any) -> tuple[Any, ...]:
    return coord.entries if isinstance(coord, At) else coord if isinstance(coord, tuple) else (coord,)


def entry(what: str, value: Any, span: ir.Span) -> ir.Expr:
    """``value`` as an int32 scalar or an index vector."""
    if is_vector(value):
        return value
    return integer(what, value, span)


def _coordinate(what: str, coord: Any, ndim: int, span: ir.Span) -> list[ir.Expr]:
    entries = _entries(coord)
    if len(entries) != ndim:
        plural = "entry" if len(entries) == 1 else "entries"
        raise errors.WrongCoordinate(
            f"the coordinate of {what} has {len(entries)} {plural}, and it has {ndim} dimension{'s' * (ndim != 1)}",
            span,
            "Give one entry for each dimension, outermost first.",
        )
    return [entry(f"entry {i} of the coordinate of {what}", e, span) for i, e in enumerate(entries)]


def iota(count: int, span: ir.Span) -> ir.Call:
    """0, 1, ..., ``count`` - 1."""
    return ir.Call("iota", (), vectors.vector(count, span), (), span)


def _window(r: Expressions, op: str, x: Any, coord: list[ir.Expr], rank: Any, span: ir.Span) -> ir.Memory:
    """The elements of ``x`` at ``coord``, of the rank in ``x`` (``c[r]``) or of ``rank`` (a scalar or index vector)."""
    tensor = x.tensor if isinstance(x, CopyValue) else x
    if not isinstance(tensor, TensorValue):
        raise errors.WrongOperand(
            f"pk.{op} needs a tensor, and got {describe(x)}", span, "Pass a Global, a Parallel or one rank's copy c[r]."
        )
    if rank is not None and isinstance(x, CopyValue):
        raise errors.WrongOperand(
            f"pk.{op} names a rank twice: `{tensor.name}[...]` and rank=", span, f"Pass `{tensor.name}` and rank=."
        )
    whose = x.rank if isinstance(x, CopyValue) else None if rank is None else entry("rank=", rank, span)
    memory = ir.Memory(tensor.name, tuple(coord), whose, False, span)
    vectors.owner(op, _declared(tensor), memory, span)
    return memory


def _declared(tensor: TensorValue) -> ir.Tensor | ir.Scratch:
    if tensor.kind == "scratch":
        return ir.Scratch(tensor.name, (ir.World(),) * tensor.ndim, tensor.dtype)
    return ir.Tensor(tensor.name, tensor.kind, tensor.dtype, tensor.ndim)


def _tensor(op: str, x: Any, span: ir.Span) -> TensorValue:
    tensor = x.tensor if isinstance(x, CopyValue) else x
    if not isinstance(tensor, TensorValue):
        raise errors.WrongOperand(f"pk.{op} of {describe(x)}", span, "It takes a tensor.")
    return tensor


def _consecutive(coord: Any, exprs: list[ir.Expr], count: int, r: Expressions, span: ir.Span) -> list[ir.Expr]:
    """Coordinates of ``count`` elements in a row: the last entry counts vectors (of ``pk.at``: elements)."""
    if vectors.is_vector(exprs[-1].type):
        raise errors.WrongCoordinate(
            "the last entry of the coordinate is an index vector, and a shape is given", span,
            "An index vector says where each element lies: drop the shape.",
        )  # fmt: skip
    first = exprs[-1] if isinstance(coord, At) else index.lift(index.binary("*", exprs[-1], count, span), span)
    return [*exprs[:-1], index.lift(r.combine("+", first, iota(count, span), span), span)]


# ------------------------------------------------------------------------------------------------- elements
def load(r: Expressions, x: Any, coord: Any, shape: Any, other: Any, span: ir.Span) -> ir.Call:
    """``pk.load(x, coord, (R,), other=)``, or ``pk.load(x, coord)`` with index vectors in ``coord``."""
    r.b.require("load_elements", span)
    tensor = _tensor("load", x, span)
    exprs = _coordinate(f"`{tensor.name}`", coord, tensor.ndim, span)
    if shape is not None:
        (count,) = shape
        exprs = _consecutive(coord, exprs, constant("the extent of an index vector", count, span), r, span)
    window = _window(r, "load", x, exprs, None, span)
    tile = vectors.elements("load", _declared(tensor), window, (), span)
    return ir.Call("load_elements", (window,), tile, (("other", constant("other=", other, span)),), span)


def store(r: Expressions, x: Any, value: Any, coord: Any, rank: Any, span: ir.Span) -> None:
    """``pk.store(x, value, coord, rank=)`` with an index vector among them."""
    r.b.require("store_elements", span)
    tensor = _tensor("store", x, span)
    what = entry("the value of pk.store", value, span)
    exprs = _coordinate(f"`{tensor.name}`", coord, tensor.ndim, span)
    if is_vector(value) and not any_vector(coord):
        assert isinstance(what.type, Tile)
        exprs = _consecutive(coord, exprs, what.type.cols, r, span)
    window = _window(r, "store", x, exprs, rank, span)
    vectors.elements("store", _declared(tensor), window, (what,), span)
    r.b.emit(ir.Do("store_elements", (window, what), (), span))


# ----------------------------------------------------------------------------------------------------- rows
def _gather_async(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("gather_async", span)
    tile, window = _rows(r, "gather_async", a, span)
    r.b.emit(ir.Do("gather_async", (tile, window), (), span))


def _scatter_async(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("scatter_async", span)
    tile, window = _rows(r, "scatter_async", a, span)
    r.b.emit(ir.Do("scatter_async", (window, tile), (), span))


def _rows(r: Expressions, op: str, a: Arguments, span: ir.Span) -> tuple[ir.Shared, ir.Memory]:
    tile = a["t"]
    if not isinstance(tile, ir.Shared):
        raise errors.WrongOperand(
            f"pk.{op} needs a tile of a stage, and got {describe(tile)}", span,
            "Write s.name, with s from `with pipeline.fill() as s` or `drain()`.",
        )  # fmt: skip
    rules.stage(op, tile, r.b.held, span)
    tensor = _tensor(op, a["x"], span)
    col = integer("col=", a["col"], span)
    at = [entry("rows", a["rows"], span), index.lift(index.binary("*", col, tile.type.cols, span), span)]
    window = _window(r, op, a["x"], at, a["rank"], span)
    vectors.rows(op, tile, _declared(tensor), window, span)
    return tile, window


# -------------------------------------------------------------------------------------------------- counters
def _counters(sig: Any, at: Any, span: ir.Span) -> ir.Signal:
    if not isinstance(sig, SignalsValue):
        raise errors.WrongOperand(
            f"{describe(sig)} is no array of signals", span, "Declare one at the top: pk.signals(*shape)."
        )
    return ir.Signal(sig.name, tuple(_coordinate(f"signals `{sig.name}`", at, len(sig.shape), span)), span)


def signal(r: Expressions, a: Arguments, span: ir.Span) -> None:
    """``pk.signal(sig, index, rank, value)`` with an index vector among them."""
    r.b.require("signal_each", span)
    operands = (
        _counters(a["sig"], a["index"], span), entry("the rank", a["rank"], span), entry("the value", a["value"], span)
    )  # fmt: skip
    vectors.lanes("an operand of pk.signal", operands, span)
    r.b.emit(ir.Do("signal_each", operands, (), span))


def wait(r: Expressions, a: Arguments, span: ir.Span) -> None:
    """``pk.wait(sig, index, value)`` with an index vector among them."""
    r.b.require("wait_each", span)
    operands = (_counters(a["sig"], a["index"], span), entry("the value", a["value"], span))
    vectors.lanes("an operand of pk.wait", operands, span)
    r.b.emit(ir.Do("wait_each", operands, (), span))


def _fetch_add(r: Expressions, a: Arguments, span: ir.Span) -> ir.Var:
    r.b.require("fetch_add", span)
    if any_vector(a["index"], a["value"]):
        raise errors.WrongOperand("pk.fetch_add of an index vector", span, "It adds to one counter.")
    call = ir.Call("fetch_add", (_counters(a["sig"], a["index"], span), integer("the value", a["value"], span)),
                   INT, (), span)  # fmt: skip
    var = r.temporary("found", call, span)  # here and now, and once
    r.fresh.add(var.name)
    return var


HANDLERS: dict[Any, Any] = {
    language.gather_async: _gather_async,
    language.scatter_async: _scatter_async,
    language.fetch_add: _fetch_add,
}
