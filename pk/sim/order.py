"""What must come before what, in every order: exact, and quick, for systems in which counters only grow.

In such a system no step disables another.  So all that can happen without one particular step is what one run reaches
in which that step is never taken; and what that run does not reach comes after the step in every order.  Two accesses
to the same memory of which neither must come before the other are a race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np

from pk.sim.explore import engine
from pk.sim.skeleton_parts import Touch, Window
from pk.sim.system import Guard, System

Event = tuple[int, int]  # actor, number of its step


class Runs:
    """Runs of a monotone system, each without one step."""

    def __init__(self, system: System) -> None:
        assert system.monotone
        self.system = system
        self._counters = len(system.counters)
        self._guards = [[[(self._at(g), g.value) for g in s.guards] for s in a.steps] for a in system.actors]
        self._flat = system.flat().lists()
        self._known: dict[Event | None, Sequence[int]] = {}

    def _at(self, guard: Guard) -> int:
        return guard.variable if guard.variable >= 0 else self._counters - 1 - guard.variable

    def without(self, event: Event | None) -> Sequence[int]:
        """How many steps each actor can take when ``event`` does not happen."""
        if event not in self._known:
            self.learn([event])
        return self._known[event]

    def learn(self, events: Iterable[Event | None]) -> None:
        """Find ``without`` of many events at once, natively where pk was built with a compiler."""
        new = [event for event in dict.fromkeys(events) if event not in self._known]
        extension = engine()
        if extension is None or not new:
            self._known.update({event: self.run(event)[0] for event in new})
            return
        pairs = [x for event in new for x in (event or (-1, -1))]
        rows = np.frombuffer(extension.reach(self._flat, pairs), np.int32).reshape(len(new), -1)
        self._known.update(zip(new, rows, strict=True))

    def run(self, frozen: Event | None) -> tuple[list[int], list[int]]:
        """One run without ``frozen``: how far each actor comes, and the actors in the order of their steps."""
        system, counters = self.system, self._counters
        values = [*system.start, *[0] * len(system.actors)]
        waiting: dict[int, list[int]] = defaultdict(list)
        trace: list[int] = []
        ready = list(range(len(system.actors) - 1, -1, -1))
        while ready:
            actor = ready.pop()
            steps, guards = system.actors[actor].steps, self._guards[actor]
            while True:
                pc = values[counters + actor]
                if pc == len(steps) or (actor, pc) == frozen:
                    break
                missing = next((v for v, needed in guards[pc] if values[v] < needed), None)
                if missing is not None:
                    waiting[missing].append(actor)
                    break
                trace.append(actor)
                values[counters + actor] += 1
                for changed in (counters + actor, *[c for c, _ in steps[pc].adds]):
                    ready += waiting.pop(changed, ())
                for counter, value in steps[pc].adds:
                    values[counter] += value
        return values[counters:], trace

    def before(self, first: Event, then: Event) -> bool:
        """Whether ``first`` comes before ``then`` in every order."""
        return bool(self.without(first)[then[0]] <= then[1])

    def way(self, frozen: Event, goal: Event) -> list[int]:
        """The steps that lead to ``goal`` (included) without ``frozen``, and hardly any other."""
        return self.needed(self.run(frozen)[1], [goal])

    def needed(self, trace: Sequence[int], goals: Iterable[Event]) -> list[int]:
        """Of a run (actors in the order of their steps) the part that its steps ``goals`` could not do without."""
        pcs: dict[int, int] = defaultdict(int)
        events: list[Event] = []
        adders: dict[int, list[int]] = defaultdict(list)  # variable -> positions of the steps that change it
        for position, actor in enumerate(trace):
            events.append((actor, pcs[actor]))
            adders[self._counters + actor].append(position)
            for counter, _ in self.system.actors[actor].steps[pcs[actor]].adds:
                adders[counter].append(position)
            pcs[actor] += 1
        at = {event: position for position, event in enumerate(events)}
        open_ends = [at[goal] for goal in goals]
        needed = set(open_ends)
        while open_ends:
            for position in self._causes(*events[open_ends.pop()], at, adders, trace):
                if position not in needed:
                    needed.add(position)
                    open_ends.append(position)
        return [trace[position] for position in sorted(needed)]

    def _causes(
        self, actor: int, pc: int, at: dict[Event, int], adders: dict[int, list[int]], trace: Sequence[int]
    ) -> Iterator[int]:
        """Positions of the step before, and of the first steps that together fulfil the guards."""
        if pc:
            yield at[actor, pc - 1]
        for variable, needed in self._guards[actor][pc]:
            if variable >= self._counters:
                if needed > 0:
                    yield at[variable - self._counters, needed - 1]
                continue
            value = self.system.start[variable]
            for position in adders[variable]:
                if value >= needed:
                    break
                mover = trace[position]
                step = self.system.actors[mover].steps[self._number(position, mover, adders)]
                value += dict(step.adds)[variable]
                yield position

    def _number(self, position: int, actor: int, adders: dict[int, list[int]]) -> int:
        return adders[self._counters + actor].index(position)


def races(runs: Runs, touches: Iterable[Touch]) -> Iterator[tuple[Touch, Touch]]:
    """Pairs of accesses to overlapping memory, at least one a write, that come in both orders."""
    by_buffer: dict[tuple[int, str], list[Touch]] = defaultdict(list)
    reached = runs.without(None)
    for touch in touches:
        if touch.window and touch.step < reached[touch.actor]:
            by_buffer[touch.rank, touch.tensor].append(touch)
    for mine in by_buffer.values():
        pairs = list(_conflicts(mine))
        runs.learn((t.actor, t.step) for pair in pairs for t in pair)
        for x, y in pairs:
            a, b = (x.actor, x.step), (y.actor, y.step)
            if not runs.before(a, b) and not runs.before(b, a):
                yield x, y


def _conflicts(touches: list[Touch]) -> Iterator[tuple[Touch, Touch]]:
    """Pairs of accesses that must be ordered; reads, and adds, do not race with each other."""
    if any(t.kind != "read" for t in touches):
        for x, y in combinations(touches, 2):
            harmless = x.kind == y.kind != "write" or (x.actor, x.step) == (y.actor, y.step)
            if not harmless and _overlap(x.window, y.window):
                yield x, y


def conflicting(touches: Iterable[Touch]) -> int:
    """How many accesses are to tensors that somebody writes: about as many runs are needed to order them."""
    written = {(t.rank, t.tensor) for t in touches if t.kind != "read"}
    return sum((t.rank, t.tensor) in written for t in touches)


def _overlap(x: Window | None, y: Window | None) -> bool:
    return bool(x and y) and all(a < d and c < b for (a, b), (c, d) in zip(x or (), y or (), strict=True))
