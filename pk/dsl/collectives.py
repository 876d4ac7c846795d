"""Calls that combine every rank's copy of a window: ``pk.reduce`` and ``pk.all_reduce``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pk import errors
from pk.dsl import language
from pk.dsl.arguments import shape
from pk.dsl.operations import Arguments, Handler, coordinate
from pk.dsl.values import CopyValue, TensorValue, describe
from pk.ir import collective
from pk.ir import nodes as ir

if TYPE_CHECKING:
    from pk.dsl.expressions import Expressions


def _whole(op: str, c: Any, span: ir.Span) -> TensorValue:
    """``c``, of which every rank's copy is meant."""
    if isinstance(c, TensorValue) and c.kind != "global":
        return c
    if isinstance(c, CopyValue):
        raise errors.WrongOperand(
            f"pk.{op} combines every rank's copy, and got {describe(c)}", span, f"Drop the rank: {c.tensor.name}."
        )
    raise errors.WrongOperand(
        f"pk.{op} combines every rank's copy, and got {describe(c)}", span,
        "Pass a Parallel parameter or scratch: a tensor that every rank has.",
    )  # fmt: skip


def _declared(x: TensorValue) -> ir.Tensor | ir.Scratch:
    if x.kind == "scratch":
        return ir.Scratch(x.name, (ir.World(),) * x.ndim, x.dtype)
    return ir.Tensor(x.name, x.kind, x.dtype, x.ndim)


def _window(x: TensorValue, coord: Any, extents: tuple[int, ...], rank: ir.Expr | None, span: ir.Span) -> ir.Memory:
    where = coordinate(coord, x.ndim, extents, f"`{x.name}`", span)
    return ir.Memory(x.name, where, rank, x.kind != "global" and rank is None, span)


def _reduce(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("reduce", span)
    source, x = _whole("reduce", a["c"], span), a["x"]
    to, rank = (x.tensor, x.rank) if isinstance(x, CopyValue) else (x, None)
    if not isinstance(to, TensorValue):
        raise errors.WrongOperand(
            f"pk.reduce writes to a tensor, and got {describe(x)}", span, "Pass a Global or one rank's copy c[r]."
        )
    if to.kind != "global" and rank is None:
        raise errors.WrongOperand(
            f"pk.reduce into every rank's copy of `{to.name}`", span,
            f"Say whose: {to.name}[pk.rank()]; in place on all ranks it is pk.all_reduce.",
        )  # fmt: skip
    extents = shape("a window", a["shape"], span)
    collective.reduced("reduce", _declared(to), _declared(source), extents, a["op"], span)
    windows = _window(to, a["coord"], extents, rank, span), _window(source, a["c_coord"], extents, None, span)
    r.b.emit(ir.Do("reduce", windows, (("shape", extents), ("op", a["op"])), span))


def _all_reduce(r: Expressions, a: Arguments, span: ir.Span) -> None:
    r.b.require("all_reduce", span)
    c = _whole("all_reduce", a["c"], span)
    extents = shape("a window", a["shape"], span)
    collective.reduced("all_reduce", _declared(c), _declared(c), extents, a["op"], span)
    window = _window(c, a["coord"], extents, None, span)
    r.b.emit(ir.Do("all_reduce", (window,), (("shape", extents), ("op", a["op"])), span))


HANDLERS: dict[Any, Handler] = {language.reduce: _reduce, language.all_reduce: _all_reduce}
