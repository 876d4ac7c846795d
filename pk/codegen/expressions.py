"""Scalar expressions: IR -> C++ text with as few parentheses as C++ needs."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from pk.codegen.builtins import Builtins
from pk.codegen.facts import Facts
from pk.codegen.names import Names
from pk.codegen.params import Params
from pk.ir import nodes as ir

# C++ operators: text and precedence (higher binds tighter).
OPERATORS = {
    "*": ("*", 9), "/": ("/", 9), "//": ("/", 9), "%": ("%", 9), "+": ("+", 8), "-": ("-", 8),
    "<": ("<", 7), "<=": ("<=", 7), ">": (">", 7), ">=": (">=", 7), "==": ("==", 6), "!=": ("!=", 6),
    "and": ("&&", 4), "or": ("||", 3),
}  # fmt: skip
ATOM, UNARY, ARGUMENT = 12, 10, 0


class Expressions:
    """Writes the scalar expressions of one role."""

    def __init__(self, params: Params, names: Names, facts: Facts, builtins: Builtins) -> None:
        self._params, self._names, self._facts, self._builtins = params, names, facts, builtins
        self.calls: Callable[[ir.Call], str] = _no_calls  # writes ops that yield scalars and index vectors

    def __call__(self, e: ir.Operand, above: int = ARGUMENT) -> str:
        """The text of ``e``, in parentheses if an operator of precedence ``above`` would tear it apart."""
        text, precedence = self._write(e)
        return f"({text})" if precedence < above else text

    def _write(self, e: ir.Operand) -> tuple[str, int]:
        if isinstance(e, ir.Const):
            return literal(e), ATOM if not isinstance(e.value, bool) and e.value >= 0 else UNARY
        if isinstance(e, ir.Var):
            return self._names.local(e.name), ATOM
        if isinstance(e, ir.Dim):
            return f"p.{self._params.member(f'{e.tensor}.{e.axis}')}", ATOM
        if isinstance(e, ir.Param):
            return f"p.{self._params.member(e.name)}", ATOM
        if isinstance(e, ir.Rank | ir.World):
            return self._builtins(e), ATOM
        if isinstance(e, ir.Unary):
            return self._unary(e)
        if isinstance(e, ir.Binary):
            return self._binary(e)
        if isinstance(e, ir.Select):
            return f"{self(e.cond, 3)} ? {self(e.x, 2)} : {self(e.y, 2)}", 1
        if isinstance(e, ir.Call):
            return self.calls(e), ATOM
        raise AssertionError(f"not a scalar expression: {e!r}")

    def _unary(self, e: ir.Unary) -> tuple[str, int]:
        if e.op == "abs":
            return f"abs({self(e.x)})", ATOM
        return f"{'!' if e.op == 'not' else '-'}{self(e.x, UNARY + 1)}", UNARY

    def _binary(self, e: ir.Binary) -> tuple[str, int]:
        if (
            (ceiling := _ceiling_division(e))
            and self._facts.is_natural(ceiling[0])
            and self._facts.is_natural(ceiling[1])
        ):
            return self._function("ceil_div", *ceiling)
        if e.op in ("min", "max"):
            return self._function(e.op, e.x, e.y)
        if e.op == "/" and e.type.dtype.kind == "float":
            return f"{self._as_float(e.x, 9)} / {self._as_float(e.y, 10)}", 9
        if e.op in ("//", "%") and not self._facts.plain_division(e):
            return self._function("floor_div" if e.op == "//" else "floor_mod", e.x, e.y)
        if e.op == "+" and isinstance(e.y, ir.Const) and e.y.value == 0:
            return self._write(e.x)
        text, precedence = OPERATORS[e.op]
        # The right operand of an operator of the same rank keeps its parentheses: a - (b - c).
        return f"{self(e.x, precedence)} {text} {self(e.y, precedence + 1)}", precedence

    def _function(self, name: str, *arguments: ir.Expr) -> tuple[str, int]:
        return f"{name}({', '.join(map(self, arguments))})", ATOM

    def _as_float(self, e: ir.Expr, above: int) -> str:
        return self(e, above) if e.type.dtype.kind == "float" else f"float({self(e)})"


def _no_calls(e: ir.Call) -> str:
    raise AssertionError(f"not a scalar expression: {e!r}")


def literal(e: ir.Const) -> str:
    """A C++ literal of the value and type of ``e``."""
    if isinstance(e.value, bool):
        return "true" if e.value else "false"
    if e.type.dtype.kind != "float":
        return int_literal(int(e.value))
    return float_literal(float(e.value))


def int_literal(value: int) -> str:
    """A C++ ``int`` literal; the least one is no negated ``int``."""
    return str(value) if value != -(2**31) else "(-2147483647 - 1)"


def float_literal(value: float) -> str:
    """A C++ ``float`` literal of ``value`` rounded to float32; infinities, NaN and subnormals by their bits."""
    if value != value:
        return "__int_as_float(0x7fffffff)"
    rounded = ctypes.c_float(value).value
    if rounded and not _SMALLEST <= abs(rounded) <= _LARGEST:
        return f"__int_as_float({struct.unpack('<I', struct.pack('<f', rounded))[0]:#010x})"
    # Halfway between two floats the decimals of ``value`` may lie on either side; beyond the largest they are refused.
    exact = value if abs(value) <= _LARGEST and not _halfway(value, rounded) else rounded
    return f"{exact if rounded else rounded!r}f"


_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal float32


def _halfway(value: float, rounded: float) -> bool:
    """Whether ``value`` lies in the middle between ``rounded``, the nearest float32, and another one."""
    return rounded != value and ctypes.c_float(2 * value - rounded).value == 2 * value - rounded


def _ceiling_division(e: ir.Binary) -> tuple[ir.Expr, ir.Expr] | None:
    """(x, d) if ``e`` is written ``(x + d - 1) // d`` in one of the ways that folding leaves it."""
    if e.op != "//" or not isinstance(e.x, ir.Binary):
        return None
    top, d = e.x, e.y
    if top.op == "+" and isinstance(d, ir.Const) and top.y == ir.Const(int(d.value) - 1, d.type) and d.value > 1:
        return top.x, d
    if top.op == "-" and top.y == ir.const(1) and isinstance(top.x, ir.Binary) and top.x.op == "+" and top.x.y == d:
        return top.x.x, d
    return None
