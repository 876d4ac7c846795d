"""A kernel in every order: its skeleton explored, and what goes wrong as findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pk import errors
from pk.ir import nodes as ir
from pk.sim import order
from pk.sim.explore import MAX_STATES, Exploration, Failure, explore
from pk.sim.findings import Finding, Place
from pk.sim.skeleton import Skeleton, skeleton, ways_to_claim
from pk.sim.skeleton_parts import Note, Shapes, Touch
from pk.sim.system import Guard, Step, System

FULL = 300_000  # states spent on every single order, of at most FULL_STEPS steps, before the reduction has to do
FULL_STEPS = 150
MAX_WAYS = 4096  # ways to claim tasks that are explored
MAX_STEPS = 200_000  # steps explored, all ways together
MAX_ORDERING = 50_000_000  # steps spent on ordering accesses
MAX_FINDINGS = 20
MAX_TRACE = 60  # steps of a trace in a finding
_IN_FLIGHT = frozenset({"begin", "load", "read", "land", "signal"})


@dataclass(frozen=True, slots=True)
class Explored:
    """The findings of an exhaustive exploration, and how far it went.

    ``complete``: deadlocks and violations were looked for in all orders.  ``note``: one sentence for a report; it
    says what was left out, if anything was.
    """

    findings: tuple[Finding, ...]
    states: int
    complete: bool
    note: str
    seconds: float


def explore_kernel(
    kernel: ir.Kernel,
    shapes: Shapes | Sequence[Shapes],
    world: int,
    sms: int,
    scalars: Mapping[str, int | float] | Sequence[Mapping[str, int | float]] | None = None,
    max_states: int = MAX_STATES,
) -> Explored:
    """Explore every order of one launch of ``kernel`` on ``world`` ranks of ``sms`` SMs.

    ``shapes``: the shape of each tensor argument, by name, the same on all ranks or a list of one for each;
    ``scalars``: the run-time numbers, likewise.  Found are deadlocks, stages and signals that come too early, and
    accesses to the same memory that come in both orders.  Tensors that share memory are taken for separate.

    Raises :class:`NotExplorable` for a kernel whose synchronisation depends on loaded values, and
    :class:`pk.errors.SimulationError` for what a kernel must not do.
    """
    began = time.perf_counter()
    everywhere: list[Shapes] = [shapes] * world if isinstance(shapes, Mapping) else list(shapes)
    numbers = [scalars] * world if isinstance(scalars, Mapping) else list(scalars or [{}] * world)
    if len(everywhere) != world or len(numbers) != world:
        raise errors.ArgumentError(f"explore_kernel needs shapes and scalars of {world} ranks.")
    found: dict[object, Finding] = {}
    so_far = _Progress()
    ways = ways_to_claim(kernel, everywhere, sms, numbers, MAX_WAYS)
    for claims in ways.assignments:
        if so_far.ways and (so_far.steps >= MAX_STEPS or so_far.states >= max_states):
            break
        for finding in so_far.explore(skeleton(kernel, everywhere, sms, numbers, claims), max_states):
            found.setdefault(finding.key, finding)
        if len(found) >= MAX_FINDINGS:
            break
    note, complete = so_far.note(ways.total), so_far.complete and so_far.ways == ways.total
    return Explored(tuple(found.values())[:MAX_FINDINGS], so_far.states, complete, note, time.perf_counter() - began)


@dataclass(slots=True)
class _Progress:
    """How much has been explored: states and steps of so many ways to claim tasks.

    ``full``: each single order, without reduction.  ``ordered``: accesses were ordered too, but for ``nowhere`` of
    which only the data knows where they are.
    """

    ways: int = 0
    states: int = 0
    steps: int = 0
    complete: bool = True
    full: bool = True
    ordered: bool = True
    nowhere: int = 0

    def explore(self, made: Skeleton, max_states: int) -> list[Finding]:
        """Every order of one way, if they are few; else enough of them to decide."""
        self.ways += 1
        steps = sum(len(a.steps) for a in made.system.actors)
        self.steps += steps
        left = max_states - self.states
        result = explore(made.system, min(FULL, left)) if self.full and steps <= FULL_STEPS else None
        if result is None or not (result.complete or result.failures):
            result, self.full = explore(made.system, left, reduce=True), False
        self.states += result.states
        self.complete = self.complete and (result.complete or bool(result.failures))
        self.nowhere = max(self.nowhere, sum(t.window is None for t in made.touches))
        found = [*_failures(made.system, result)]
        if order.conflicting(made.touches) * steps > MAX_ORDERING:
            self.ordered = False
            return found
        return [*found, *_races(made)]

    def note(self, ways: int) -> str:
        """A sentence for a report; it says what was left out, if anything was."""
        kind = "each single one" if self.full else "by partial-order reduction"
        text = f"explored every order of {self.steps:,} steps ({kind}): {self.states:,} states"
        if ways > 1:
            text += f", in {self.ways:,} of the {ways:,} ways to claim the tasks"
        if not self.complete or self.ways < ways:
            text = f"NOT COMPLETE, what was not found may still exist: {text}"
        if not self.ordered:
            text += "; accesses to memory were not ordered, they are too many: use smaller tensors"
        if self.nowhere:
            text += f"; {self.nowhere:,} accesses at places that depend on data were not ordered"
        return text


# -------------------------------------------------------------------------------------------------- deadlocks
def _failures(system: System, result: Exploration) -> Iterator[Finding]:
    for failure in result.failures:
        if failure.deadlock:
            stuck = _Stuck(system, failure)
            if not stuck.waits_for_claim():
                yield from stuck.findings()
        else:
            yield _too_early(failure)


class _Stuck:
    """A state in which nothing can happen any more."""

    def __init__(self, system: System, failure: Failure) -> None:
        self.system, self.failure, self.pcs = system, failure, failure.pcs
        self.missing = {actor.index: missing for actor, _, missing in failure.stuck()}
        self.roles = [index for index in self.missing if self.note(index).kind not in _IN_FLIGHT]
        self.head = f"{len(self.roles)} roles wait for ever, in every schedule that comes this far"

    def note(self, index: int) -> Note:
        """Where the step at which an actor is stuck comes from."""
        return _note_of(self.system.actors[index].steps[self.pcs[index]])

    def waits_for_claim(self) -> bool:
        """Whether a block that is free to claim stands still only because this way to claim has others claim."""
        return any(self.note(index).kind == "claim" for index in self.roles)

    def findings(self) -> Iterator[Finding]:
        """The waits that nothing can end; else a cycle of roles that wait for each other."""
        hopeless = [(i, g) for i in self.roles for g in self.missing[i] if not self.providers(g)]
        if hopeless:
            yield from (self.hopeless(index, guard) for index, guard in hopeless)
            return
        cycle = self.cycle()
        names = [self.system.actors[index].name for index in cycle]
        message = f"{self.head}: {' -> '.join([*names, *names[:1]])}" if cycle else self.head
        advice = "Let one of them signal before it waits, or do the waits in one order on every rank."
        trace = self.trace(cycle or self.roles)
        yield Finding("deadlock", message, tuple(map(self.place, cycle)), advice, None, trace)

    def place(self, index: int) -> Place:
        """A stuck role, and what it waits for."""
        what = f"{self.note(index).what}: {'; '.join(map(self.failure.describe, self.missing[index]))}"
        pc = self.pcs[index]
        return _place(self.note(index), what, self.system.actors[index].steps[pc - 1].text if pc else "")

    def hopeless(self, index: int, guard: Guard) -> Finding:
        """A wait for which no step is left that could help."""
        system, actor = self.system, self.system.actors[index]
        adds = [v for a in system.actors for s in a.steps for counter, v in s.adds if counter == guard.variable]
        most = sum(adds) + system.start[guard.variable]
        name, place, trace = system.variable(guard.variable), (self.place(index),), self.trace([index])
        if adds and most < guard.value:
            message = f"{self.head}: all that is ever added to {name} is {most}, but {actor.name} needs {guard.value}"
            advice = "Count the signals that are sent to this counter, tails included, and wait for as many."
            return Finding("bad-count", message, place, advice, None, trace)
        message = f"{self.head}: nobody adds to {name}, for which {actor.name} waits"
        advice = "Signal this counter on this rank: compare index and rank of the signal with those of the wait."
        return Finding("deadlock", message, place, advice, None, trace)

    def trace(self, roles: list[int]) -> tuple[str, ...]:
        """How ``roles`` came where they stand, and what was done for them after: nothing that concerns only others."""
        missing = {g.variable for index in roles for g in self.missing[index]}
        goals = [(index, self.pcs[index] - 1) for index in roles if self.pcs[index]]
        for index, (actor, pc) in enumerate(zip(self.system.actors, self.pcs, strict=True)):
            steps = enumerate(actor.steps[:pc])
            goals += [(index, at) for at, step in steps if any(counter in missing for counter, _ in step.adds)]
        return _trace(_words(self.system, order.Runs(self.system).needed(self.failure.trace, goals)))

    def providers(self, guard: Guard) -> list[int]:
        """Stuck actors that have steps left which would bring ``guard`` nearer."""
        if guard.variable < 0:
            return [-1 - guard.variable]
        found = []
        for index in self.missing:
            left = self.system.actors[index].steps[self.pcs[index] :]
            if any(counter == guard.variable and value > 0 for s in left for counter, value in s.adds):
                found.append(index)
        return found

    def cycle(self) -> list[int]:
        """Roles each of which waits for what the next would do."""
        at, path = next(iter(self.roles), -1), []
        while at not in path and at >= 0:
            path.append(at)
            nexts = [p for g in self.missing[at] for p in self.providers(g)]
            at = next((p for p in nexts if p in path), nexts[0] if nexts else -1)
        ring = path[path.index(at) :] if at in path else path
        return [index for index in ring if index in self.roles]


# ------------------------------------------------------------------------------------------ too early, in both orders
def _too_early(failure: Failure) -> Finding:
    actor, step = failure.steps()[-1]
    note, at = _note_of(step), failure.pcs[actor.index]
    if note.kind == "signal":
        what = "a signal can arrive before the stores that it should release"
        advice = "It must wait for their completion."
    else:
        what = f"{'fill' if note.kind == 'fill' else 'drain'} of a stage too early: the other side is not done with it"
        advice = "Every fill needs the drain before it, every drain its fill."
    message = f"{what} ({'; '.join(map(failure.describe, failure.broken()))})"
    place = _place(note, note.what, _synchronised(failure.system, actor.index, max(at - (note.kind != "signal"), 0)))
    return Finding("race", message, (place,), advice, None, _trace(failure.lines()))


def _races(made: Skeleton) -> Iterator[Finding]:
    seen: set[object] = set()
    runs = order.Runs(made.system)
    for x, y in order.races(runs, made.touches):
        sides = tuple(_side(made.system, t) for t in (x, y))
        key = frozenset((p.span, p.role) for p in sides)
        if key in seen:
            continue
        seen.add(key)
        message = f"nothing orders the {x.kind} and the {y.kind} of `{x.tensor}` on rank {x.rank}"
        trace = _trace(_words(made.system, runs.way((y.actor, y.step), (x.actor, x.step))))
        advice = "Order them by a signal after the one and a wait before the other."
        yield Finding("race", message, sides, advice, None, trace)


def _words(system: System, trace: list[int]) -> Iterator[str]:
    pcs = [0] * len(system.actors)
    for actor in trace:
        yield f"{system.actors[actor].name}: {system.actors[actor].steps[pcs[actor]].text}"
        pcs[actor] += 1


def _side(system: System, touch: Touch) -> Place:
    """One side of a race."""
    note = _note_of(system.actors[touch.actor].steps[touch.step])
    where = ", ".join(f"{a}:{b}" for a, b in touch.window or ())
    what = f"{touch.kind} of {touch.tensor}[{where}] on rank {touch.rank}"
    place = _place(note, what, _synchronised(system, touch.actor, touch.step))
    return place if touch.span is None else replace(place, span=touch.span)


def _synchronised(system: System, actor: int, at: int) -> str:
    """The wait with which step ``at`` begins; of an operation in flight, that of the step which issued it."""
    steps = system.actors[actor].steps
    while _note_of(steps[at]).kind in _IN_FLIGHT - {"begin"}:
        issuer = steps[0].guards[0]  # the role, or the operation whose landing this is
        steps, at = system.actors[-1 - issuer.variable].steps, issuer.value - 1
    return steps[at].text


def _trace(lines: Iterable[str]) -> tuple[str, ...]:
    """A trace to print: of a long one the beginning and the end."""
    every = tuple(lines)
    left = len(every) - MAX_TRACE
    half = MAX_TRACE // 2
    return every if left <= 0 else (*every[:half], f"... {left} more steps ...", *every[-half:])


def _place(note: Note, what: str, last: str) -> Place:
    last = "" if last.startswith("begins") else last
    return Place(note.rank, note.block, note.role, what, note.span, note.task, note.stage, last)


def _note_of(step: Step) -> Note:
    assert isinstance(step.note, Note)
    return step.note
