"""Cut one class of blocks into roles: each role keeps its own blocks and the shared code they need.

Statements outside role blocks are replicated (gallery rule 3): every role of the class gets its own copy
of the loops and scalars that its statements use, and every ``wait`` and ``assert`` of the shared code.
No role reads another's names, so this is backward liveness over one tree and nothing more.

The communicator warp (a role at the top of the compute class) stands aside: of the shared code it has the scalars of
the prologue and nothing else, and the others have nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pk.ir import nodes as ir

ROLE_ORDER: tuple[ir.RoleKind, ...] = ("loader", "consumer", "storer", "communicator", "team")


def roles_of(block: ir.Block) -> tuple[ir.RoleKind, ...]:
    """The roles of a class, in pipeline order.  A class without role blocks is one role, the team."""
    found = {s.kind for s in statements(block) if isinstance(s, ir.Role)}
    return tuple(k for k in ROLE_ORDER if k in found) or ("team",)


def warpgroups_of(block: ir.Block) -> int:
    """Consumer warpgroups of a class that share a tile (0 if it has no consumer)."""
    return max((s.warpgroups for s in statements(block) if isinstance(s, ir.Role)), default=0)


def teams_of(block: ir.Block) -> int:
    """Teams of consumer warpgroups that take the tasks of a class in turn; 1 for an ordinary consumer."""
    return max((s.teams for s in statements(block) if isinstance(s, ir.Role)), default=1)


def communicator_of(block: ir.Block) -> ir.Role | None:
    """The communicator warp of a class, which stands at its top."""
    return next((s for s in block if isinstance(s, ir.Role) and s.kind == "communicator"), None)


def beside_communicator(block: ir.Block) -> ir.Block:
    """A class without its communicator warp, whose task loops are its own."""
    return tuple(s for s in block if not (isinstance(s, ir.Role) and s.kind == "communicator"))


def is_dynamic(block: ir.Block) -> bool:
    """Whether the blocks of a class claim their tasks."""
    return any(s.dynamic for s in statements(beside_communicator(block)) if isinstance(s, ir.Tasks))


def counters_of(kernel: ir.Kernel) -> tuple[ir.Signals, ...]:
    """The counters of a launch: the user's signals, then a work counter for each class that claims its tasks."""
    return (*kernel.signals, *(ir.Signals(f"{name}.work", ()) for name, body in kernel.classes if is_dynamic(body)))


def slice_role(block: ir.Block, kind: ir.RoleKind) -> ir.Block:
    """The part of ``block`` that role ``kind`` executes, ``Role`` nodes dissolved.

    For the team, the whole block.
    """
    if kind == "team":
        return block
    if kind == "communicator":
        return _slice_communicator(block)
    kept, _ = _slice(block, kind, frozenset())
    return kept


def needs(block: ir.Block, kind: ir.RoleKind) -> frozenset[str]:
    """Names that role ``kind`` reads in ``block`` before it assigns them."""
    return _slice(block, kind, frozenset())[1]


def statements(block: ir.Block) -> Iterator[ir.Statement]:
    """Every statement of ``block``, outermost first."""
    for s in block:
        yield s
        for inner in bodies(s):
            yield from statements(inner)


def bodies(s: ir.Statement) -> tuple[ir.Block, ...]:
    """The blocks inside a statement."""
    if isinstance(s, ir.If):
        return (s.then, s.orelse)
    if isinstance(s, ir.For | ir.While | ir.Tasks | ir.Role | ir.Stage):
        return (s.body,)
    return ()


def expressions(s: ir.Statement) -> tuple[ir.Operand, ...]:
    """The operands that a statement itself evaluates (not those of the blocks inside it)."""
    if isinstance(s, ir.Assign):
        return (s.value,)
    if isinstance(s, ir.For):
        return (s.start, s.stop)
    if isinstance(s, ir.Tasks):
        return (*s.extents, s.group)
    if isinstance(s, ir.If | ir.While | ir.Assert):
        return (s.cond,)
    if isinstance(s, ir.Do):
        return s.operands
    if isinstance(s, ir.Bounds):
        return (s.index, s.bound) if s.guard is None else (s.index, s.bound, s.guard)
    return ()


def children(e: ir.Operand) -> tuple[ir.Operand, ...]:
    """The operands inside an operand."""
    if isinstance(e, ir.Unary):
        return (e.x,)
    if isinstance(e, ir.Binary):
        return (e.x, e.y)
    if isinstance(e, ir.Select | ir.Choose):
        return (e.cond, e.x, e.y)
    if isinstance(e, ir.Call):
        return e.operands
    if isinstance(e, ir.Memory):
        return e.coord if e.rank is None else (*e.coord, e.rank)
    if isinstance(e, ir.Signal):
        return e.index
    return ()


def walk(operands: Iterable[ir.Operand]) -> Iterator[ir.Operand]:
    """Every operand under ``operands``, outermost first."""
    for e in operands:
        yield e
        yield from walk(children(e))


def used(s: ir.Statement) -> frozenset[str]:
    """Names of the variables that a statement itself reads."""
    return frozenset(e.name for e in walk(expressions(s)) if isinstance(e, ir.Var))


def _slice_communicator(block: ir.Block) -> ir.Block:
    """The communicator's own body, behind the scalars at the top that it needs."""
    at = next((i for i, s in enumerate(block) if isinstance(s, ir.Role) and s.kind == "communicator"), None)
    if at is None:  # the prologue by itself
        return ()
    role = block[at]
    assert isinstance(role, ir.Role)
    live, kept = _all_names(role.body), list(role.body)
    for s in reversed(block[:at]):
        if isinstance(s, ir.Assign) and s.var.name in live:
            live = (live - {s.var.name}) | used(s)
            kept.insert(0, s)
    return tuple(kept)


def _slice(block: ir.Block, kind: ir.RoleKind, live: frozenset[str]) -> tuple[ir.Block, frozenset[str]]:
    """Backward over ``block``: what ``kind`` keeps, and the names it needs before the block."""
    kept: list[ir.Statement] = []
    for s in reversed(block):
        new, live = _slice_one(s, kind, live)
        kept[:0] = new
    return tuple(kept), live


def _slice_one(
    s: ir.Statement, kind: ir.RoleKind, live: frozenset[str]
) -> tuple[tuple[ir.Statement, ...], frozenset[str]]:
    if isinstance(s, ir.Role):
        if s.kind != kind:
            return (), live
        return s.body, _all_names(s.body) | live
    if isinstance(s, ir.Assign):
        if s.var.name not in live:
            return (), live
        return (s,), (live - {s.var.name}) | used(s)
    if isinstance(s, ir.If):
        then, a = _slice(s.then, kind, live)
        orelse, b = _slice(s.orelse, kind, live)
        if not then and not orelse:
            return (), live
        return (ir.If(s.cond, then, orelse, s.span),), a | b | live | used(s)
    if isinstance(s, ir.For | ir.While | ir.Tasks):
        return _slice_loop(s, kind, live)
    if isinstance(s, ir.Stage):
        raise AssertionError("a stage outside a role: the front end refuses this")
    return (s,), live | used(s)  # wait, assert: every role keeps them


def _slice_loop(
    s: ir.For | ir.While | ir.Tasks, kind: ir.RoleKind, live: frozenset[str]
) -> tuple[tuple[ir.Statement, ...], frozenset[str]]:
    # What one turn needs may come from the turn before: iterate to the fixed point.
    after = live
    if isinstance(s, ir.While):
        live = live | used(s)
    body, need = _slice(s.body, kind, live)
    while not need <= live:
        live = live | need
        body, need = _slice(s.body, kind, live)
    # A task loop is kept even when empty: the count of tasks runs on from loop to loop.
    if not body and not isinstance(s, ir.Tasks):
        return (), after
    if isinstance(s, ir.While) and not _kept(body, after):
        return (), after
    return (replace(s, body=body),), live | used(s)


def _kept(body: ir.Block, live: frozenset[str]) -> bool:
    """Whether the body of a ``while`` does more than reckon what its own condition needs."""
    inside = list(statements(body))
    return any(not isinstance(s, ir.Assign | ir.For | ir.While | ir.If) or _names(s) & live for s in inside)


def _names(s: ir.Statement) -> frozenset[str]:
    return frozenset({s.var.name}) if isinstance(s, ir.Assign) else frozenset()


def _all_names(block: ir.Block) -> frozenset[str]:
    """Names that a role's own block reads anywhere; a name it assigns first is harmless here."""
    return frozenset().union(*(used(s) for s in statements(block))) if block else frozenset()
