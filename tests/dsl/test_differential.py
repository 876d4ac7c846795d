"""Random programs: the IR does what Python does with the same text.

Programs are assignments, branches, loops (kept and unrolled) and helper calls on ints; ``pk.wait`` shows values.
"""

from __future__ import annotations

import random
import types
from textwrap import indent
from typing import Any

import pytest

from pk import errors
from pk.ir import index
from pk.ir import nodes as ir
from tests.dsl.reading import HEAD, read

NAMES = ("x", "y", "z", "w")
HELPERS = """
@pk.function
def mix(x, y=2):
    z = x * y + 1
    if z > 10:
        z = z - 10
    for i in pk.range(2):
        z += x
    return z

@pk.function
def swap(a, b):
    a, b = b, a
    return a, b

@pk.kernel
def k(t: pk.Global, n: int, m: int, C: pk.constexpr = 3):
    sig = pk.signals(100)
"""


class Program:
    """Grows a random program; names are used only where Python and pk both have them."""

    def __init__(self, seed: int) -> None:
        self.gen = random.Random(seed)

    def expr(self, known: list[str], depth: int = 2) -> str:
        gen = self.gen
        if depth == 0 or gen.random() < 0.3:
            return gen.choice([*known, "n", "m", "C", str(gen.randrange(-3, 6))])
        kind = gen.randrange(8)
        a, b = self.expr(known, depth - 1), self.expr(known, depth - 1)
        if kind == 0:
            return f"({a} if {self.cond(known)} else {b})"
        if kind == 1:
            return f"({a}) {gen.choice(['//', '%'])} {gen.choice(['3', 'C', '-2'])}"
        if kind == 2:
            return f"{gen.choice(['min', 'max'])}({a}, {b})"
        if kind == 3:
            return f"-({a})"
        return f"({a}) {gen.choice('+-*')} ({b})"

    def cond(self, known: list[str]) -> str:
        a, b = self.expr(known, 1), self.expr(known, 1)
        op = self.gen.choice(["<", "<=", "==", "!=", ">"])
        return f"{a} {op} {b}" + self.gen.choice(["", "", f" and {b} < 4", f" or not {a} < 2", f" < {a}"])

    def block(self, known: list[str], depth: int) -> str:
        """Lines; ``known`` gains the names bound for good."""
        lines = [self.statement(known, depth) for _ in range(self.gen.randrange(1, 4))]
        return "\n".join(lines)

    def statement(self, known: list[str], depth: int) -> str:
        gen = self.gen
        kind = gen.randrange(10) if depth else gen.randrange(5)
        if kind < 2:
            name, value = gen.choice(NAMES), self.expr(known)
            known += [name] if name not in known else []
            return f"{name} = {value}"
        if kind == 2:
            return f"pk.wait(sig, {self.expr(known)}, {self.expr(known)})"
        if kind == 3 and known:
            return f"{gen.choice(known)} {gen.choice('+-')}= {self.expr(known, 1)}"
        if kind in (3, 4):
            a, b = gen.sample(NAMES, 2)
            value = f"swap({self.expr(known, 1)}, {self.expr(known, 1)})"
            call = f"{a} = mix({self.expr(known, 1)}, y={self.expr(known, 1)})"
            both = gen.random() < 0.5
            known += [n for n in ((a, b) if both else (a,)) if n not in known]
            return f"{a}, {b} = {value}" if both else call
        if kind in (5, 6):
            lines = f"if {self.cond(known)}:\n{indent(self.block(list(known), depth - 1), '    ')}"
            if gen.random() < 0.5:
                lines += f"\nelse:\n{indent(self.block(list(known), depth - 1), '    ')}"
            return lines
        variable = f"i{depth}"
        over = gen.choice(["pk.range(3)", "range(C - 4, n)", "pk.static_range(2)", "(4, 7)"])
        body = self.block([*known, variable], depth - 1)
        return f"for {variable} in {over}:\n{indent(body, '    ')}"


def python(source: str, n: int, m: int) -> list[tuple[int, int]]:
    """What Python does: the values shown."""
    shown: list[tuple[int, int]] = []
    pk = types.SimpleNamespace(
        function=lambda f: f, kernel=lambda f: f, Global=None, constexpr=None, range=range, static_range=range,
        signals=lambda *shape: None, wait=lambda sig, at, value: shown.append((at, value)),
    )  # fmt: skip
    space: dict[str, Any] = {"pk": pk}
    exec(source, space)
    space["k"](None, n, m)
    return shown


def interpreted(block: ir.Block, env: dict[str, Any], shown: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What the IR does."""
    for s in block:
        if isinstance(s, ir.Assign):
            env[s.var.name] = index.evaluate(s.value, env)
        elif isinstance(s, ir.If):
            interpreted(s.then if index.evaluate(s.cond, env) else s.orelse, env, shown)
        elif isinstance(s, ir.For):
            for turn in range(index.evaluate(s.start, env), index.evaluate(s.stop, env)):
                env[s.var.name] = turn
                interpreted(s.body, env, shown)
        else:
            assert isinstance(s, ir.Do)
            counter = s.operands[0]
            assert isinstance(counter, ir.Signal)
            shown.append((index.evaluate(counter.index[0], env), index.evaluate(s.operands[1], env)))  # type: ignore[arg-type]
    return shown


@pytest.mark.parametrize("seed", range(150))
def test_same_as_python(seed: int) -> None:
    source = HELPERS + indent(Program(seed).block([], 3) + "\npk.wait(sig, n, m)", "    ")
    try:
        kernel = read(source)
    except errors.WrongOperand as e:
        pytest.fail(f"{source}\n{e}")
    for n, m in ((0, 0), (3, -2), (5, 7)):
        env = {"n": n, "m": m}
        assert interpreted((*kernel.prologue, *kernel.compute), env, []) == python(source.replace(HEAD, ""), n, m), (
            source
        )
