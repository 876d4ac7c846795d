"""Fills and drains of a pipeline must be equal in number: both are counted as expressions and compared.

Sequences add, loops multiply (or sum over their variable), conditions count 0 or 1.  The comparison is made for every
task of every task loop, and for what a class does outside them.  Variables stand for the values they were assigned;
those that a loop changes are unknowns, the same for both sides where shared code reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pk import errors
from pk.ir import index
from pk.ir import nodes as ir
from pk.ir.poly import Poly, indicator, polynomial
from pk.ir.split import bodies, statements
from pk.ir.types import BOOL, INT, Scalar

Key = tuple[str, str]  # pipeline, mode
Counts = dict[Key, Poly]
MAX_TERMS = 64  # a longer value is taken as unknown
_HIDDEN = "\u200b"  # tells our names from the user's, and is taken out of messages


class _Env(Mapping[str, Poly]):
    """What variables stand for, computed when a count first needs it: most values never are."""

    def __init__(self, values: dict[str, Poly | Callable[[], Poly]] | None = None) -> None:
        self.known = values or {}

    def __getitem__(self, name: str) -> Poly:
        value = self.known[name]
        if not isinstance(value, Poly):
            value = self.known[name] = value()
        return value

    def __setitem__(self, name: str, value: Poly | Callable[[], Poly]) -> None:
        self.known[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self.known

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def copy(self) -> _Env:
        """What is known here; later assignments do not change it."""
        return _Env(dict(self.known))


def balance(kernel: ir.Kernel) -> None:
    """Raise Unbalanced for the first pipeline whose fills and drains are not equal in number."""
    dims = {t.name: t.ndim for t in kernel.tensors}
    env = _Env()
    counter = _Counter(dims)
    counter.block(kernel.prologue, env)
    for block in (*(c.body for c in kernel.communicators), kernel.compute):
        counter.spans.clear()
        counter.compare(counter.block(block, env.copy()), block)


@dataclass
class _Counter:
    dims: Mapping[str, int]
    spans: dict[Key, ir.Span] = field(default_factory=dict)  # the first fill or drain of each pipeline in the region
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def block(self, block: ir.Block, env: _Env, depth: int = 0) -> Counts:
        """Counts of a block; ``env`` is brought up to date."""
        total: Counts = {}
        for s in block:
            _add(total, self.statement(s, env, depth))
        return total

    def statement(self, s: ir.Statement, env: _Env, depth: int) -> Counts:
        if isinstance(s, ir.Assign):
            self.assign(s, env)
            return {}
        if isinstance(s, ir.Role):
            return self.block(s.body, env, depth)
        if isinstance(s, ir.Stage):
            key = (s.pipeline, s.mode)
            self.spans.setdefault(key, s.span)
            counts: Counts = {key: Poly.constant(1)}
            _add(counts, self.block(s.body, env, depth))
            return counts
        if isinstance(s, ir.If):
            return self.branch(s, env, depth)
        if isinstance(s, ir.For):
            return self.loop(s, env, depth)
        if isinstance(s, ir.While):
            self.conditional_loop(s, env, depth)
            return {}
        if isinstance(s, ir.Tasks):
            self.forget(s.body, env)
            outer, self.spans = self.spans, {}
            inside = env.copy()
            self.compare(self.block(s.body, inside, depth), s.body)
            self.spans = outer
        return {}

    def assign(self, s: ir.Assign, env: _Env) -> None:
        if s.var.type in (INT, BOOL):
            before = env.copy()
            env[s.var.name] = self.later(s.var, lambda: polynomial(s.value, before))
        elif isinstance(s.var.type, Scalar):
            env[s.var.name] = self.unknown(s.var)

    def later(self, var: ir.Var, value: Callable[[], Poly]) -> Callable[[], Poly]:
        """``value``, or an unknown if it turns out too long; one answer, whoever asks first."""
        known: list[Poly] = []

        def force() -> Poly:
            if not known:
                found = value()
                known.append(found if len(found.terms) <= MAX_TERMS else self.unknown(var))
            return known[0]

        return force

    def unknown(self, var: ir.Var) -> Poly:
        """A value that nothing is known of; its name prints as the user's."""
        return Poly.atom(ir.Var(var.name + _HIDDEN * (next(self.numbers) + 1), var.type))

    def forget(self, block: ir.Block, env: _Env) -> None:
        """What a loop assigns has any value when a turn begins."""
        for var in _assigned(block):
            if var.name in env:
                env[var.name] = self.unknown(var)

    def branch(self, s: ir.If, env: _Env, depth: int) -> Counts:
        before = env.copy()
        holds = self.later(ir.Var(index.to_text(s.cond, self.dims), BOOL), lambda: indicator(s.cond, before))
        sides = []
        for block in (s.then, s.orelse):
            inside = env.copy()
            sides.append((self.block(block, inside, depth), inside))
        (then, after_then), (orelse, after_orelse) = sides
        for var in _assigned((*s.then, *s.orelse)):
            if var.name in env:
                env[var.name] = self.later(var, self.merged(holds, after_then, after_orelse, var.name))
        total: Counts = {}
        _add(total, {k: holds() * c for k, c in then.items()})
        _add(total, {k: (Poly.constant(1) - holds()) * c for k, c in orelse.items()})
        return total

    @staticmethod
    def merged(holds: Callable[[], Poly], then: _Env, orelse: _Env, name: str) -> Callable[[], Poly]:
        """A variable after a branch."""
        return lambda: holds() * then[name] + (Poly.constant(1) - holds()) * orelse[name]

    def loop(self, s: ir.For, env: _Env, depth: int) -> Counts:
        if not any(isinstance(inner, ir.Stage | ir.Tasks) for inner in statements(s.body)):
            self.forget(s.body, env)
            return {}
        start, stop = polynomial(s.start, env), polynomial(s.stop, env)
        self.forget(s.body, env)
        # One name for the variables of all loops of a depth: loops of two roles are compared.
        variable = ir.Var(f"turn{_HIDDEN}{depth}", INT)
        inside = env.copy()
        inside[s.var.name] = Poly.atom(variable)
        counts = self.block(s.body, inside, depth + 1)
        self.forget(s.body, env)
        turns = self.turns(start, stop)
        total: Counts = {}
        for key, count in counts.items():
            if count.mentions(variable.name):
                total[key] = self.summed(count, variable, start, stop)
            else:
                total[key] = turns * count
        return total

    def conditional_loop(self, s: ir.While, env: _Env, depth: int) -> None:
        """How often a ``while`` turns is unknown: every turn is balanced on its own, for all roles together."""
        self.forget(s.body, env)
        stage = next((inner for inner in statements(s.body) if isinstance(inner, ir.Stage)), None)
        if stage is None:
            return
        if not any(isinstance(inner, ir.Role) for inner in statements(s.body)):
            raise errors.Unbalanced(
                f"`{stage.pipeline}` is {stage.mode}ed inside a `while` of one role: "
                "the other role cannot know how often",
                s.span,
                "Put the `while` into shared code, with the role blocks inside it, "
                "or count the turns first and loop over "
                "pk.range.",
            )
        outer, self.spans = self.spans, {}
        self.compare(self.block(s.body, env.copy(), depth), s.body)
        self.spans = outer

    def turns(self, start: Poly, stop: Poly) -> Poly:
        """Turns of a loop, taken as not negative: a negative range is empty on both sides."""
        n = stop - start
        return Poly.constant(max(n.value, 0)) if n.value is not None else n

    def summed(self, count: Poly, variable: ir.Var, start: Poly, stop: Poly) -> Poly:
        """The sum of ``count`` over a loop, an atom of its own."""
        body, bounds = count.expression(), (start.expression(), stop.expression())
        first, last = (index.to_text(b, self.dims) for b in bounds)
        name = f"sum({index.to_text(body, self.dims)} for {variable.name} in range({first}, {last}))"
        return Poly.atom(ir.Var(name, INT))

    def compare(self, counts: Counts, block: ir.Block) -> None:
        for pipeline in dict.fromkeys(p for p, _ in counts):
            fill, drain = counts.get((pipeline, "fill"), Poly()), counts.get((pipeline, "drain"), Poly())
            if fill != drain:
                raise self.error(pipeline, block)

    def error(self, pipeline: str, block: ir.Block) -> errors.Unbalanced:
        fills, drains = (self.times(count_as_written(block, (pipeline, mode))) for mode in ("fill", "drain"))
        places = [self.spans.get((pipeline, mode)) for mode in ("fill", "drain")]
        first = places[0] or places[1]
        assert first is not None
        other = f"drained at\n{errors.frame(places[1])}\n  " if places[0] and places[1] else ""
        return errors.Unbalanced(
            f"in a task `{pipeline}` is filled {fills}, and drained {drains}: the two must be equal",
            first,
            f"{other}Make the loops and conditions around the fills and drains count the same.",
        )

    def times(self, count: index.Value) -> str:
        """``count`` in words."""
        if isinstance(count, int):
            return {0: "never", 1: "once"}.get(count, f"{count} times")
        if isinstance(count, ir.Select):
            x, y = (self.times(index.lower(side)) for side in (count.x, count.y))
            return f"{x} if `{index.to_text(count.cond, self.dims)}`, else {y}"
        return f"`{index.to_text(index.lift(count), self.dims)}` times"


def count_as_written(block: ir.Block, key: Key) -> index.Value:
    """How often ``key`` happens in ``block``, in the user's terms: nothing substituted, for messages."""
    terms: dict[ir.Expr, int] = {}
    number = 0
    for s in block:
        term = _written(s, key)
        if isinstance(term, int | float):
            number += int(term)
        else:
            terms[term] = terms.get(term, 0) + 1
    total: index.Value = 0
    for term, n in terms.items():
        total = index.binary("+", total, index.binary("*", n, term))
    return index.binary("+", total, number)


def _written(s: ir.Statement, key: Key) -> index.Value:
    inside = [count_as_written(b, key) for b in bodies(s)]
    if isinstance(s, ir.Stage):
        return index.binary("+", inside[0], int((s.pipeline, s.mode) == key))
    if isinstance(s, ir.If):
        return inside[0] if inside[0] == inside[1] else index.select(s.cond, inside[0], inside[1])
    if isinstance(s, ir.For):
        return index.binary("*", index.binary("-", s.stop, s.start), inside[0])
    return inside[0] if isinstance(s, ir.Role) else 0


def _add(total: Counts, more: Counts) -> None:
    for key, count in more.items():
        total[key] = total.get(key, Poly()) + count


def _assigned(block: ir.Block) -> list[ir.Var]:
    found: list[ir.Var] = []
    for s in block:
        if isinstance(s, ir.Assign):
            found.append(s.var)
        for inner in bodies(s):
            found += _assigned(inner)
    return found
