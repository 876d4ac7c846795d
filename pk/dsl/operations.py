"""Calls that act on memory, tiles and signals: from the user's arguments to the operands of the op table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.dsl import language, vectors
from pk.dsl.arguments import integer
from pk.dsl.values import (
    At,
    ChosenValue,
    CopyValue,
    SharedValue,
    SignalsValue,
    TensorValue,
    describe,
    is_scalar,
    is_tile,
)
from pk.ir import index, multiply, rules
from pk.ir import nodes as ir
from pk.ir.types import Tile

if TYPE_CHECKING:
    from pk.dsl.expressions import Expressions

Arguments = dict[str, Any]
Handler = Callable[["Expressions", Arguments, ir.Span], Any]


# --------------------------------------------------------------------------------------------- operands
def _shared(r: Expressions, op: str, value: Any, span: ir.Span) -> ir.Shared:
    if isinstance(value, SharedValue):
        value = r.b.use_private(value, span)
    if not isinstance(value, ir.Shared):
        raise errors.WrongOperand(
            f"pk.{op} needs a tile of a stage, and got {describe(value)}", span,
            "Write s.name, with s from `with pipeline.fill() as s` or `drain()`"
            f"{', or a pk.shared tile of your own' if op in ('load', 'store', 'mma') else ''}.",
        )  # fmt: skip
    rules.stage(op, value, r.b.held, span)
    return value


def unswapped(op: str, tile: Any, tensor: Any, span: ir.Span) -> None:
    """Raise WrongOperand if ``tile`` and ``tensor`` are each the other one."""
    if not isinstance(tile, TensorValue | CopyValue):
        return
    if is_tile(tensor) or is_scalar(tensor) or isinstance(tensor, ir.Shared | SharedValue):
        load = op == "load_async"
        raise errors.WrongOperand(
            f"pk.load_async to {describe(tile)} from {describe(tensor)}" if load else
            f"pk.{op} to {describe(tensor)} of {describe(tile)}", span,
            "Destination and source are swapped: write pk.load_async(tile, tensor, coord)." if load else
            f"Destination and value are swapped: write pk.{op}(tensor, tile, coord).",
        )  # fmt: skip


def coordinate(coord: Any, ndim: int, tile: tuple[int, ...], what: str, span: ir.Span) -> tuple[ir.Expr, ...]:
    """Element coordinates: trailing entries of a plain tuple count tiles, all entries of ``pk.at`` elements.

    Raises WrongCoordinate unless there is one entry for each of the ``ndim`` dimensions.
    """
    entries = coord.entries if isinstance(coord, At) else coord if isinstance(coord, tuple) else (coord,)
    if len(entries) != ndim:
        plural = "entry" if len(entries) == 1 else "entries"
        raise errors.WrongCoordinate(
            f"the coordinate of {what} has {len(entries)} {plural}, and it has {ndim} dimension{'s' * (ndim != 1)}",
            span,
            "Give one entry for each dimension, outermost first; the trailing ones count tiles." if tile else
            "Give one entry for each dimension of the declaration.",
        )  # fmt: skip
    exprs = [integer(f"entry {i} of the coordinate of {what}", e, span) for i, e in enumerate(entries)]
    if not isinstance(coord, At):
        for back, extent in enumerate(reversed(tile), 1):
            exprs[-back] = index.lift(index.binary("*", exprs[-back], extent, span), span)
    return tuple(exprs)


def _memory(r: Expressions, op: str, x: Any, t: ir.Shared, coord: Any, span: ir.Span) -> ir.Memory | ir.Choose:
    """The window of ``x`` that tile ``t`` meets."""
    if isinstance(x, ChosenValue):
        this, other = (_memory(r, op, side, t, coord, span) for side in (x.x, x.y))
        return ir.Choose(x.cond, this, other, span)
    destination = op != "load_async"
    tensor, rank = (x.tensor, x.rank) if isinstance(x, CopyValue) else (x, None)
    if not isinstance(tensor, TensorValue):
        raise errors.WrongOperand(
            f"pk.{op} needs a tensor, and got {describe(x)}", span, "Pass a Global or one rank's copy c[r]."
        )
    everyone = tensor.kind != "global" and rank is None
    if everyone and not destination:
        raise errors.WrongOperand(
            f"pk.{op} reads `{tensor.name}`, which every rank has a copy of", span, f"Say whose: {tensor.name}[rank]."
        )
    declared: ir.Tensor | ir.Scratch
    if tensor.kind == "scratch":
        declared = ir.Scratch(tensor.name, (ir.World(),) * tensor.ndim, tensor.dtype)
    else:
        declared = ir.Tensor(tensor.name, tensor.kind, tensor.dtype, tensor.ndim)
    rules.moved(op, t, declared, span)
    where = coordinate(coord, tensor.ndim, t.shape, f"`{tensor.name}`", span)
    return ir.Memory(tensor.name, where, rank, everyone, span)


def _counter(sig: Any, at: Any, span: ir.Span) -> ir.Signal:
    if not isinstance(sig, SignalsValue):
        raise errors.WrongOperand(
            f"{describe(sig)} is no array of signals", span, "Declare one at the top: pk.signals(*shape)."
        )
    return ir.Signal(sig.name, coordinate(at, len(sig.shape), (), f"signals `{sig.name}`", span), span)


# ------------------------------------------------------------------------------------------------- handlers
def _load_async(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("load_async", span)
    unswapped("load_async", a["t"], a["x"], span)
    t = _shared(r, "load_async", a["t"], span)
    r.b.emit(ir.Do("load_async", (t, _memory(r, "load_async", a["x"], t, a["coord"], span)), (), span))


def _store_async(op: str) -> Handler:
    def handler(r: Expressions, a: Arguments, span: ir.Span) -> None:
        r.b.require(op, span)
        unswapped(op, a["t"], a["x"], span)
        t = _shared(r, op, a["t"], span)
        r.b.emit(ir.Do(op, (_memory(r, op, a["x"], t, a["coord"], span), t), (), span))

    return handler


def load_shared(r: Expressions, a: Arguments, span: ir.Span) -> ir.Call:
    """``load(t)``."""
    r.b.require("load", span)
    t = _shared(r, "load", a["t"], span)
    if len(t.type.shape) != 2:
        raise errors.WrongOperand(
            f"pk.load of `{t.name}` of shape {t.type.shape}", span,
            f"Register tiles have rows and columns: declare it as pk.shared((1, {t.type.shape[-1]}), ...).",
        )  # fmt: skip
    return ir.Call("load", (t,), rules.loaded(t), (), span)


def store_shared(r: Expressions, a: Arguments, span: ir.Span) -> None:
    """``store(t, r)``."""
    r.b.require("store", span)
    if is_tile(a["t"]) and isinstance(a["r"], ir.Shared | SharedValue):
        raise errors.WrongOperand(
            f"pk.store to {describe(a['t'])} of {describe(a['r'])}", span,
            "Destination and value are swapped: write pk.store(shared tile, register tile).",
        )  # fmt: skip
    t, value = _shared(r, "store", a["t"], span), a["r"]
    if not is_tile(value):
        raise errors.WrongOperand(
            f"pk.store writes a register tile, and got {describe(value)}",
            span,
            "Make one with pk.full, pk.load or pk.zeros.",
        )
    rules.stored(t, value.type, span)
    r.b.emit(ir.Do("store", (t, value), (), span))


def _mma(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("mma", span)
    acc = a["acc"]
    if not isinstance(acc, ir.Var) or not isinstance(acc.type, Tile):
        raise errors.WrongOperand(
            f"pk.mma accumulates into a name of a register tile, and got {describe(acc)}", span,
            "Bind it first: acc = pk.zeros((M, N), pk.float32).",
        )  # fmt: skip
    x = a["a"] if is_tile(a["a"]) else _shared(r, "mma", a["a"], span)
    y = _shared(r, "mma", a["b"], span)
    if not isinstance(a["accumulate"], bool):
        raise errors.NotConstant(
            f"accumulate= is {describe(a['accumulate'])}", span, "It must be True or False when the kernel is compiled."
        )
    multiply.mma(acc.type, x if isinstance(x, ir.Shared) else x.type, y, r.b.role.warpgroups if r.b.role else 1, span)
    r.b.emit(ir.Do("mma", (acc, x, y), () if a["accumulate"] else (("accumulate", False),), span))


def _signal(r: Expressions, a: Arguments, span: ir.Span) -> None:
    if vectors.any_vector(a["index"], a["rank"], a["value"]):
        vectors.signal(r, a, span)
        return
    r.b.require("signal", span)
    to, by = integer("the rank", a["rank"], span), _amount("signal", a["value"], span)
    r.b.emit(ir.Do("signal", (_counter(a["sig"], a["index"], span), to, by), (), span))


def _amount(op: str, given: Any, span: ir.Span) -> ir.Expr:
    """How much is signalled; a constant must make sense.  (A wait for less than 1 does not wait.)"""
    value = integer("the value", given, span)
    if isinstance(value, ir.Const) and value.value < 1:
        advice = "Counters only grow: add at least 1."
        raise errors.WrongOperand(f"pk.{op} with value {value.value}", span, advice)
    return value


def _counted(op: str) -> Handler:
    def handler(r: Expressions, a: Arguments, span: ir.Span) -> None:
        if op == "wait" and vectors.any_vector(a["index"], a["value"]):
            vectors.wait(r, a, span)
            return
        r.b.require(op, span)
        value = integer("the value", a["value"], span) if op == "wait" else _amount(op, a["value"], span)
        r.b.emit(ir.Do(op, (_counter(a["sig"], a["index"], span), value), (), span))

    return handler


def _barrier(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("barrier", span)
    r.b.emit(ir.Do("barrier", (_counter(a["sig"], a["index"], span),), (), span))


HANDLERS: dict[Any, Handler] = {
    language.load_async: _load_async,
    language.store_async: _store_async("store_async"),
    language.store_add_async: _store_async("store_add_async"),
    language.mma: _mma,
    language.signal: _signal,
    language.signal_all: _counted("signal_all"),
    language.wait: _counted("wait"),
    language.barrier: _barrier,
    **vectors.HANDLERS,
}
