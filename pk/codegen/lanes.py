"""Index vectors as C++: values that carry arithmetic operators, and the operands of ops that act lane by lane."""

from __future__ import annotations

from dataclasses import replace

from pk.codegen import render
from pk.codegen.direct import Direct
from pk.codegen.expressions import Expressions
from pk.codegen.operands import At, Operands
from pk.ir import nodes as ir
from pk.ir import vectors
from pk.ir.types import Tile, Type

STATEMENTS = frozenset({"gather_async", "scatter_async", "store_elements", *vectors.COUNTER_OPS})
VALUES = frozenset({"load_elements", "fetch_add"})


def cuda_type(kind: Type) -> str:
    """The C++ type of a scalar or an index vector."""
    return f"index_vector<{kind.dtype.cuda}, {kind.cols}>" if isinstance(kind, Tile) else kind.dtype.cuda


def has_effect(e: ir.Operand) -> bool:
    """Whether evaluating ``e`` changes anything, so that it must be done though nobody reads the value."""
    return isinstance(e, ir.Call) and e.op == "fetch_add"


class Lanes:
    """Writes the vector ops of one role; expressions of index vectors are written by ``Expressions``."""

    def __init__(self, scalar: Expressions, operand: Operands, direct: Direct) -> None:
        self._scalar, self._operand, self._direct = scalar, operand, direct

    def writes(self, e: ir.Call) -> bool:
        """Whether ``e`` is a value of this module's."""
        return e.op in VALUES or vectors.is_vector(e.type)

    def call(self, e: ir.Call) -> str:
        """The text of a value."""
        if e.op == "iota":
            assert isinstance(e.type, Tile)
            return f"iota<{e.type.cols}>()"
        if e.op == "full":
            assert isinstance(e.type, Tile)
            return f"filled_vector<int, {e.type.cols}>({e.attr('value')})"
        if e.op == "where":
            return f"where({', '.join(map(self._scalar, e.operands))})"
        return render.op(e.op, *map(self._value, e.operands), type=e.type, **dict(e.attrs))

    def operands(self, s: ir.Do) -> list[object]:
        """The operands of a statement, as its macro wants them."""
        return [self._value(o) for o in s.operands]

    def at(self, s: ir.Do, at: At) -> At:
        """``at``, with the number of elements that the op acts on."""
        if s.op in vectors.ROW_OPS:  # as many as the tile has rows
            return at
        return replace(at, lanes=vectors.lanes(f"an operand of pk.{s.op}", s.operands, s.span))

    def _value(self, o: ir.Operand) -> object:
        return self._direct(o) if isinstance(o, ir.Memory) else self._operand(o)
