"""What is known of a role's scalars without running it: which are never negative, which are this rank's number."""

from __future__ import annotations

from dataclasses import dataclass

from pk.ir import nodes as ir
from pk.ir import split


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that hold wherever a name is visible in one role: every definition of the name was looked at."""

    natural: frozenset[str]  # never negative
    own: frozenset[str]  # always this rank's number
    world: frozenset[str]  # always the number of ranks, so at least 1
    work_space: frozenset[str] = frozenset()  # names of scratch

    @classmethod
    def of(cls, block: ir.Block, work_space: frozenset[str] = frozenset()) -> Facts:
        """The facts of ``block``, a role's slice with the kernel's prologue in front."""
        found = _definitions(block)
        everything = frozenset(found)
        facts = cls(everything, everything, everything, work_space)
        while True:  # the largest set that justifies itself: it shrinks, so this ends
            smaller = cls(
                frozenset(n for n in facts.natural if all(map(facts.is_natural, found[n]))),
                frozenset(n for n in facts.own if all(map(facts.is_own_rank, found[n]))),
                frozenset(n for n in facts.world if all(map(facts.is_world, found[n]))),
                work_space,
            )
            if smaller == facts:
                return facts
            facts = smaller

    def is_own_rank(self, e: ir.Operand | None) -> bool:
        """Whether ``e`` is ``pk.rank()`` whatever the run."""
        return isinstance(e, ir.Rank) or (isinstance(e, ir.Var) and e.name in self.own)

    def is_world(self, e: ir.Operand | None) -> bool:
        """Whether ``e`` is ``pk.world_size()`` whatever the run."""
        return isinstance(e, ir.World) or (isinstance(e, ir.Var) and e.name in self.world)

    def is_remote(self, m: ir.Memory) -> bool:
        """Whether ``m`` may be another rank's memory."""
        return m.everyone or (m.rank is not None and not self.is_own_rank(m.rank))

    def is_natural(self, e: ir.Operand) -> bool:
        """Whether the int ``e`` is never negative (overflow apart)."""
        if isinstance(e, ir.Const):
            return e.value >= 0
        if isinstance(e, ir.Dim | ir.Rank | ir.World):
            return True
        if isinstance(e, ir.Var):
            return e.name in self.natural
        if isinstance(e, ir.Select):
            return self.is_natural(e.x) and self.is_natural(e.y)
        if isinstance(e, ir.Binary):
            return self._natural_binary(e)
        return isinstance(e, ir.Unary) and e.op == "abs"

    def _natural_binary(self, e: ir.Binary) -> bool:
        if e.op == "-":  # world - 1, the number of peers
            return self.is_world(e.x) and isinstance(e.y, ir.Const) and e.y.value <= 1
        x, y = self.is_natural(e.x), self.is_natural(e.y)
        if e.op in ("+", "*", "//", "/", "min"):
            return x and y
        if e.op == "max":
            return x or y
        return e.op == "%" and y  # Python's remainder has the sign of its divisor

    def plain_division(self, e: ir.Binary) -> bool:
        """Whether C++'s ``/`` and ``%`` agree with Python's ``//`` and ``%`` on ``e``."""
        return self.is_natural(e.x) and self.is_natural(e.y)


def _definitions(block: ir.Block) -> dict[str, list[ir.Expr]]:
    """Every value that a scalar name may be given; for a loop variable, one with the properties of all its values."""
    found: dict[str, list[ir.Expr]] = {}
    for s in split.statements(block):
        if isinstance(s, ir.Assign):
            found.setdefault(s.var.name, []).append(s.value)
        elif isinstance(s, ir.For):
            # start <= var: it is as natural as its start, and never known to be the rank.
            found.setdefault(s.var.name, []).append(ir.Binary("+", s.start, ir.const(0), s.var.type))
        elif isinstance(s, ir.Tasks):
            for v in s.vars:
                found.setdefault(v.name, []).append(ir.Binary("+", ir.const(0), ir.const(0), v.type))
    return found
