"""Happens-before: vector clocks of roles, of their asynchronous operations, and of the ranks' streams.

A *component* is something whose events are known in order: a stream (the launches of a rank), the program of a role,
its bulk stores as they land, its ordinary stores as they land, and, for each pipeline, the bulk copies into its stages
and those out of them.  An event has a component and a number in it.  A *known* vector says of each component up to
which number its events happened before; such vectors are never changed in place, so everybody may share them.

That bulk copies of one role and pipeline count as one component is exact: stages are filled and drained in order, so
whoever has waited for one use of a stage has waited for all before it.  The same goes for stores and signals: a signal
leaves after *all* earlier stores of its role.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pk.sim.machine import Role
from pk.sim.parts import Counter, Site

Known = NDArray[np.int32]
Wait = tuple[Counter, int, Site]


class Actor:
    """Who touches memory: what it knows, and which event its accesses are.

    ``known``: what happened before.  ``program`` and ``time``: its place in the program of its role.  ``component`` and
    ``number``: the event that an access of its own is.  ``own``: the component of the role's ordinary stores, if the
    role's threads make the access: they see those in order, landed or not (-1: a bulk copy, which does not).
    """

    __slots__ = (
        "component", "direct", "known", "number", "own", "program", "role", "stage", "task", "time", "waited",
    )  # fmt: skip

    def __init__(self, role: Role, known: Known, program: int) -> None:
        self.role, self.known, self.program = role, known, program
        self.time = self.number = 1
        self.component = program
        self.own = self.direct = program + DIRECT
        self.task = role.task
        self.waited: Wait | None = None  # last: a signal or the entry words
        self.stage: Wait | None = None  # last: a stage of a pipeline

    def at(self, component: int, number: int, own: int) -> Actor:
        """A copy: an operation that the role issues now, whose accesses are that event."""
        op = Actor.__new__(Actor)
        op.role, op.known, op.program, op.time = self.role, self.known, self.program, self.time
        op.component, op.number, op.own, op.direct = component, number, own, self.direct
        op.task, op.waited, op.stage = self.role.task, self.waited, self.stage
        return op

    def follows(self, component: int, number: int) -> bool:
        """Whether that event happened before what this actor does now."""
        if component == self.program:
            return number <= self.time
        return bool(self.known[component] >= number)


BULK, DIRECT, RINGS = 1, 2, 3
"""Components of a role, from that of its program: bulk stores landing, ordinary stores landing, then its pipelines."""


class Thread(Actor):
    """A role.  ``counts``: how many events each of its components but the program has had."""

    __slots__ = ("counts", "rings", "unfenced")

    def __init__(self, role: Role, known: Known, program: int) -> None:
        super().__init__(role, known, program)
        self.counts = {program + BULK: 0, program + DIRECT: 0}
        self.rings: dict[tuple[str, str], int] = {}
        self.unfenced: Known | None = None  # what bulk copies know, if a wait without a proxy fence told threads more
        for at, name in enumerate((*role.rings, "")):  # "": tiles in no pipeline
            for side, kind in enumerate(("load", "read")):
                self.rings[name, kind] = program + RINGS + 2 * at + side
                self.counts[program + RINGS + 2 * at + side] = 0

    @staticmethod
    def components(role: Role) -> int:
        """How many components ``role`` needs."""
        return RINGS + 2 * (len(role.rings) + 1)

    def ring(self, pipeline: str, kind: str) -> int:
        """The component of its copies into (``load``) or out of (``read``) the stages of a pipeline."""
        return self.rings.get((pipeline, kind), self.rings["", kind])

    def next(self, component: int) -> int:
        """The number of the next event in one of its components."""
        self.counts[component] += 1
        return self.counts[component]

    def issue(self, component: int, own: int = -1) -> Actor:
        """An operation, ordered after what the role has done so far, and not before what it does next."""
        op = self.at(component, self.next(component), own)
        if own < 0 and self.unfenced is not None:
            op.known = self.unfenced
        self.tick()
        return op

    def tick(self) -> None:
        """What the role does from now on is not known to those who know what it did so far."""
        self.time += 1
        self.number = self.time

    def release(self, components: tuple[int, ...] = ()) -> Known:
        """What whoever synchronises with this moment learns: the program so far, and all events of ``components``."""
        told = self.known.copy()
        told[self.program] = self.time
        for c in components:
            told[c] = self.counts[c]
        self.tick()
        return told

    def acquire(self, told: Known, fence: bool = True, signal: bool = True) -> None:
        """Learn.  Without a proxy ``fence`` bulk copies learn nothing, until a wait for another ``signal`` has one."""
        if not fence and self.unfenced is None:
            self.unfenced = self.known
        elif fence and signal:
            self.unfenced = None
        elif fence and self.unfenced is not None:
            self.unfenced = join(self.unfenced, told)
        self.known = join(self.known, told)


class History:
    """What the adds to one counter told, in the order in which they arrived."""

    __slots__ = ("highest", "prefix", "value")

    def __init__(self) -> None:
        self.value = 0
        self.highest: list[int] = []  # the greatest value so far, after each add
        self.prefix: list[Known | None] = []  # what all adds up to each told

    def add(self, value: int, told: Known | None, alone: bool) -> None:
        """An add that told ``told`` (None: nothing).  ``alone``: the last add was of the same role."""
        self.value += value
        before = self.prefix[-1] if self.prefix else None
        self.highest.append(max(self.value, self.highest[-1]) if self.highest else self.value)
        self.prefix.append(told if before is None or (alone and told is not None) else join(before, told))

    def reached(self, needed: int) -> Known | None:
        """What a wait for ``needed`` learns for certain: from the adds that first made so many, not from later ones."""
        at = bisect_left(self.highest, needed)
        return self.prefix[at] if needed > 0 and at < len(self.prefix) else None

    def all(self) -> Known | None:
        """What all adds so far told."""
        return self.prefix[-1] if self.prefix else None


def join(known: Known, told: Known | None) -> Known:
    """What both know."""
    if told is None or told is known:
        return known
    joined: Known = np.maximum(known, told)
    return joined


def grown(known: Known, size: int) -> Known:
    """``known`` with components up to ``size``."""
    larger: Known = np.zeros(size, np.int32)
    larger[: len(known)] = known
    return larger


def waited(wait: Any) -> str:
    """A wait in words, with its line; empty if there was none."""
    if wait is None:
        return ""
    counter, needed, site = wait
    index = ", ".join(map(str, counter.index))
    line = f"(line {site.span.line})"
    if site.op in ("fill", "drain"):
        return f"{site.op} of `{counter.name}`, stage {index} {line}"
    if counter.name.startswith("entry words"):
        return f"every rank has begun this launch {line}"
    if not counter.index and not site.what:
        return f"{counter.name} {line}"
    return f"wait for {counter.name}{f'[{index}]' if index else ''} >= {needed} {line}"
