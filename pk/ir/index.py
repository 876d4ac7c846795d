"""Scalar arithmetic of the IR: build with folding, evaluate, simplify, print.

``binary`` and friends take and return *folded* values: a Python number where everything is known, else an expression.
The light simplification here keeps what the user wrote recognisable (``n * 256 + 64``); :func:`simplify` goes further,
to a polynomial normal form, and is meant for comparing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

from pk.ir import nodes as ir
from pk.ir.types import BOOL, FLOAT, INT, Scalar, Tile

Number = int | float | bool
Value = Number | ir.Expr

OPS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "and": lambda x, y: x and y,
    "or": lambda x, y: x or y,
}
"""What each binary operator does to Python numbers; ``//`` and ``%`` are floor division, as in the IR."""


# ----------------------------------------------------------------------------------------------- building
def lift(value: Value, span: ir.Span = ir.NOWHERE) -> ir.Expr:
    """The expression for a folded value."""
    return ir.const(value, span) if isinstance(value, int | float) else value


def lower(e: Value) -> Value:
    """The folded value of an expression: a Python number if it is a literal."""
    return e.value if isinstance(e, ir.Const) else e


def scalar_type(value: Value) -> Scalar:
    """The scalar type of a folded value."""
    if isinstance(value, int | float):
        return BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
    assert isinstance(value.type, Scalar), f"{value} is a tile"
    return value.type


def binary(op: str, x: Value, y: Value, span: ir.Span = ir.NOWHERE) -> Value:
    """``x op y``, folded and lightly simplified.  Raises ZeroDivisionError where folding divides by zero."""
    x, y = lower(x), lower(y)
    if isinstance(x, int | float) and isinstance(y, int | float):
        return cast(Number, OPS[op](x, y))
    if op in ir.COMPARISONS or op in ("and", "or"):
        return _logical(op, x, y, span)
    x, y = _number(x, span), _number(y, span)
    if scalar_type(x) != INT or scalar_type(y) != INT or op == "/":
        return ir.Binary(cast(ir.BinaryOp, op), lift(x, span), lift(y, span), FLOAT, span)
    if op == "+":
        return _add(x, y, span)
    if op == "-":
        return _add(x, -y, span) if isinstance(y, int) else 0 if x == y else _plain("-", x, y, span)
    if op == "*":
        return _multiply(x, y, span)
    if op in ("//", "%") and isinstance(y, int) and y == 1:
        return x if op == "//" else 0
    if op in ("min", "max") and x == y:
        return x
    return _plain(op, x, y, span)


def negate(x: Value, span: ir.Span = ir.NOWHERE) -> Value:
    """``-x``."""
    x = lower(x)
    if isinstance(x, int | float):
        return -x
    x = cast(ir.Expr, _number(x, span))
    return ir.Unary("-", x, x.type, span)


def logical_not(x: Value, span: ir.Span = ir.NOWHERE) -> Value:
    """``not x``."""
    x = lower(x)
    if isinstance(x, int | float):
        return not x
    opposite = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
    if isinstance(x, ir.Binary) and x.op in opposite and scalar_type(x.x) != FLOAT and scalar_type(x.y) != FLOAT:
        return ir.Binary(cast(ir.BinaryOp, opposite[x.op]), x.x, x.y, BOOL, span)
    return ir.Unary("not", condition(x, span), BOOL, span)


def condition(x: Value, span: ir.Span = ir.NOWHERE) -> ir.Expr:
    """``x`` as a bool: numbers are true when not zero."""
    x = lower(x)
    if isinstance(x, int | float):
        return ir.const(bool(x), span)
    if x.type == BOOL:
        return x
    return ir.Binary("!=", x, ir.Const(0, INT, span), BOOL, span)


def select(cond: Value, x: Value, y: Value, span: ir.Span = ir.NOWHERE) -> Value:
    """``x if cond else y``; int and float mix to float."""
    cond = lower(cond)
    if isinstance(cond, int | float):
        return x if cond else y
    if lower(x) == lower(y) and scalar_type(x) == scalar_type(y):
        return x
    kinds = {scalar_type(x), scalar_type(y)}
    kind = kinds.pop() if len(kinds) == 1 else FLOAT if FLOAT in kinds else INT
    return ir.Select(condition(cond, span), lift(x, span), lift(y, span), kind, span)


def cdiv(x: Value, y: Value, span: ir.Span = ir.NOWHERE) -> Value:
    """The quotient rounded up."""
    return binary("//", binary("+", x, binary("-", y, 1, span), span), y, span)


def _plain(op: str, x: Value, y: Value, span: ir.Span) -> Value:
    return ir.Binary(cast(ir.BinaryOp, op), lift(x, span), lift(y, span), INT, span)


def _number(x: Value, span: ir.Span) -> Value:
    """A bool in arithmetic counts 0 or 1."""
    if isinstance(x, bool):
        return int(x)
    if not isinstance(x, int | float) and x.type == BOOL:
        return ir.Select(x, ir.const(1, span), ir.const(0, span), INT, span)
    return x


def _logical(op: str, x: Value, y: Value, span: ir.Span) -> Value:
    if op in ("and", "or"):
        for this, other in ((x, y), (y, x)):
            if isinstance(this, int | float):
                return condition(other, span) if bool(this) == (op == "and") else op == "or"
        return ir.Binary(cast(ir.BinaryOp, op), condition(x, span), condition(y, span), BOOL, span)
    return ir.Binary(cast(ir.BinaryOp, op), lift(x, span), lift(y, span), BOOL, span)


def _split(x: Value) -> tuple[Value, int]:
    """``x`` as (rest, constant): what was added last."""
    if isinstance(x, int):
        return 0, x
    if isinstance(x, ir.Binary) and x.op in ("+", "-") and isinstance(x.y, ir.Const) and isinstance(x.y.value, int):
        return lower(x.x), x.y.value if x.op == "+" else -x.y.value
    return x, 0


def _add(x: Value, y: Value, span: ir.Span) -> Value:
    (x, a), (y, b) = _split(x), _split(y)
    c = a + b
    rest: Value = y if x == 0 else x if y == 0 else _plain("+", x, y, span)
    if isinstance(rest, int):
        return rest + c
    if c == 0:
        return rest
    return _plain("+", rest, c, span) if c > 0 or c == -(2**31) else _plain("-", rest, -c, span)  # 2**31 is no int32


def _multiply(x: Value, y: Value, span: ir.Span) -> Value:
    if isinstance(x, int):
        x, y = y, x
    if isinstance(x, int) and isinstance(y, int):
        return x * y
    if not isinstance(y, int):
        return _plain("*", x, y, span)
    if y in (0, 1):
        return x if y else 0
    if isinstance(x, ir.Binary) and x.op == "*" and isinstance(x.y, ir.Const):
        return _multiply(lower(x.x), int(x.y.value) * y, span)
    if isinstance(x, ir.Binary) and x.op in ("+", "-") and (_scaled(x.x) or _scaled(x.y)):
        return binary(x.op, _multiply(lower(x.x), y, span), _multiply(lower(x.y), y, span), span)
    return _plain("*", x, y, span)


def _scaled(x: ir.Expr) -> bool:
    """Whether multiplying ``x`` by a constant folds into it."""
    if isinstance(x, ir.Const):
        return True
    if isinstance(x, ir.Binary) and x.op in ("+", "-"):
        return _scaled(x.x) or _scaled(x.y)
    return isinstance(x, ir.Binary) and x.op == "*" and isinstance(x.y, ir.Const)


# ---------------------------------------------------------------------------------------------- evaluating
def evaluate(e: ir.Expr, env: Mapping[str, Number]) -> Any:
    """The value of a scalar expression.

    ``env`` holds dims as ``"a.0"``, ``"rank"``, ``"world"``, parameters and variables by name.  Raises KeyError for
    a name that is not in it and TypeError for an expression that is no scalar.  ``Select``, ``and`` and ``or`` evaluate
    only what they need.
    """
    if isinstance(e, ir.Const):
        return e.value
    if isinstance(e, ir.Dim):
        return env[f"{e.tensor}.{e.axis}"]
    if isinstance(e, ir.Rank):
        return env["rank"]
    if isinstance(e, ir.World):
        return env["world"]
    if isinstance(e, ir.Param | ir.Var):
        return env[e.name]
    if isinstance(e, ir.Unary):
        x = evaluate(e.x, env)
        return -x if e.op == "-" else abs(x) if e.op == "abs" else not x
    if isinstance(e, ir.Select):
        return evaluate(e.x if evaluate(e.cond, env) else e.y, env)
    if isinstance(e, ir.Binary):
        if e.op in ("and", "or"):
            x = bool(evaluate(e.x, env))
            return bool(evaluate(e.y, env)) if x == (e.op == "and") else x
        return OPS[e.op](evaluate(e.x, env), evaluate(e.y, env))
    raise TypeError(f"{type(e).__name__} is not a scalar expression: {e}")


def substitute(e: ir.Expr, values: Mapping[str, ir.Expr]) -> ir.Expr:
    """``e`` with variables replaced by expressions."""
    if isinstance(e, ir.Var):
        return values.get(e.name, e)
    if isinstance(e, ir.Unary):
        x = substitute(e.x, values)
        return (
            lift(logical_not(x, e.span) if e.op == "not" else negate(x, e.span))
            if e.op != "abs"
            else ir.Unary("abs", x, e.type, e.span)
        )
    if isinstance(e, ir.Binary):
        return lift(binary(e.op, substitute(e.x, values), substitute(e.y, values), e.span), e.span)
    if isinstance(e, ir.Select):
        parts = (substitute(e.cond, values), substitute(e.x, values), substitute(e.y, values))
        return lift(select(*parts, e.span), e.span)
    return e


# ------------------------------------------------------------------------------------------------ printing
_PRECEDENCE = {
    "or": 1, "and": 2, "not": 3,
    "<": 4, "<=": 4, ">": 4, ">=": 4, "==": 4, "!=": 4,
    "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6,
}  # fmt: skip


def to_text(e: ir.Operand, dims: Mapping[str, int] | None = None) -> str:
    """``e`` in Python's notation, with no needless parentheses.

    A window of memory prints as ``c@rank[row, col]`` (``c@all`` on every rank), a shared tile as ``pipeline.field``.

    ``dims``: number of dimensions of each tensor; with it a dim prints as ``a.rows``, without as ``a.shape[0]``.
    """
    return _text(e, 0, dims or {})


def dim_name(axis: int, ndim: int | None) -> str:
    """What the user writes for dimension ``axis``."""
    names = {-1: "cols", -2: "rows", -3: "depth", -4: "batch"}
    return f"shape[{axis}]" if ndim is None else names.get(axis - ndim, f"shape[{axis}]")


def _text(e: ir.Operand, outer: int, dims: Mapping[str, int]) -> str:
    if isinstance(e, ir.Const):
        return repr(e.value) if not isinstance(e.value, int) or e.value >= 0 or outer < 6 else f"({e.value})"
    if isinstance(e, ir.Var | ir.Param):
        return e.name
    if isinstance(e, ir.Dim):
        return f"{e.tensor}.{dim_name(e.axis, dims.get(e.tensor))}"
    if isinstance(e, ir.Rank):
        return "rank"
    if isinstance(e, ir.World):
        return "world"
    if isinstance(e, ir.Select):
        if _is_indicator(e):
            return _text(e.cond, outer, dims) if outer == 0 else f"({_text(e.cond, 0, dims)})"
        text = f"{_text(e.x, 1, dims)} if {_text(e.cond, 1, dims)} else {_text(e.y, 0, dims)}"
        return f"({text})" if outer else text
    if isinstance(e, ir.Unary):
        return _unary_text(e, outer, dims)
    if isinstance(e, ir.Binary):
        return _binary_text(e, outer, dims)
    return _operand_text(e, dims)


def _operand_text(e: ir.Call | ir.Memory | ir.Choose | ir.Shared | ir.Signal, dims: Mapping[str, int]) -> str:
    def inside(operands: tuple[ir.Operand, ...]) -> str:
        return ", ".join(_text(o, 0, dims) for o in operands)

    if isinstance(e, ir.Shared):
        return e.name
    if isinstance(e, ir.Signal):
        return f"{e.signals}[{inside(e.index)}]"
    if isinstance(e, ir.Choose):
        return f"({_text(e.x, 1, dims)} if {_text(e.cond, 1, dims)} else {_text(e.y, 0, dims)})"
    if isinstance(e, ir.Memory):
        rank = "@all" if e.everyone else "" if e.rank is None else f"@{_text(e.rank, 9, dims)}"
        return f"{e.tensor}{rank}[{inside(e.coord)}]"
    parts = [_text(o, 0, dims) for o in e.operands] + [f"{k}={v!r}" for k, v in e.attrs]
    if e.op == "cast":
        parts.append(str(cast(Tile, e.type).dtype))
    return f"{e.op}({', '.join(parts)})"


def _is_indicator(e: ir.Select) -> bool:
    return isinstance(e.x, ir.Const) and isinstance(e.y, ir.Const) and (e.x.value, e.y.value) == (1, 0)


def _unary_text(e: ir.Unary, outer: int, dims: Mapping[str, int]) -> str:
    if e.op == "abs":
        return f"abs({_text(e.x, 0, dims)})"
    text = f"not {_text(e.x, 3, dims)}" if e.op == "not" else f"-{_text(e.x, 7, dims)}"
    return f"({text})" if outer > (3 if e.op == "not" else 6) else text


def _binary_text(e: ir.Binary, outer: int, dims: Mapping[str, int]) -> str:
    if e.op in ("min", "max"):
        return f"{e.op}({_text(e.x, 0, dims)}, {_text(e.y, 0, dims)})"
    if e.op == "//" and (numerator := _rounded_up(e)) is not None:
        return f"cdiv({_text(numerator, 0, dims)}, {_text(e.y, 0, dims)})"
    here = _PRECEDENCE[e.op]
    text = f"{_text(e.x, here, dims)} {e.op} {_text(e.y, here + 1, dims)}"
    return f"({text})" if outer > here else text


def _rounded_up(e: ir.Binary) -> ir.Expr | None:
    """x if ``e`` is (x + y - 1) // y, for a literal or any other y."""
    if not (isinstance(e.x, ir.Binary) and isinstance(e.x.y, ir.Const)):
        return None
    top, last = e.x, e.x.y.value
    if isinstance(e.y, ir.Const):
        return top.x if top.op == "+" and last == e.y.value - 1 else None
    if top.op == "-" and last == 1 and isinstance(top.x, ir.Binary) and top.x.op == "+" and top.x.y == e.y:
        return top.x.x
    return None


# ---------------------------------------------------------------------------------------------- simplifying
def simplify(e: ir.Expr) -> ir.Expr:
    """The normal form of an integer or boolean expression: equal forms are equal values.

    Other scalars come back as they are.
    """
    from pk.ir.poly import indicator, polynomial

    if e.type == INT:
        return polynomial(e).expression()
    if e.type == BOOL:
        one = indicator(e)
        for found, value in ((one, True), (polynomial(ir.const(1)) - one, False)):
            if (
                len(found.terms) == 1
                and (atoms := next(iter(found.terms)))
                and found.terms[atoms] == 1
                and len(atoms) == 1
            ):
                return atoms[0] if value else lift(logical_not(atoms[0]))
        return lift(binary("==", one.expression(), 1))
    return e
