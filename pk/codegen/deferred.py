"""Signals that leave later: which storers may queue them, and which loops add to several ranks in a row."""

from __future__ import annotations

from pk.ir import nodes as ir
from pk.ir import split

BULK = frozenset({"store_async", "store_add_async"})
LOADS = frozenset({"load_async"})  # no group holds them: their stage's barrier counts their bytes
SIGNALS = frozenset({"signal", "signal_all"})
BLOCKING = frozenset({"wait", "barrier"})


def behind(kernel: ir.Kernel, kind: ir.RoleKind, body: ir.Block) -> int:
    """Bulk groups that may be under way when the signals of older ones leave; 0 if the role's signals cannot be queued.

    They can in a storer whose only stores are bulk copies of its leader, from rings of several stages: then the groups
    that the leader has committed say which stores have landed.
    """
    inside = list(split.statements(body))
    done = {s.op for s in inside if isinstance(s, ir.Do)}
    stages = [s for s in inside if isinstance(s, ir.Stage) and s.mode == "drain"]
    drained = [kernel.pipeline(s.pipeline).stages for s in stages]
    if kind != "storer" or not done & SIGNALS or not done <= BULK | LOADS | SIGNALS | BLOCKING or not drained:
        return 0
    if any(isinstance(e, ir.Call) for s in inside for e in split.walk(split.expressions(s))):
        return 0
    held = [t for s in stages for t in split.statements(s.body)]
    if any(isinstance(t, ir.Do) and t.op not in BULK for t in held):
        return 0  # a signal between the stores of one stage: their group is not committed yet
    return min(drained) - 1


def signals_in_a_row(s: ir.For) -> ir.Do | None:
    """The signal that a loop does and nothing else, but for scalars: its turns share one release."""
    rest = [t for t in s.body if not isinstance(t, ir.Assign)]
    if len(rest) == 1 and isinstance(rest[0], ir.Do) and rest[0].op == "signal":
        return rest[0]
    return None
