"""Order between the threads of one role: a load sees what another thread of the role stored before, a store does not
overtake another thread's load (gallery rule 23).  Which tensors that concerns is known by name; where it does, the role
meets at its barrier first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pk.codegen.plan import MOVES
from pk.codegen.sites import windows
from pk.ir import nodes as ir
from pk.ir import split

MEETS = frozenset({"signal", "signal_all", "barrier", "wait", "reduce", "all_reduce"})
"""Ops that begin by meeting at the role's barrier."""


@dataclass(slots=True)
class Accesses:
    """Tensors that threads of a role have loaded from and stored to since the role last met."""

    loaded: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    before: set[str] = field(default_factory=set)  # stored in earlier turns of a loop

    def copy(self) -> Accesses:
        """What is known here, for one of two branches."""
        return Accesses(set(self.loaded), set(self.stored), set(self.before))

    def join(self, other: Accesses) -> None:
        """What may have happened on either of two paths."""
        self.loaded |= other.loaded
        self.stored |= other.stored
        self.before |= other.before

    def must_meet(self, s: ir.Statement) -> bool:
        """Whether the role must meet before statement ``s``; notes what ``s`` itself does."""
        loads, stores = touched(s)
        meets = isinstance(s, ir.Do) and s.op in MEETS
        conflict = bool(loads & (self.stored | self.before) or stores & (self.loaded | self.stored))
        if meets or conflict:
            self.loaded.clear()
            self.stored.clear()
            self.before.clear()
        self.loaded |= loads
        self.stored |= stores
        return conflict and not meets

    def enter_loop(self, body: ir.Block) -> None:
        """The turn before may have done what the body does."""
        for s in split.statements(body):
            loads, stores = touched(s)
            self.loaded |= loads
            self.before |= stores


def touched(s: ir.Statement) -> tuple[set[str], set[str]]:
    """Tensors that threads load from and store to in statement ``s`` itself."""
    if isinstance(s, ir.Do) and s.op in MOVES:
        return set(), set()
    found = list(windows(s))
    stores = {at.tensor for at, written in found if written}
    return {at.tensor for at, written in found if not written}, stores
