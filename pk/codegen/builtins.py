"""This rank's number and the number of ranks, under one name each in a role: the user's, where there is one."""

from __future__ import annotations

from collections.abc import Iterator

from pk.codegen.names import Names
from pk.ir import nodes as ir
from pk.ir import split

WORDS: dict[type[ir.Rank] | type[ir.World], str] = {ir.Rank: "rank", ir.World: "world"}


class Builtins:
    """Names of ``pk.rank()`` and ``pk.world_size()`` in one role.

    ``declarations``: what the role must declare itself; ``aliases``: names of the user that stand for one, to be kept.
    The launch context has both unsigned, so that they must pass through an ``int``: C++ would compare negative numbers
    with them wrongly.
    """

    def __init__(self, body: ir.Block, names: Names) -> None:
        self._found: dict[type, str] = {}
        self._definitions: dict[ir.Assign, str] = {}
        self.declarations: list[str] = []
        aliases = set()
        for kind, word in WORDS.items():
            alias = _alias(body, kind)
            if alias is not None:
                aliases.add(alias.var.name)
                self._definitions[alias] = f"p.ctx.{word}"
                self._found[kind] = names.local(alias.var.name)
            elif any(isinstance(e, kind) for e in _operands(body)):
                self._found[kind] = names.local(word, "builtin", word)
                self.declarations.append(f"const int {self._found[kind]} = p.ctx.{word};")
        self.aliases = frozenset(aliases)

    def __call__(self, e: ir.Rank | ir.World) -> str:
        """The C++ name of ``e``."""
        return self._found[type(e)]

    def value(self, s: ir.Assign) -> str:
        """The right-hand side of ``s`` if it is the one that names a builtin, else nothing."""
        return self._definitions.get(s, "")


def _alias(body: ir.Block, kind: type) -> ir.Assign | None:
    """The user's ``me = pk.rank()``, if it stands before every other use in code that every path passes, and stays."""
    for s in body:
        if isinstance(s, ir.Assign) and isinstance(s.value, kind):
            again = [t for t in split.statements(body) if isinstance(t, ir.Assign) and t.var.name == s.var.name]
            return s if len(again) == 1 else None
        if any(isinstance(e, kind) for e in _operands((s,))):
            return None
    return None


def _operands(block: ir.Block) -> Iterator[ir.Operand]:
    for s in split.statements(block):
        yield from split.walk(split.expressions(s))
