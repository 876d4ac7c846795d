"""Calls that compute on register tiles and move them between registers and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.dsl import language, operations, vectors
from pk.dsl.arguments import constant, integer, shape
from pk.dsl.values import CopyValue, TensorValue, describe, is_scalar, is_tile
from pk.ir import index, rules
from pk.ir import nodes as ir
from pk.ir.types import DType, Scalar, Tile, int32

if TYPE_CHECKING:
    from pk.dsl.expressions import Expressions

Arguments = dict[str, Any]
Handler = Callable[["Expressions", Arguments, ir.Span], Any]

FOLDED: dict[str, Callable[[float], float]] = {
    "exp2": lambda x: 2.0**x, "exp": math.exp, "log2": math.log2, "log": math.log, "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x), "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)), "silu": lambda x: x / (1 + math.exp(-x)),
}  # fmt: skip
"""The functions on numbers that are known when the kernel is compiled."""


# ----------------------------------------------------------------------------------------- element by element
def _value(op: str, value: Any, span: ir.Span) -> ir.Expr:
    """An operand that is a register tile or a scalar."""
    if is_tile(value) or is_scalar(value):
        return index.lift(value, span)
    advice = "Bring it to registers first: pk.load(t)." if isinstance(value, ir.Shared) else "Use tiles and scalars."
    raise errors.WrongOperand(f"pk.{op} of {describe(value)}", span, advice)


def like(value: Any, dtype: DType) -> Any:
    """A Python number as arithmetic with tiles of ``dtype`` takes it: an int is a float beside floats."""
    if isinstance(value, int) and not isinstance(value, bool) and dtype.kind == "float":
        return number(value)
    return value


def number(value: float) -> float:
    """``value`` as a float; integers beyond its range as infinities."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _mathematics(op: str) -> Handler:
    def handler(r: Expressions, a: Arguments, span: ir.Span) -> Any:
        x = a["x"]
        if isinstance(x, int | float):
            try:
                return FOLDED[op](x)
            except (ValueError, ArithmeticError) as e:
                raise errors.WrongOperand(f"pk.{op}({x}): {e}", span, "This is computed at compile time.") from None
        x = _value(op, x, span)
        r.b.require(op, span)
        return ir.Call(op, (x,), rules.mathematics(op, x.type, span), (), span)

    return handler


def _gelu(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    if a["approximate"] not in ("none", "tanh"):
        raise errors.WrongOperand(
            f"pk.gelu(approximate={a['approximate']!r})", span, 'Use "none", the exact form, or "tanh".'
        )
    x = _value("gelu", a["x"], span)
    r.b.require("gelu", span)
    kind = rules.mathematics("gelu", x.type, span)
    return ir.Call("gelu", (x,), kind, (("approximate", a["approximate"]),), span)


def _where(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    if not is_tile(a["cond"]):
        raise errors.WrongOperand(
            f"the condition of pk.where is {describe(a['cond'])}", span,
            "It is a tile of comparisons; for a scalar write `x if c else y`.",
        )  # fmt: skip
    cond, x, y = (_value("where", a[k], span) for k in ("cond", "x", "y"))
    kind = rules.where(cond.type, x.type, y.type, span)
    x, y = (index.lift(like(index.lower(v), kind.dtype), span) for v in (x, y))
    if not vectors.is_vector(cond):
        r.b.require("where", span)
    return ir.Call("where", (cond, x, y), rules.where(cond.type, x.type, y.type, span), (), span)


def _fma(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    values = [_value("fma", a[k], span) for k in ("x", "y", "z")]
    kind = rules.fma(tuple(v.type for v in values), span)
    operands = tuple(index.lift(like(index.lower(v), kind.dtype), span) for v in values)
    r.b.require("fma", span)
    return ir.Call("fma", operands, kind, (), span)


def _abs(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    x = a["x"]
    if isinstance(x, int | float):
        return abs(x)
    x = _value("abs", x, span)
    kind = rules.tile_unary("abs", x.type, span) if isinstance(x.type, Tile) else x.type
    return ir.Unary("abs", x, kind, span)


def _iota(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    tile = Tile(shape("pk.iota", a["shape"], span), int32, "register")
    rules.iota(tile, span)
    if len(tile.shape) == 1:
        return vectors.iota(tile.cols, span)
    r.b.require("iota", span)
    return ir.Call("iota", (), tile, (), span)


# --------------------------------------------------------------------------------------------------- reductions
def reduction(r: Expressions, op: str, x: Any, axis: Any, span: ir.Span) -> ir.Call:
    """``sum(x, axis)``, ``max(x, axis=)`` or ``min(x, axis=)``."""
    if not is_tile(x):
        raise errors.WrongOperand(f"pk.{op} of {describe(x)} along an axis", span, "It reduces a register tile.")
    axis = constant("axis=", axis, span)
    kind = rules.reduced(op, x.type, axis, span)
    r.b.require(op, span)
    return ir.Call(op, (x,), kind, (("axis", axis % 2),), span)


def _sum(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    return reduction(r, "sum", a["r"], a["axis"], span)


# ------------------------------------------------------------------------------------------- registers <-> tensors
def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a tensor or one rank's copy of one."""
    return isinstance(x, TensorValue | CopyValue)


def _window(r: Expressions, op: str, x: Any, tile: tuple[int, ...], coord: Any, span: ir.Span) -> ir.Memory:
    """The window of tensor ``x`` that a register tile of shape ``tile`` (or a scalar: ()) meets."""
    tensor, rank = (x.tensor, x.rank) if isinstance(x, CopyValue) else (x, None)
    everyone = tensor.kind != "global" and rank is None
    if everyone and op.startswith("load"):
        raise errors.WrongOperand(
            f"pk.load reads `{tensor.name}`, which every rank has a copy of", span, f"Say whose: {tensor.name}[rank]."
        )
    if coord is None:
        raise errors.WrongCoordinate(
            f"pk.{rules.spelled(op)} of the tensor `{tensor.name}` without a coordinate", span,
            "Say where: one entry for each dimension; with a shape the trailing ones count tiles.",
        )  # fmt: skip
    if len(tile) == 2:
        rules.window_tile(op, Tile(tile, tensor.dtype, "register"), tensor.ndim, tensor.name, span)
    where = operations.coordinate(coord, tensor.ndim, tile[-tensor.ndim :] if tile else (), f"`{tensor.name}`", span)
    return ir.Memory(tensor.name, where, rank, everyone, span)


def _load(r: Expressions, a: Arguments, span: ir.Span) -> Any:
    x = a["t"]
    if not is_tensor(x):
        for name in ("coord", "shape", "other"):
            if a[name] is not None and not (name == "other" and a[name] == 0):
                raise errors.WrongOperand(f"pk.load of {describe(x)} with {name}=", span, "Only tensors take one.")
        return operations.load_shared(r, a, span)
    if vectors.any_vector(a["coord"]) or vectors.one_dimension(a["shape"]):
        return vectors.load(r, x, a["coord"], a["shape"], a["other"], span)
    element = rules.widened((x.tensor if isinstance(x, CopyValue) else x).dtype)
    if a["shape"] is None:
        r.b.require("load_scalar", span)
        window = _window(r, "load_scalar", x, (), a["coord"], span)
        return ir.Call("load_scalar", (window,), Scalar(element), (), span)
    tile = Tile(shape("a register tile", a["shape"], span), element, "register")
    r.b.require("load_global", span)
    window = _window(r, "load_global", x, tile.shape, a["coord"], span)
    other = like(a["other"], element)
    if not is_scalar(other) or index.scalar_type(other).dtype != element:
        raise errors.WrongDType(f"other= is {describe(other)}", span, f"The tile that is loaded is {element}.")
    return ir.Call("load_global", (window, index.lift(other, span)), tile, (), span)


def _store(r: Expressions, a: Arguments, span: ir.Span) -> None:
    x, value = a["t"], a["r"]
    operations.unswapped("store", value, x, span)
    if not is_tensor(x):
        for name in ("coord", "rows"):
            if a[name] is not None:
                raise errors.WrongOperand(f"pk.store to {describe(x)} with {name}=", span, "Only tensors take one.")
        operations.store_shared(r, a, span)
        return
    rank = a["rank"]
    if vectors.any_vector(value, a["coord"], rank):
        vectors.store(r, x, value, a["coord"], rank, span)
        return
    if rank is not None and isinstance(x, TensorValue):
        x = CopyValue(x, integer("rank=", rank, span))
    dtype: DType = (x.tensor if isinstance(x, CopyValue) else x).dtype
    value = _value("store", like(value, dtype), span)
    rules.stored_as(describe(x), value.type, dtype, span)
    if isinstance(value.type, Tile):
        r.b.require("store_global", span)
        window = _window(r, "store_global", x, value.type.shape, a["coord"], span)
        rows = value.type.rows if a["rows"] is None else a["rows"]
        r.b.emit(ir.Do("store_global", (window, value, integer("rows=", rows, span)), (), span))
        return
    r.b.require("store_scalar", span)
    window = _window(r, "store_scalar", x, (), a["coord"], span)
    r.b.emit(ir.Do("store_scalar", (window, value), (), span))


HANDLERS: dict[Any, Handler] = {
    **{getattr(language, op): _mathematics(op) for op in FOLDED},
    language.gelu: _gelu, language.where: _where, language.fma: _fma, language.abs: _abs, language.iota: _iota,
    language.sum: _sum, language.load: _load, language.store: _store,
}  # fmt: skip
