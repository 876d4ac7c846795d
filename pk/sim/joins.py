"""``pk.communicator(joins=True)``: blocks that compute when the roles of their communicator have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pk.ir import nodes as ir
from pk.sim.parts import Counter, Site, Wait

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Role


class Joined:
    """One such block: how many of its communicator's roles have ended, and what those that compute wait for."""

    __slots__ = ("_ended", "wait")

    def __init__(self, launch: Launch, roles: int, span: ir.Span) -> None:
        self._ended = Counter(launch.schedule, "roles of the communicator that have ended")
        self.wait: Wait = (self._ended, roles, Site("joins", "", span))

    def left(self, role: Role) -> None:
        """A role of the communicator has ended."""
        role.launch.add(self._ended, 1, role)
