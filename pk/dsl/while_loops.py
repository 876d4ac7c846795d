"""``while``: a loop whose condition is evaluated before every turn."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from pk import errors
from pk.dsl.values import is_expr
from pk.ir import nodes as ir
from pk.ir.schedule import spin

if TYPE_CHECKING:
    from pk.dsl.statements import Reader

_GONE = "It is first bound inside a loop and ends with it: bind `{name}` before the loop."


def read_while(r: Reader, stmt: ast.While) -> None:
    """Emit ``stmt``.  What the condition has to compute first is computed before the loop and after every turn.

    Raises UnsupportedSyntax for a loop that never ends or spins on memory, NameOutOfScope and the like as they come.
    """
    span = r.span(stmt.test)
    if stmt.orelse:
        raise r.unsupported(stmt.orelse[0], "`else` of a loop", "Write the lines after the loop.")
    _refuse_shadowed(r, stmt)
    r.b.begin()
    r.materialise(r.assigned(stmt.body))
    with r.b.nested(kept=False) as head:
        cond = r.truth(r.eval(stmt.test), stmt.test)
    if not is_expr(cond):
        if cond:
            raise r.unsupported(stmt.test, "a loop that never ends", "Kernels have no `break`: give it a condition.")
        return
    if not all(isinstance(s, ir.Assign) for s in head):
        raise r.unsupported(stmt.test, "a helper with statements in the condition of a `while`", "Compute it before.")
    before = dict(r.frame.names)
    with r.b.nested() as block:
        with r._tail(True):
            flow = r.block(stmt.body)
        for s in head:
            r.b.emit(s)
    r.no_return(flow, "a loop")
    spin(cond, tuple(block), span)
    for s in head:
        r.b.emit(s)
    r.b.emit(ir.While(cond, tuple(block), span))
    r.leave(before, _GONE)


def _refuse_shadowed(r: Reader, stmt: ast.While) -> None:
    """Names of the condition that the body takes for loop variables or stages would not change with them."""
    asked = {n.id for n in ast.walk(stmt.test) if isinstance(n, ast.Name)}
    for node in (n for top in stmt.body for n in ast.walk(top)):
        targets = [node.target] if isinstance(node, ast.For) else []
        if isinstance(node, ast.With):
            targets = [i.optional_vars for i in node.items if i.optional_vars is not None]
        for leaf in (n for t in targets for n in ast.walk(t)):
            if isinstance(leaf, ast.Name) and leaf.id in asked:
                raise errors.UnsupportedSyntax(
                    f"`{leaf.id}` of the condition is taken for something else inside the loop",
                    r.span(leaf),
                    "Use another name here.",
                )
