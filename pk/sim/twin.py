"""The exhaustive search of ``csrc/explore.cpp`` in Python: the same states in the same order, but slowly."""

from __future__ import annotations

import itertools

from pk.sim.system import Flat

KEPT = 16  # failures with a trace
State = tuple[int, ...]
Failure = tuple[bool, int, list[int]]  # a deadlock; else the actor whose step's requirement did not hold; the trace
Result = tuple[int, int, int, int, int, int, int, bool, list[Failure]]


def explore(flat: list[list[int]], max_states: int, reduce: bool, deadlocks: bool, stop: bool) -> Result:
    """(states, transitions, deadlocks, violations, finals, widest, depth, complete, failures), see ``explore.hpp``."""
    search = _Search(Flat(*flat), max_states, reduce, deadlocks, stop)
    search.run()
    failures = [(actor < 0, actor, search.path(state) + [actor][actor < 0 :]) for state, actor in search.failures]
    return (
        len(search.log), search.transitions, search.deadlocks, search.violations, search.finals, search.widest,
        search.depth, search.complete, failures,
    )  # fmt: skip


class _Search:
    """Breadth first; a state is how many steps each actor has taken, and every path to it has the same length."""

    def __init__(self, flat: Flat, max_states: int, reduce: bool, deadlocks: bool, stop: bool) -> None:
        self.max_states, self.reduce, self.count_deadlocks, self.stop = max_states, reduce, deadlocks, stop
        self.start, self.watch = flat.start, flat.watch
        self.lengths = [b - a for a, b in itertools.pairwise(flat.actors)]
        self.first = flat.actors
        self.guards = _rows(flat.guard_first, flat.guards, 3)
        self.adds = _rows(flat.add_first, flat.adds, 2)
        self.requires = _rows(flat.require_first, flat.requires, 2)
        self.free = flat.free
        self.log: list[tuple[int, int]] = [(0, 0)]
        self.transitions = self.deadlocks = self.violations = self.finals = self.widest = self.depth = 0
        self.complete = True
        self.failures: list[tuple[int, int]] = []

    def run(self) -> None:
        here: dict[State, int] = {(0,) * len(self.lengths): 0}
        while here:
            self.widest = max(self.widest, len(here))
            there: dict[State, int] = {}
            for state, number in here.items():
                if not self.expand(state, number, there):
                    return
            self.depth += bool(there)
            here = there

    def values(self, state: State) -> list[int]:
        values = [*self.start, *state]
        for first, pc in zip(self.first, state, strict=False):
            for step in range(first, first + pc):
                for counter, value in self.adds[step]:
                    values[counter] += value
        return values

    def expand(self, state: State, number: int, there: dict[State, int]) -> bool:
        """Enter the successors of ``state``; False: the search ends here."""
        values = self.values(state)
        ready: list[int] = []
        finished, broken, alone = True, False, -1
        for actor, pc in enumerate(state):
            if pc == self.lengths[actor]:
                continue
            finished = False
            step = self.first[actor] + pc
            if not all(values[v] == n if exact else values[v] >= n for v, n, exact in self.guards[step]):
                continue
            ready.append(actor)
            if any(values[v] < n for v, n in self.requires[step]):
                self.fail(number, actor)
                broken = True
                if self.stop:
                    return False
            if self.reduce and alone < 0 and self.free[step] and not self.watched(actor, step, values):
                alone = actor
        if not ready:
            self.finals += finished
            if not finished and self.count_deadlocks:
                self.fail(number, -1)
                return not self.stop
            return True
        return self.spread(state, number, [alone] if alone >= 0 and not broken else ready, there)

    def watched(self, actor: int, step: int, values: list[int]) -> bool:
        """Whether the step changes a variable that is still below what some step requires of it."""
        at = len(self.start) + actor
        return values[at] < self.watch[at] or any(values[c] < self.watch[c] for c, _ in self.adds[step])

    def fail(self, number: int, actor: int) -> None:
        if len(self.failures) < KEPT:
            self.failures.append((number, actor))
        if actor < 0:
            self.deadlocks += 1
        else:
            self.violations += 1

    def spread(self, state: State, number: int, ready: list[int], there: dict[State, int]) -> bool:
        self.transitions += len(ready)
        for actor in ready:
            successor = (*state[:actor], state[actor] + 1, *state[actor + 1 :])
            if successor in there:
                continue
            if len(self.log) >= self.max_states:
                self.complete = False
                return False
            there[successor] = len(self.log)
            self.log.append((number, actor))
        return True

    def path(self, state: int) -> list[int]:
        found = []
        while state:
            state, actor = self.log[state]
            found.append(actor)
        return found[::-1]


def _rows(first: list[int], entries: list[int], width: int) -> list[list[tuple[int, ...]]]:
    """The entries of each step, as tuples of ``width``."""
    return [[tuple(entries[width * i : width * i + width]) for i in range(a, b)] for a, b in itertools.pairwise(first)]
