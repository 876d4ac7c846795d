"""A system of straight-line programs over integer counters: what the exhaustive explorer explores.

    system = System()
    full, free = system.counter("full"), system.counter("free", start=1)
    sender, receiver = system.actor("sender"), system.actor("receiver")
    sender.step("takes a credit", at_least(free, 1), adds={free: -1})
    sender.step("sends", adds={full: 1})
    receiver.step("receives", at_least(full, 1), adds={full: -1, free: 1})

Every actor takes its steps in order.  A step can be taken when all its guards hold, adds to counters, and is one
indivisible moment.  What takes effect later (a store, a signal) is an actor of its own, whose first step waits until
the issuer has come past the issue (``actor.past()``).  Loops are written out, so that every run ends.
"""

from __future__ import annotations

import itertools
from collections import Counter as Multiset
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNWATCHED = -(2**31)


@dataclass(frozen=True, slots=True)
class Guard:
    """``variable`` is at least (``exact``: exactly) ``value``.

    Variable c >= 0 is a counter, variable -1 - a the number of steps that actor a has taken.
    """

    variable: int
    value: int
    exact: bool = False


def at_least(counter: int, value: int) -> Guard:
    """A guard: ``counter`` is at least ``value``."""
    return Guard(counter, value)


def exactly(counter: int, value: int) -> Guard:
    """A guard: ``counter`` is ``value``.  pk has no such wait; other systems do, and hang by it."""
    return Guard(counter, value, True)


@dataclass(frozen=True, slots=True)
class Step:
    """One moment of an actor.

    ``requires``: what must hold whenever the step is taken; a run in which it does not is a violation.  ``note``: of
    whoever made the system, untouched.
    """

    text: str
    guards: tuple[Guard, ...] = ()
    adds: tuple[tuple[int, int], ...] = ()
    requires: tuple[Guard, ...] = ()
    note: Any = None


@dataclass(slots=True)
class Actor:
    """A program: its steps, in order."""

    name: str
    index: int
    steps: list[Step] = field(default_factory=list)

    def step(
        self,
        text: str,
        *guards: Guard,
        adds: Mapping[int, int] | None = None,
        requires: tuple[Guard, ...] = (),
        note: Any = None,
    ) -> None:
        """Append a step; ``requires`` takes ``at_least`` guards only."""
        assert not any(g.exact for g in requires), "a requirement is a lower bound"
        self.steps.append(Step(text, guards, tuple((adds or {}).items()), requires, note))

    def past(self, steps: int | None = None) -> Guard:
        """A guard: this actor has taken ``steps`` steps (None: all that it has now)."""
        return Guard(-1 - self.index, len(self.steps) if steps is None else steps)


@dataclass(slots=True)
class System:
    """Actors and counters.  A run ends when no actor can take a step; it is a deadlock if one has steps left."""

    counters: list[str] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)

    def counter(self, name: str, start: int = 0) -> int:
        """A new counter; returns its number."""
        self.counters.append(name)
        self.start.append(start)
        return len(self.counters) - 1

    def actor(self, name: str) -> Actor:
        """A new actor without steps."""
        self.actors.append(Actor(name, len(self.actors)))
        return self.actors[-1]

    def variable(self, variable: int) -> str:
        """What messages call a variable of a guard."""
        return self.counters[variable] if variable >= 0 else f"steps of {self.actors[-1 - variable].name}"

    def values(self, pcs: tuple[int, ...]) -> list[int]:
        """The counters when each actor has taken so many steps: they follow from that, whatever the order was."""
        values = list(self.start)
        for actor, pc in zip(self.actors, pcs, strict=True):
            for step in actor.steps[:pc]:
                for counter, value in step.adds:
                    values[counter] += value
        return values

    @property
    def monotone(self) -> bool:
        """Whether counters only grow and waits are lower bounds: then no step can ever disable another."""
        return not self._shaky()

    def _shaky(self) -> set[int]:
        """Counters that may shrink, and variables that somebody waits for exactly."""
        steps = [step for actor in self.actors for step in actor.steps]
        shrinking = {counter for step in steps for counter, value in step.adds if value < 0}
        return shrinking | {g.variable for step in steps for g in step.guards if g.exact}

    def flat(self) -> Flat:
        """The system as lists of integers, for the search; ``OverflowError`` if a counter could leave 32 bits."""
        steps = [step for actor in self.actors for step in actor.steps]
        reach: Multiset[int] = Multiset()
        for step in steps:
            reach.update({counter: abs(value) for counter, value in step.adds})
        for counter, start in enumerate(self.start):
            if abs(start) + reach[counter] >= 2**31 - 1:
                raise OverflowError(f"counter {self.counters[counter]} could leave the range of a 32-bit integer")
        watch = [UNWATCHED] * (len(self.counters) + len(self.actors))
        for requirement in (r for step in steps for r in step.requires):
            at = self._number(requirement.variable)
            watch[at] = max(watch[at], requirement.value)
        shaky = self._shaky()
        return Flat(
            _offsets(len(actor.steps) for actor in self.actors),
            _offsets(len(step.guards) for step in steps),
            [x for s in steps for g in s.guards for x in (self._number(g.variable), g.value, int(g.exact))],
            _offsets(len(step.adds) for step in steps),
            [x for step in steps for add in step.adds for x in add],
            _offsets(len(step.requires) for step in steps),
            [x for step in steps for r in step.requires for x in (self._number(r.variable), r.value)],
            list(self.start),
            [int(self._free(actor, step, shaky)) for actor in self.actors for step in actor.steps],
            watch,
        )

    def _number(self, variable: int) -> int:
        return variable if variable >= 0 else len(self.counters) - 1 - variable

    def _free(self, actor: Actor, step: Step, shaky: set[int]) -> bool:
        """Whether a step, once it can be taken, stays so, and taking it disables nobody.

        Such a step commutes with whatever others do before it: the search may take it at once, alone.
        """
        touched = {g.variable for g in (*step.guards, *step.requires)} | {counter for counter, _ in step.adds}
        return not shaky & (touched | {-1 - actor.index})


@dataclass(frozen=True, slots=True)
class Flat:
    """The lists of ``csrc/explore.hpp``, in its order.  Variables are counters, then actors."""

    actors: list[int]
    guard_first: list[int]
    guards: list[int]
    add_first: list[int]
    adds: list[int]
    require_first: list[int]
    requires: list[int]
    start: list[int]
    free: list[int]
    watch: list[int]

    def lists(self) -> list[list[int]]:
        """All of them."""
        return [
            self.actors, self.guard_first, self.guards, self.add_first, self.adds, self.require_first, self.requires,
            self.start, self.free, self.watch,
        ]  # fmt: skip


def _offsets(lengths: Any) -> list[int]:
    return [0, *itertools.accumulate(lengths)]
