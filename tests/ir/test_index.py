"""Scalar expressions: what folds, what simplifies, what they evaluate to, how they print."""

from __future__ import annotations

import random

import pytest

from pk.ir import index
from pk.ir import nodes as ir
from pk.ir.poly import indicator, polynomial
from pk.ir.types import BOOL, FLOAT, INT

A, B, M, P = ir.Dim("a", 0), ir.Dim("a", 1), ir.Var("m", INT), ir.Param("p", INT)
LEAVES: list[index.Value] = [A, B, M, P, ir.Rank(), ir.World(), 0, 1, 2, 3, -4, 64]
ARITHMETIC = ["+", "-", "*", "//", "%", "min", "max"]
ENV = {"a.0": 7, "a.1": 12, "m": 5, "p": -3, "rank": 1, "world": 4}


def grow(gen: random.Random, depth: int, *, condition: bool = False) -> index.Value:
    """A random expression, made as the front end makes them."""
    if condition:
        x, y = grow(gen, depth - 1), grow(gen, depth - 1)
        return index.binary(gen.choice(ir.COMPARISONS), x, y)
    if depth == 0:
        return gen.choice(LEAVES)
    if gen.random() < 0.15:
        return index.select(grow(gen, depth, condition=True), grow(gen, depth - 1), grow(gen, depth - 1))
    op = gen.choice(ARITHMETIC)
    x, y = grow(gen, depth - 1), gen.choice([2, 3, 64, ir.World()]) if op in ("//", "%") else grow(gen, depth - 1)
    return index.binary(op, x, y)


def environment(gen: random.Random) -> dict[str, int]:
    return {name: gen.randrange(1, 9) if name == "world" else gen.randrange(-9, 99) for name in ENV}


@pytest.mark.parametrize("seed", range(20))
def test_simplify_and_text_keep_the_value(seed: int) -> None:
    gen = random.Random(seed)
    for _ in range(12):
        e = index.lift(grow(gen, 3, condition=gen.random() < 0.3))
        simple = index.simplify(e)
        assert index.simplify(simple) == simple
        for _ in range(4):
            env = environment(gen)
            value = index.evaluate(e, env)
            assert index.evaluate(simple, env) == value, index.to_text(e)
            names = {"m": env["m"], "p": env["p"], "rank": env["rank"], "world": env["world"], "a": _Shape(env)}
            text = index.to_text(e)
            assert eval(text, {**names, "cdiv": lambda x, y: -(-x // y), "min": min, "max": max}) == value, text


class _Shape:
    def __init__(self, env: dict[str, int]) -> None:
        self.shape = (env["a.0"], env["a.1"])


@pytest.mark.parametrize("seed", range(20))
def test_equal_conditions_have_equal_indicators(seed: int) -> None:
    gen = random.Random(seed)
    x, y = index.lift(grow(gen, 2)), index.lift(grow(gen, 2))
    for op, opposite, turned in (("<", ">=", ">"), ("<=", ">", ">="), ("==", "!=", "==")):
        here = indicator(ir.Binary(op, x, y, BOOL))  # type: ignore[arg-type]
        assert here == indicator(ir.Binary(turned, y, x, BOOL))  # type: ignore[arg-type]
        assert here + indicator(ir.Binary(opposite, x, y, BOOL)) == polynomial(ir.const(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "printed"),
    [
        (index.binary("*", index.binary("+", index.binary("*", M, 4), 2), 64), "m * 256 + 128"),
        (index.binary("+", index.binary("-", M, 5), 3), "m - 2"),
        (index.binary("+", 3, index.binary("-", M, 3)), "m"),
        (index.binary("*", M, 0), "0"),
        (index.binary("//", M, 1), "m"),
        (index.binary("-", M, M), "0"),
        (index.cdiv(A, 64), "cdiv(a.shape[0], 64)"),
        (index.cdiv(A, ir.World()), "cdiv(a.shape[0], world)"),
        (index.binary("and", index.binary("<", 0, M), True), "0 < m"),
        (index.binary("or", index.binary("<", 0, M), True), "True"),
        (index.select(index.binary("<", M, 3), A, A), "a.shape[0]"),
        (index.binary("*", index.binary("+", M, P), A), "(m + p) * a.shape[0]"),
        (index.binary("-", M, index.binary("-", P, A)), "m - (p - a.shape[0])"),
        (index.negate(index.binary("+", M, P)), "-(m + p)"),
    ],
)
def test_folding(made: index.Value, printed: str) -> None:
    assert index.to_text(index.lift(made)) == printed


def test_dims_print_as_the_user_writes_them() -> None:
    assert [index.dim_name(axis, 4) for axis in range(4)] == ["batch", "depth", "rows", "cols"]
    assert index.to_text(B, {"a": 3}) == "a.rows"


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (index.cdiv(A, 64), index.binary("//", index.binary("+", 63, A), 64)),
        (index.binary("//", index.binary("+", index.binary("*", M, 8), 5), 4),
         index.binary("+", index.binary("*", 2, M), 1)),
        (index.binary("%", index.binary("+", index.binary("*", M, 8), P), 4), index.binary("%", P, 4)),
        (index.binary("*", index.binary("+", M, P), index.binary("-", M, P)),
         index.binary("-", index.binary("*", M, M), index.binary("*", P, P))),
        (index.binary("min", M, P), index.binary("min", P, M)),
        (index.binary("max", M, index.binary("+", M, 2)), index.binary("+", M, 2)),
    ],
)  # fmt: skip
def test_normal_form(x: index.Value, y: index.Value) -> None:
    assert polynomial(index.lift(x)) == polynomial(index.lift(y))


def test_evaluation_is_lazy_where_python_is() -> None:
    division = ir.Binary("//", A, ir.Binary("-", ir.World(), ir.const(1), INT), INT)
    guarded = ir.Select(ir.Binary("==", ir.World(), ir.const(1), BOOL), A, division, INT)
    assert index.evaluate(guarded, {"world": 1, "a.0": 6}) == 6
    with pytest.raises(ZeroDivisionError):
        index.evaluate(division, {"world": 1, "a.0": 6})
    with pytest.raises(KeyError):
        index.evaluate(A, {})


def test_floats() -> None:
    scale = ir.Param("s", FLOAT)
    e = index.lift(index.binary("*", index.binary("+", scale, 1), 0.5))
    assert e.type == FLOAT
    assert index.evaluate(e, {"s": 2.0}) == 1.5
    assert index.simplify(e) == e
    assert index.lift(index.binary("/", M, 2)).type == FLOAT
