"""Rules of the scheduling options: ``while``, ``dynamic``, ``joins``, ``cluster``, ``pingpong``, ``stagger``.

They never change what a kernel computes; what they cannot be combined with is refused here, with the user's line.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk import errors
from pk.ir import nodes as ir
from pk.ir.ops import TABLE
from pk.ir.split import beside_communicator, bodies, communicator_of, expressions, is_dynamic, needs, statements, walk

CLUSTER = 2  # blocks of a cluster
MAX_TEAMS = 3
NAMED_BARRIERS = 15  # of a block, its own not counted


def schedule(kernel: ir.Kernel) -> None:
    """Raise a CompileError if a class of ``kernel`` combines what cannot go together."""
    for _, block in kernel.classes:
        body = beside_communicator(block)
        _one_way(body)
        for s in statements(block):
            if isinstance(s, ir.Tasks):
                _cluster(s)
            elif isinstance(s, ir.While):
                spin(s.cond, s.body, s.span)
        _teams(body)
    _joins(kernel)


def _joins(kernel: ir.Kernel) -> None:
    """A communicator whose blocks compute behind it."""
    found = next((c for c in kernel.communicators if c.joins), None)
    if found is None:
        return
    if len(kernel.communicators) > 1:
        other = next(c for c in kernel.communicators if c is not found)
        raise errors.WrongOperand(
            f"pk.communicator(joins=True) beside another communicator with sms=, line {other.span.line}",
            found.span,
            "Only the blocks of a single one can join: put both bodies into one, or drop joins=.",
        )
    if not is_dynamic(kernel.compute):
        tasks = any(isinstance(s, ir.Tasks) for s in statements(kernel.compute))
        what = "whose tasks are dealt to the blocks beforehand" if tasks else "that has no tasks"
        raise errors.WrongOperand(
            f"pk.communicator(joins=True) in a kernel {what}",
            found.span,
            "Its blocks come late and would hold up their share: write pk.tasks(..., dynamic=True), or drop joins=.",
        )
    warp = communicator_of(kernel.compute)
    if warp is not None:
        raise errors.WrongOperand(
            f"pk.communicator(joins=True) beside a communicator warp, line {warp.span.line}",
            found.span,
            "Tasks of that warp are dealt to all blocks beforehand, and these come late: drop joins=, or the warp.",
        )
    for s in statements(found.body):
        if isinstance(s, ir.Tasks) and s.cluster > 1:
            raise errors.WrongOperand(
                f"pk.tasks(cluster={s.cluster}) in a communicator that joins",
                s.span,
                "Its blocks claim tasks one by one afterwards: drop cluster=, or joins=.",
            )


# --------------------------------------------------------------------------------------------------- while
def spin(cond: ir.Expr, body: ir.Block, span: ir.Span) -> None:
    """Refuse a condition that reads memory at an address which the loop does not change.

    A loop that waits for signals may: it sees what was signalled.
    """
    if any(isinstance(s, ir.Do) and s.op in ("wait", "barrier") for s in statements(body)):
        return
    changed, asked = assigned(body), {e.name for e in walk((cond,)) if isinstance(e, ir.Var)}
    values = [s.value for s in statements(body) if isinstance(s, ir.Assign) and s.var.name in asked]
    for e in walk((cond, *values)):
        if isinstance(e, ir.Call) and any(isinstance(o, ir.Memory | ir.Choose) for o in e.operands):
            names = {v.name for v in walk(e.operands) if isinstance(v, ir.Var)}
            if not names & changed:
                raise errors.UnsupportedSyntax(
                    "a loop that spins on memory: its condition reads an address that the loop does not change",
                    span,
                    "To wait for another block or rank use pk.wait on a signal: plain loads promise nothing about "
                    "others' writes.",
                )


def assigned(block: ir.Block) -> frozenset[str]:
    """Names that a block assigns, loop variables included."""
    found: set[str] = set()
    for s in statements(block):
        if isinstance(s, ir.Assign | ir.For):
            found.add(s.var.name)
        elif isinstance(s, ir.Tasks):
            found.update(v.name for v in s.vars)
        elif isinstance(s, ir.Do):  # mma updates its first operand
            found.update(o.name for i in TABLE[s.op].writes if isinstance(o := s.operands[i], ir.Var))
    return frozenset(found)


# ---------------------------------------------------------------------------------------------- task loops
def _one_way(body: ir.Block) -> None:
    """All task loops of a class are dealt in one way."""
    loops = [s for s in statements(body) if isinstance(s, ir.Tasks)]
    for s in loops:
        first = loops[0]
        if s.dynamic != first.dynamic:
            raise errors.WrongOperand(
                f"a {'dynamic' if s.dynamic else 'static'} pk.tasks in a class whose first task loop (line "
                f"{first.span.line}) is {'dynamic' if first.dynamic else 'static'}",
                s.span,
                "The count of tasks runs on from loop to loop: give all task loops of a class the same dynamic=.",
            )
        if s.cluster != first.cluster:
            raise errors.WrongOperand(
                f"pk.tasks(cluster={s.cluster}) in a class whose first task loop (line {first.span.line}) has "
                f"cluster={first.cluster}",
                s.span,
                "Give all task loops of a class the same cluster=.",
            )


def _cluster(s: ir.Tasks) -> None:
    if s.cluster not in (1, CLUSTER):
        raise errors.WrongOperand(f"pk.tasks(cluster={s.cluster})", s.span, f"A cluster has 1 or {CLUSTER} blocks.")
    if s.cluster == 1:
        return
    if s.dynamic:
        raise errors.WrongOperand(
            "pk.tasks(cluster=2, dynamic=True)", s.span, "The blocks of a pair take tasks together: drop one of them."
        )
    if len(s.extents) < 2:
        raise errors.WrongOperand(
            "pk.tasks(cluster=2) of one extent", s.span, "Pairs are neighbours of the next-to-last extent: give it two."
        )
    if not isinstance(s.group, ir.Const) or s.group.value % CLUSTER:
        raise errors.WrongOperand(
            f"pk.tasks(cluster=2, group={s.group.value if isinstance(s.group, ir.Const) else '...'})",
            s.span,
            "A group is a whole number of pairs: make it an even constant, or drop cluster=.",
        )


# --------------------------------------------------------------------------------------- teams of a consumer
def _teams(body: ir.Block) -> None:
    roles = [s for s in statements(body) if isinstance(s, ir.Role) and s.kind == "consumer"]
    for role in roles:
        if (role.teams, role.stagger) != (roles[0].teams, roles[0].stagger):
            raise errors.WrongRole(
                f"a consumer with another pingpong= or stagger= than the first of its class, line {roles[0].span.line}",
                role.span,
                "All consumer blocks of a class are one role: give them the same options.",
            )
    if roles and roles[0].teams > 1:
        for s in _outside_of(ir.Tasks, body):
            _outside(s)
        for s in statements(body):
            if isinstance(s, ir.Tasks):
                _carried(s)
                for inner in statements(s.body):
                    if isinstance(inner, ir.Role) and inner.kind == "consumer":
                        _team(inner)


def _outside_of(kind: type[ir.Tasks] | type[ir.Role], body: ir.Block) -> Iterator[ir.Statement]:
    """Every statement that stands inside no statement of ``kind``."""
    for s in body:
        yield s
        if not isinstance(s, kind):
            for inner in bodies(s):
                yield from _outside_of(kind, inner)


def _outside(s: ir.Statement) -> None:
    if isinstance(s, ir.Role) and s.kind == "consumer":
        raise errors.WrongRole(
            "a pingpong consumer outside a task loop",
            s.span,
            "Its warpgroups take tasks in turn: put the block into a task loop, or drop pingpong=.",
        )


def _carried(loop: ir.Tasks) -> None:
    """A team skips the tasks of the others, and what shared code reckons in them."""
    needed = needs(loop.body, "consumer")
    for s in _outside_of(ir.Role, loop.body):
        if isinstance(s, ir.Assign) and s.var.name in needed:
            raise errors.WrongRole(
                f"`{s.var.name}` is carried from task to task in a class with a pingpong consumer",
                s.span,
                "Its warpgroups see every second task only: compute it from the task's coordinates, or drop pingpong=.",
            )


def _team(role: ir.Role) -> None:
    """A pingpong consumer: nothing of one task may depend on the task before, which another team may still do."""
    for s in statements(role.body):
        if isinstance(s, ir.Do) and s.op in ("signal", "signal_all", "signal_each", "barrier"):
            raise errors.WrongRole(
                f"pk.{s.op} in a pingpong consumer",
                s.span,
                "A signal covers the stores of the whole role, and its warpgroups are in different tasks: signal from "
                "the storer, or drop pingpong=.",
            )
        if any(isinstance(o, ir.Shared) and o.private for o in walk(expressions(s))):
            raise errors.WrongRole(
                "a pingpong consumer uses a shared tile outside a pipeline",
                s.span,
                "Its warpgroups would share the tile, each in another task: drop pingpong=.",
            )
    stored = {o.tensor for s in statements(role.body) if isinstance(s, ir.Do) for o in _windows(s, writes=True)}
    for s in statements(role.body):
        for o in _windows(s, writes=False):
            if o.tensor in stored:
                raise errors.WrongRole(
                    f"a pingpong consumer reads `{o.tensor}`, which it also writes",
                    s.span,
                    "Another warpgroup may not have written it yet: drop pingpong=.",
                )


def _windows(s: ir.Statement, *, writes: bool) -> list[ir.Memory]:
    """The windows of tensors that a statement itself writes, or those that it reads."""
    written = set(TABLE[s.op].writes) if isinstance(s, ir.Do) else set()
    found: list[ir.Memory] = []
    for i, o in enumerate(expressions(s)):
        if (i in written) == writes:
            found += [m for m in walk((o,)) if isinstance(m, ir.Memory)]
    return found
