"""Every order of events: exhaustive exploration of a system of counters and programs (``pk.sim.system``).

    found = explore(system)
    print(found)                      # states, whether that is all of them, and the shortest way into a failure

The search is native (``csrc/explore.cpp``) where pk was built with a compiler, else Python's (``pk.sim.twin``): the
same states in the same order, and the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pk import env
from pk.sim import twin
from pk.sim.system import Actor, Guard, Step, System

if TYPE_CHECKING:
    from pk.ir import nodes as ir
    from pk.sim.exhaustive import Explored

MAX_STATES = 20_000_000
"""States explored before giving up, by default: about 6 bytes each, and two layers in full."""

_FULL = 1_000_000  # states spent on finding a shorter way into a failure that is already known
_SHOWN = 60  # steps of a trace in a text


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that goes wrong.

    ``deadlock``: nothing can happen any more, though actors have steps left.  Otherwise the last step of the trace
    was taken while one of its requirements did not hold.  ``trace``: the actors, in the order of their steps.
    ``shortest``: no shorter run fails in this way.
    """

    system: System
    deadlock: bool
    trace: tuple[int, ...]
    shortest: bool = True

    @property
    def pcs(self) -> tuple[int, ...]:
        """How many steps each actor has taken (the failing step of a violation not counted)."""
        pcs = [0] * len(self.system.actors)
        for actor in self.trace if self.deadlock else self.trace[:-1]:
            pcs[actor] += 1
        return tuple(pcs)

    def steps(self) -> list[tuple[Actor, Step]]:
        """The trace as actors and steps."""
        pcs, found = [0] * len(self.system.actors), []
        for actor in self.trace:
            found.append((self.system.actors[actor], self.system.actors[actor].steps[pcs[actor]]))
            pcs[actor] += 1
        return found

    def stuck(self) -> list[tuple[Actor, Step, list[Guard]]]:
        """Who has steps left at the end: the next one, and those of its guards that do not hold."""
        pcs, values = self.pcs, self.system.values(self.pcs)
        found = []
        for actor, pc in zip(self.system.actors, pcs, strict=True):
            if pc < len(actor.steps):
                step = actor.steps[pc]
                found.append((actor, step, [g for g in step.guards if not _holds(g, values, pcs)]))
        return found

    def broken(self) -> list[Guard]:
        """The requirements of the last step that did not hold (none in a deadlock)."""
        pcs, values = self.pcs, self.system.values(self.pcs)
        return [] if self.deadlock else [r for r in self.steps()[-1][1].requires if not _holds(r, values, pcs)]

    def describe(self, guard: Guard) -> str:
        """A guard in words, with the value seen at the end."""
        pcs = self.pcs
        seen = self.system.values(pcs)[guard.variable] if guard.variable >= 0 else pcs[-1 - guard.variable]
        return f"{self.system.variable(guard.variable)} {'==' if guard.exact else '>='} {guard.value} (it is {seen})"

    def lines(self) -> list[str]:
        """The trace in words, one step a line."""
        return [f"{actor.name}: {step.text}" for actor, step in self.steps()]

    def __str__(self) -> str:
        which = "shortest trace" if self.shortest else "trace (perhaps not the shortest)"
        lines = self.lines()
        if len(lines) > _SHOWN:
            half = _SHOWN // 2
            lines = [*lines[:half], f"... {len(lines) - 2 * half} more steps ...", *lines[-half:]]
        if self.deadlock:
            head = f"deadlock, {which}, {len(self.trace)} steps:"
            ends = [f"{a.name} waits: {step.text}: {'; '.join(map(self.describe, g))}" for a, step, g in self.stuck()]
        else:
            head = f"violation, {which}, {len(self.trace)} steps:"
            ends = [f"but this requires {self.describe(g)}" for g in self.broken()]
        return "\n".join([head, *(f"  {line}" for line in lines), *(f"  => {end}" for end in ends)])


@dataclass(frozen=True, slots=True)
class Exploration:
    """What an exploration found.

    ``complete``: every state that can be reached was (or with ``reduce`` enough of them to miss no deadlock and no
    violation), unless the search stopped at a failure.  If it is False, the limit of states was reached and what
    was not found may still exist.  ``deadlocks`` and ``violations`` are counted up to the end of the search, the first
    16 have a trace in ``failures``, shortest first.  ``finals``: states in which every actor has finished.
    """

    states: int
    transitions: int
    deadlocks: int
    violations: int
    finals: int
    widest: int
    depth: int
    complete: bool
    failures: tuple[Failure, ...]
    reduced: bool
    native: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all was explored and nothing fails."""
        return self.complete and not self.failures

    @property
    def failure(self) -> Failure | None:
        """The first failure, which has the shortest trace."""
        return self.failures[0] if self.failures else None

    def __str__(self) -> str:
        if self.failures:
            verdict = str(self.failures[0])
        elif self.complete:
            verdict = "no deadlock and no violation in any order"
        else:
            verdict = "NOT COMPLETE: the limit of states was reached; nothing was found up to there"
        kind = "enough to decide, by partial-order reduction" if self.reduced else "every order"
        rate = self.states / max(self.seconds, 1e-9)
        return f"{self.states:,} states ({kind}), {self.transitions:,} steps, {rate:,.0f} states/s\n{verdict}"


def explore(
    system: System,
    max_states: int = MAX_STATES,
    reduce: bool = False,
    stop: bool = True,
    deadlocks: bool = True,
    native: bool | None = None,
) -> Exploration:
    """Explore every order in which the steps of ``system`` can be taken.

    ``reduce``: take a step that commutes with all others alone (partial-order reduction): far fewer states, the same
    deadlocks, and a violation if there is one.  ``stop``: at the first failure.  ``deadlocks=False``: look for
    violations only.  ``native``: insist on the native search (True) or on Python's (False).

    Raises ``ValueError`` for ``max_states`` outside 1 .. 4,294,967,294 or a native search that is not there,
    ``OverflowError`` for counters that could leave 32 bits.
    """
    if not 1 <= max_states < 2**32 - 1:
        raise ValueError(f"max_states must lie between 1 and 4,294,967,294, not {max_states}")
    began, search, is_native = time.perf_counter(), *_search(native)
    states, transitions, stuck, violations, finals, widest, depth, complete, failures = search(
        system.flat().lists(), max_states, reduce, deadlocks, stop
    )
    found = tuple(
        # Every way into a state has the same length, and reduction keeps all deadlocks: theirs are always shortest.
        Failure(system, is_deadlock, tuple(trace), shortest=is_deadlock or not reduce)
        for is_deadlock, _, trace in failures
    )
    if found and not found[0].shortest:
        found = (_shortened(found[0], max_states, native), *found[1:])
    seconds = time.perf_counter() - began
    return Exploration(
        states, transitions, stuck, violations, finals, widest, depth, complete, found, reduce, is_native, seconds
    )


def explore_kernel(
    kernel: ir.Kernel,
    shapes: Mapping[str, tuple[int, ...]] | Sequence[Mapping[str, tuple[int, ...]]],
    world: int,
    sms: int,
    scalars: Mapping[str, int | float] | Sequence[Mapping[str, int | float]] | None = None,
    max_states: int = MAX_STATES,
) -> Explored:
    """Every order of one launch of a kernel, as findings; see ``pk.sim.exhaustive``."""
    from pk.sim import exhaustive

    return exhaustive.explore_kernel(kernel, shapes, world, sms, scalars, max_states)


def _search(native: bool | None) -> tuple[Any, bool]:
    """The search to use, and whether it is native."""
    extension = None if native is False else engine()
    if extension is None and native:
        raise ValueError("there is no native search: pk was installed without a C++ compiler, or PK_NATIVE=0 is set")
    return (twin.explore, False) if extension is None else (extension.explore, True)


def engine() -> Any:
    """The native module, or None where it was not built or ``PK_NATIVE=0`` turns it off."""
    if not env.NATIVE.get():
        return None
    try:
        from pk import _C
    except ImportError:
        return None
    return _C


def _shortened(failure: Failure, max_states: int, native: bool | None) -> Failure:
    """A violation by the shortest run: of all if they are few enough, else of those that take no other steps."""
    budget = min(max_states, _FULL)
    full = explore(failure.system, budget, deadlocks=False, native=native)
    if full.failures:
        return full.failures[0]
    within = System(failure.system.counters, failure.system.start)
    last = failure.trace[-1]
    for actor, pc in zip(failure.system.actors, failure.pcs, strict=True):
        kept = [replace(step, requires=()) for step in actor.steps[:pc]]
        within.actors.append(replace(actor, steps=kept + actor.steps[pc : pc + (actor.index == last)]))
    shorter = explore(within, budget, deadlocks=False, native=native)
    if not shorter.failures:
        return failure
    return Failure(failure.system, False, shorter.failures[0].trace, shortest=False)


def _holds(guard: Guard, values: list[int], pcs: tuple[int, ...]) -> bool:
    seen = values[guard.variable] if guard.variable >= 0 else pcs[-1 - guard.variable]
    return seen == guard.value if guard.exact else seen >= guard.value
