"""Scalar expressions in C++: parentheses, floor division, literals."""

from __future__ import annotations

import numpy as np
import pytest

from pk.artifact import Field
from pk.codegen.builtins import Builtins
from pk.codegen.expressions import Expressions, float_literal
from pk.codegen.facts import Facts
from pk.codegen.names import Names
from pk.codegen.params import Params
from pk.ir import nodes as ir
from pk.ir.types import BOOL, FLOAT, INT

A, N = ir.Dim("a", 0), ir.Param("n", INT)
ONE, TWO = ir.const(1), ir.const(2)


def binary(op: str, x: ir.Expr, y: ir.Expr) -> ir.Binary:
    return ir.Binary(op, x, y, BOOL if op in (*ir.COMPARISONS, "and", "or") else INT)  # type: ignore[arg-type]


def write(e: ir.Expr) -> str:
    params = Params((Field("a_rows", "int", 0, 4, "a.0"), Field("n", "int", 4, 4, "n")), 64)
    names, body = Names(), (ir.Assign(ir.Var("x", INT), e),)
    return Expressions(params, names, Facts.of(body), Builtins(body, names))(e)


@pytest.mark.parametrize(
    ("e", "text"),
    [
        (binary("-", A, binary("-", N, ONE)), "p.a_rows - (p.n - 1)"),
        (binary("-", binary("-", A, N), ONE), "p.a_rows - p.n - 1"),
        (binary("*", binary("+", A, ONE), TWO), "(p.a_rows + 1) * 2"),
        (binary("+", binary("*", A, TWO), ir.const(0)), "p.a_rows * 2"),
        (binary("//", binary("+", A, ir.const(63)), ir.const(64)), "ceil_div(p.a_rows, 64)"),
        (binary("//", binary("+", N, ir.const(63)), ir.const(64)), "floor_div(p.n + 63, 64)"),
        (binary("//", A, TWO), "p.a_rows / 2"),
        (binary("//", N, TWO), "floor_div(p.n, 2)"),
        (binary("%", binary("-", A, ONE), TWO), "floor_mod(p.a_rows - 1, 2)"),
        (binary("%", A, ir.const(-3)), "floor_mod(p.a_rows, -3)"),
        (binary("%", binary("+", ir.Rank(), A), ir.World()), "(rank + p.a_rows) % world"),
        (binary("//", A, binary("-", ir.World(), ONE)), "p.a_rows / (world - 1)"),
        (binary("//", A, binary("-", ir.World(), TWO)), "floor_div(p.a_rows, world - 2)"),
        (binary("min", A, binary("+", N, ONE)), "min(p.a_rows, p.n + 1)"),
        (binary("and", binary("<", A, N), binary("or", binary("==", A, ONE), binary(">", N, TWO))),
         "p.a_rows < p.n && (p.a_rows == 1 || p.n > 2)"),
        (ir.Unary("not", binary("<", A, N), BOOL), "!(p.a_rows < p.n)"),
        (ir.Unary("-", ir.Unary("-", N, INT), INT), "-(-p.n)"),
        (ir.Unary("abs", N, INT), "abs(p.n)"),
        (ir.Select(binary("<", A, N), A, ir.Select(binary(">", A, N), N, ONE, INT), INT),
         "p.a_rows < p.n ? p.a_rows : (p.a_rows > p.n ? p.n : 1)"),
        (binary("+", ir.Select(binary("<", A, N), ONE, TWO, INT), A), "(p.a_rows < p.n ? 1 : 2) + p.a_rows"),
        (ir.Binary("/", A, TWO, FLOAT), "float(p.a_rows) / float(2)"),
        (ir.const(True), "true"),
        (ir.const(-4), "-4"),
    ],
)  # fmt: skip
def test_text(e: ir.Expr, text: str) -> None:
    assert write(e) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0f"), (1e-30, "1e-30f"), (-2.5, "-2.5f"),
        (float("inf"), "__int_as_float(0x7f800000)"), (float("-inf"), "__int_as_float(0xff800000)"),
        (float("nan"), "__int_as_float(0x7fffffff)"),
    ],
)  # fmt: skip
def test_float_literals(value: float, text: str) -> None:
    assert float_literal(value) == text


def test_a_name_is_natural_only_if_every_definition_is() -> None:
    x, y = ir.Var("x", INT), ir.Var("y", INT)
    counting = (ir.Assign(x, ir.const(0)), ir.Assign(x, binary("+", x, ONE)), ir.Assign(y, binary("-", x, ONE)))
    facts = Facts.of(counting)
    assert facts.natural == {"x"}


def test_a_name_for_the_rank_is_known_as_such() -> None:
    me, other = ir.Var("me", INT), ir.Var("other", INT)
    facts = Facts.of((ir.Assign(me, ir.Rank()), ir.Assign(other, me), ir.Assign(other, ONE)))
    assert facts.own == {"me"}
    assert not facts.is_remote(ir.Memory("c", (), me))
    assert facts.is_remote(ir.Memory("c", (), other))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e39, "__int_as_float(0x7f800000)"), (-1e39, "__int_as_float(0xff800000)"),
        (3.4028236e38, "__int_as_float(0x7f800000)"), (3.4028235e38, "3.4028234663852886e+38f"),
        (-3.40282350e38, "-3.4028234663852886e+38f"), (1e-46, "0.0f"), (-1e-46, "-0.0f"), (5e-324, "0.0f"),
        (1e-45, "__int_as_float(0x00000001)"), (-1e-40, "__int_as_float(0x800116c2)"),
        (2.0**-126, "1.1754943508222875e-38f"),
        (0.1, "0.1f"), (1.4426950408889634, "1.4426950408889634f"), (1 + 2.0**-24, "1.0f"),
        (1 + 3 * 2.0**-24, "1.000000238418579f"),
        (1 + 2.0**-24 + 2.0**-50, "1.0000000596046457f"), (16777217.0, "16777216.0f"),
    ],
)  # fmt: skip
def test_float_literals_are_rounded_as_numpy_rounds(value: float, text: str) -> None:
    assert float_literal(value) == text
    if "0x" not in text:
        assert np.float32(text[:-1]) == np.float32(value)  # the decimals, rounded once by the compiler


def test_the_least_int_is_an_int_in_cpp() -> None:
    assert write(binary("+", A, ir.const(-(2**31)))) == "p.a_rows + (-2147483647 - 1)"
