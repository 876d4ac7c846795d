"""Integer expressions as polynomials: the normal form in which equal values look equal.

A polynomial is a sum of monomials with integer coefficients; a monomial is a product of atoms.  Atoms are what
arithmetic cannot open: variables, dims, rank, world, floor divisions, and *indicators*, conditions that count 0 or 1.
An indicator times itself is itself, which is what lets ``if`` branches be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from pk.ir import index
from pk.ir import nodes as ir
from pk.ir.types import BOOL, INT

Monomial = tuple[ir.Expr, ...]
MAX_PRODUCT = 1024  # terms; a longer product stays closed


@dataclass(frozen=True)
class Poly:
    """``terms``: coefficient (not 0) of each monomial, whose atoms are sorted by their text."""

    terms: Mapping[Monomial, int] = field(default_factory=dict)

    @staticmethod
    def constant(value: int) -> Poly:
        """A number."""
        return Poly({(): value} if value else {})

    @staticmethod
    def atom(e: ir.Expr) -> Poly:
        """One atom."""
        return Poly({(e,): 1})

    def __add__(self, other: Poly) -> Poly:
        terms = dict(self.terms)
        for monomial, c in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + c
        return Poly({m: c for m, c in terms.items() if c})

    def __neg__(self) -> Poly:
        return Poly({m: -c for m, c in self.terms.items()})

    def __sub__(self, other: Poly) -> Poly:
        return self + -other

    def __mul__(self, other: Poly) -> Poly:
        result = Poly()
        for m, a in self.terms.items():
            for n, b in other.terms.items():
                result = result + Poly({_product(m, n): a * b})
        return result

    @property
    def value(self) -> int | None:
        """The number it is, if it is one."""
        if not self.terms:
            return 0
        return self.terms.get(()) if set(self.terms) == {()} else None

    def mentions(self, name: str) -> bool:
        """Whether variable ``name`` occurs, also inside the text that names a sum (``balance``)."""
        from pk.ir.split import walk

        variables = (e.name for m in self.terms for e in walk(m) if isinstance(e, ir.Var))
        return any(v == name or (v.startswith("sum(") and name in v) for v in variables)

    def ordered(self) -> list[tuple[Monomial, int]]:
        """Terms in a fixed order: higher degrees first, then by text."""
        return sorted(self.terms.items(), key=lambda t: (-len(t[0]), [index.to_text(a) for a in t[0]]))

    def expression(self) -> ir.Expr:
        """Back to an expression, in a fixed order."""
        total: index.Value = 0
        for monomial, c in self.ordered():
            product: index.Value = 1
            for atom in monomial:
                factor: index.Value = atom
                if atom.type == BOOL:
                    factor = ir.Select(atom, ir.const(1), ir.const(0), INT)
                product = index.binary("*", product, factor)
            product = index.binary("*", product, abs(c))
            total = index.binary("+" if c > 0 else "-", total, product)
        return index.lift(total)


def _product(m: Monomial, n: Monomial) -> Monomial:
    atoms = [*m, *(a for a in n if a.type != BOOL or a not in m)]
    return tuple(sorted(atoms, key=index.to_text))


def polynomial(e: ir.Expr, env: Mapping[str, Poly] | None = None) -> Poly:
    """The normal form of an integer expression; variables in ``env`` stand for what it says."""
    env = env or {}
    if isinstance(e, ir.Const):
        return Poly.constant(int(e.value))
    if isinstance(e, ir.Var) and e.name in env:
        return env[e.name]
    if e.type == BOOL:
        return indicator(e, env)
    if isinstance(e, ir.Unary) and e.op == "-":
        return -polynomial(e.x, env)
    if isinstance(e, ir.Unary):
        return Poly.atom(ir.Unary(e.op, polynomial(e.x, env).expression(), e.type))
    if isinstance(e, ir.Select):
        cond = indicator(e.cond, env)
        x, y = polynomial(e.x, env), polynomial(e.y, env)
        return cond * x + (Poly.constant(1) - cond) * y
    if isinstance(e, ir.Binary) and e.type == INT:
        return _binary(e, env)
    return Poly.atom(e)


def _binary(e: ir.Binary, env: Mapping[str, Poly]) -> Poly:
    x, y = polynomial(e.x, env), polynomial(e.y, env)
    if e.op in ("+", "-"):
        return x + y if e.op == "+" else x - y
    if e.op == "*" and len(x.terms) * len(y.terms) <= MAX_PRODUCT:
        return x * y
    divisor = y.value
    if divisor is not None and divisor > 0 and e.op in ("//", "%"):
        return _divide(e.op, x, divisor)
    if e.op in ("min", "max") and (known := (x - y).value) is not None:
        return x if (known <= 0) == (e.op == "min") else y
    a, b = x.expression(), y.expression()
    if e.op in ("min", "max", "*") and index.to_text(a) > index.to_text(b):
        a, b = b, a
    folded = index.binary(e.op, a, b) if divisor != 0 else ir.Binary(e.op, a, b, INT)
    return Poly.atom(folded) if not isinstance(folded, int | float) else Poly.constant(int(folded))


def _divide(op: str, x: Poly, by: int) -> Poly:
    """x // by or x % by: what divides evenly comes out of the division."""
    even = Poly({m: c - c % by for m, c in x.terms.items() if c - c % by})
    rest = x - even
    quotient = Poly({m: c // by for m, c in even.terms.items()})
    if rest.value is not None:  # 0 <= rest < by
        remainder = Poly()
    else:
        inside = ir.Binary("//", rest.expression(), ir.const(by), INT)
        remainder = Poly.atom(inside)
    result = quotient + remainder
    return result if op == "//" else x - result * Poly.constant(by)


def indicator(e: ir.Expr, env: Mapping[str, Poly] | None = None) -> Poly:
    """1 where condition ``e`` holds, else 0."""
    env = env or {}
    one = Poly.constant(1)
    if isinstance(e, ir.Const):
        return Poly.constant(int(bool(e.value)))
    if isinstance(e, ir.Var) and e.name in env:
        return env[e.name]
    if isinstance(e, ir.Unary) and e.op == "not":
        return one - indicator(e.x, env)
    if isinstance(e, ir.Select):
        cond = indicator(e.cond, env)
        return cond * indicator(e.x, env) + (one - cond) * indicator(e.y, env)
    if isinstance(e, ir.Binary) and e.op in ("and", "or"):
        x, y = indicator(e.x, env), indicator(e.y, env)
        return x * y if e.op == "and" else x + y - x * y
    if isinstance(e, ir.Binary) and e.op in ir.COMPARISONS and {e.x.type, e.y.type} <= {INT, BOOL}:
        return _compare(e.op, polynomial(e.x, env), polynomial(e.y, env))
    return Poly.atom(e)


def _compare(op: str, x: Poly, y: Poly) -> Poly:
    one = Poly.constant(1)
    if op in ("!=", ">=", ">"):
        opposite = {"!=": "==", ">=": "<", ">": "<="}[op]
        return one - _compare(opposite, x, y)
    if op == "<=":  # on integers x <= y is x < y + 1
        return _compare("<", x, y + one)
    d = x - y
    if d.value is not None:
        return Poly.constant(int(index.OPS[op](d.value, 0)))
    if op == "==":
        return Poly.atom(_against_zero("==", d if d.ordered()[0][1] > 0 else -d))
    if d.ordered()[0][1] > 0:
        return Poly.atom(_against_zero("<", d))
    return one - Poly.atom(_against_zero("<", -d - one))  # d < 0 is not (-d - 1 < 0)


def _against_zero(op: str, d: Poly) -> ir.Expr:
    """``d op 0``, with what d subtracts on the right."""
    left = Poly({m: c for m, c in d.terms.items() if c > 0})
    right = Poly({m: -c for m, c in d.terms.items() if c < 0})
    return ir.Binary(cast(ir.BinaryOp, op), left.expression(), right.expression(), BOOL)
