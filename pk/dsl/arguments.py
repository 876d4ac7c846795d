"""What an argument must be: an integer, a constant, a shape, a dtype."""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.dsl.values import describe, is_expr, is_scalar
from pk.ir import index
from pk.ir import nodes as ir
from pk.ir.types import INT, DType


def integer(what: str, value: Any, span: ir.Span) -> ir.Expr:
    """``value`` as an int32 expression."""
    if is_scalar(value) and index.scalar_type(value) == INT:
        return index.lift(value, span)
    raise errors.WrongOperand(f"{what} is {describe(value)}", span, "It must be an integer.")


def constant(what: str, value: Any, span: ir.Span) -> int:
    """``value`` as a Python int."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if is_expr(value):
        raise errors.NotConstant(
            f"{what} is {describe(value)}", span, "It must be a compile-time constant: a number or a constexpr."
        )
    raise errors.WrongOperand(f"{what} is {describe(value)}", span, "It must be an int.")


def shape(what: str, value: Any, span: ir.Span) -> tuple[int, ...]:
    """``value`` as a tile shape."""
    entries = value if isinstance(value, tuple | list) else (value,)
    return tuple(constant(f"an extent of {what}", e, span) for e in entries)


def dtype(what: str, value: Any, span: ir.Span) -> DType:
    """``value`` as an element type."""
    if isinstance(value, DType):
        return value
    raise errors.WrongOperand(
        f"the dtype of {what} is {describe(value)}", span, "Use a pk dtype such as pk.bfloat16, or x.dtype."
    )
