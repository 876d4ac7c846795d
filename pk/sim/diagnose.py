"""Why a launch came to a stop: who should have signalled, and what it waits for itself.

``diagnose`` takes a launch in which nothing can happen any more and makes :class:`Finding` s: a counter that nobody
signals, a wait for more than all signals together, a stage that nobody fills or drains again, roles that wait for each
other in a circle, blocks that wait for blocks which have no room.  Roles that merely wait for one of these are not
named again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pk.ir import nodes as ir
from pk.ir.split import expressions, statements, walk
from pk.sim.findings import Finding, Place
from pk.sim.ghost import Futures, Gift, follow

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Role
    from pk.sim.parts import Counter, Site, Wait

PIPELINE = "Make every role fill and drain each pipeline equally often, and in one order."
STAGE_OPS = ("fill", "drain")
_PARTNER = {"fill": "drain", "drain": "fill"}
EDGES = 8  # roles that one role waits for, of which circles are searched
SHOWN = 4  # findings of one deadlock, roles of one circle, places of one list


@dataclass(frozen=True, slots=True, eq=False)
class Stuck:
    """A role that waits (copied, since following the roles changes them); ``seen``: the counter's value."""

    role: Role
    counter: Counter
    needed: int
    seen: int
    site: Site
    task: tuple[tuple[str, int], ...]
    last: str

    def place(self, more: str = "") -> Place:
        """One side of a finding."""
        r = self.role
        what = f"{self.op} needs {self.needed}, sees {self.seen}{more}"
        if self.site.op == "joins":
            what = f"begins when the communicator of its block has ended{more}"
        stage = f"{self.site.what}{indexed(self.counter)}" if self.site.op in STAGE_OPS else ""
        return Place(r.rank, r.block, r.title, what, self.site.span, self.task, stage, self.last)

    @property
    def op(self) -> str:
        """``wait of begun[0, 1]``."""
        return f"{self.site.op} of {self.counter.name}{indexed(self.counter)}"


def diagnose(launch: Launch, kernel: ir.Kernel, seed: int | None = None) -> list[Finding]:
    """The causes of a deadlock, the likeliest first, at most ``SHOWN``; the launch cannot be used afterwards."""
    stuck = [_stuck(role) for role in launch.roles if role.blocked is not None]
    late = [role for role in launch.roles if not role.started]
    values = {counter: counter.value for counter, _ in launch.counters()}
    futures = follow(launch, [s.role for s in stuck] + late, _stage_spans(kernel))
    resident = launch.room.resident if launch.room is not None else None
    case = _Case(kernel, stuck, late, futures, dict(launch.counters()), values, resident)
    found: dict[tuple[object, ...], Finding] = {}
    for message, kind, places, advice in case.causes():
        finding = Finding(kind, message, places, advice, seed)
        found.setdefault(finding.key, finding)
    return list(found.values())[:SHOWN]


Cause = tuple[str, str, tuple[Place, ...], str]  # message, kind, places, advice
Circle = list[tuple[Stuck, Gift]]  # who waits, and for what of the next one


@dataclass(slots=True)
class _Case:
    """One deadlock.

    ``known``: the rank of every counter of signals; ``values``: what they were before the roles were followed;
    ``late``: roles of blocks without room, of which ``resident`` fit.
    """

    kernel: ir.Kernel
    stuck: list[Stuck]
    late: list[Role]
    futures: Futures
    known: dict[Counter, int]
    values: dict[Counter, int]
    resident: int | None

    def causes(self) -> Iterator[Cause]:
        """Missing signals, then blocks without room, then circles, then pipelines that nobody serves."""
        short = [s for s in self.stuck if s.site.op not in STAGE_OPS and self._short(s)]
        yield from (self._missing(s) for s in short if s.counter in self.known)
        yield from self._without_room(short)
        yield from self._circles()
        yield from (self._dry(s) for s in self.stuck if s.site.op in STAGE_OPS and self._short(s))

    def _short(self, s: Stuck) -> bool:
        """Whether all that would still come is not enough."""
        return self.futures.complete and s.seen + sum(g.value for g in self.futures.gifts(s.counter)) < s.needed

    # -------------------------------------------------------------------------------------- missing signals
    def _missing(self, s: Stuck) -> Cause:
        gifts = self.futures.gifts(s.counter)
        total, rank = s.seen + sum(g.value for g in gifts), self.known[s.counter]
        name = f"{s.counter.name}{indexed(s.counter)} of rank {rank}"
        lines = signal_lines(self.kernel, s.counter.name)
        if total:
            each = f" (from {sentence(lines)})" if lines else ""
            message = f"{name} never reaches {s.needed}: all signals together make {total}{each}"
            advice = f"Wait for {total}, or signal {name} {s.needed - total} more."
            return message, "bad-count", (s.place(), *map(_giver, gifts[: SHOWN - 1])), advice
        advice = f"Find who should signal `{s.counter.name}` and why it does not, or wait for less."
        return f"nobody signals {name}: {self._instead(s, lines)}", "deadlock", (s.place(),), advice

    def _instead(self, s: Stuck, lines: list[int]) -> str:
        """Where the signals of the array went, or would go."""
        name, rank = s.counter.name, self.known[s.counter]
        if not lines:
            return f"the kernel has no signal to `{name}`"
        went: dict[tuple[bool, int, tuple[int, ...]], int] = {}
        for counter, at in self.known.items():
            value = self.values.get(counter, 0) + sum(g.value for g in self.futures.gifts(counter))
            if counter.name == name and value:
                went[at != rank, at, counter.index] = value
        if not went:
            return f"the signal to `{name}` ({sentence(lines)}) is never reached"
        shown = [f"{name}{_index(index)} of rank {at} ({value})" for (_, at, index), value in sorted(went.items())]
        more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
        return f"the signals to `{name}` ({sentence(lines)}) go to {', '.join(shown[:SHOWN])}{more}"

    def _dry(self, s: Stuck) -> Cause:
        """A stage that nobody publishes or frees any more."""
        other = _PARTNER[s.site.op]
        r = s.role
        waits = [t for t in self.stuck if (t.role.rank, t.role.block) == (r.rank, r.block) and t is not s]
        stage, done = f"{s.counter.name}{indexed(s.counter)}", {"fill": "filled", "drain": "drained"}[other]
        message = f"the {r.title} needs stage {stage} {done} {s.needed} times, and it is {done} only {s.seen}"
        return message, "deadlock", (s.place(), *(t.place() for t in waits[: SHOWN - 1])), PIPELINE

    # ---------------------------------------------------------------------------------- blocks without room
    def _without_room(self, short: list[Stuck]) -> Iterator[Cause]:
        late = set(map(id, self.late))
        for s in self.stuck:
            for g in () if s in short else self._needed(s):
                if id(g.role) not in late:
                    continue
                message = (
                    f"block {g.role.block} of rank {g.role.rank} would signal {s.counter.name}{indexed(s.counter)} "
                    f"(line {g.span.line}), but it cannot start: {fitting(self.resident)} on the device at once, and "
                    "what is on it waits"
                )
                places = (s.place(), _giver(g, "cannot start before another block ends; it "))
                advice = f"Launch no more blocks a rank than fit ({self.resident}), or let none wait for a later one."
                yield message, "not-resident", places, advice

    # ---------------------------------------------------------------------------------------------- circles
    def _circles(self) -> Iterator[Cause]:
        """The circles of the wait-for graph, the shortest first."""
        at = {id(s.role): s for s in self.stuck}
        edges = {
            s: [(g, at[id(g.role)]) for g in self._needed(s)[:EDGES] if id(g.role) in at]
            for s in self.stuck
            if not self._short(s)
        }
        for circle in sorted(_circles_of(edges), key=len)[:SHOWN]:
            yield self._circle(circle)

    def _needed(self, s: Stuck) -> list[Gift]:
        """The first gift of each role without which the wait cannot end; of every role if there are none such."""
        by_role: dict[int, list[Gift]] = {}
        for g in self.futures.gifts(s.counter):
            by_role.setdefault(id(g.role), []).append(g)
        total = s.seen + sum(g.value for gifts in by_role.values() for g in gifts)
        needed = [gifts[0] for gifts in by_role.values() if total - sum(g.value for g in gifts) < s.needed]
        return needed or [gifts[0] for gifts in by_role.values()]

    def _circle(self, circle: Circle) -> Cause:
        places = []
        for s, g in circle:
            how = {"fill": "would drain it", "drain": "would fill it", "joins": "has to end"}.get(
                s.site.op, "would signal it"
            )
            line = f" at line {g.span.line}" if g.span.line else ""
            task = f", at {_task(g.task)}" if g.task and g.task != s.task else ""
            who = "the same role" if g.role is s.role else f"{_who(s.role, g.role)}"
            places.append(s.place(f"; {who} {how}{line}{task}"))
        s, g = circle[0]
        if len(circle) == 1:
            message = f"the {s.role.title} waits for itself: {s.op} comes before the line that ends it ({g.span.line})"
            advice = "Signal before the wait, or let another role do one of the two."
        else:
            message = f"{len(circle)} roles wait for each other in a circle"
            pipes = all(s.site.op in STAGE_OPS for s, _ in circle)
            more = ", or give the pipeline more stages" if any(s.site.op in STAGE_OPS for s, _ in circle) else ""
            advice = PIPELINE if pipes else f"Let one of them signal before it waits{more}."
            if any(s.site.op == "joins" for s, _ in circle):
                advice = (
                    "Let the communicator wait for no task that only its own blocks may be left to do, or drop joins=."
                )
        if len(places) > 2 * SHOWN:
            message += f"; {2 * SHOWN} of them are shown"
        return message, "deadlock", tuple(places[: 2 * SHOWN]), advice


def _circles_of(edges: dict[Stuck, list[tuple[Gift, Stuck]]]) -> list[Circle]:
    """The circles that a depth-first search meets."""
    found: list[Circle] = []
    done: set[Stuck] = set()
    for start, first in edges.items():
        if start in done:
            continue
        path, on = [(start, iter(first))], {start: 0}
        steps: Circle = []  # path[i], and what it wants of path[i + 1]
        while path:
            here, left = path[-1]
            gift, following = next(left, (None, None))
            if gift is None or following is None:
                done.add(here)
                del on[here]
                path.pop()
                del steps[-1:]
            elif following in on:
                found.append([*steps[on[following] :], (here, gift)])
            elif following in edges and following not in done:
                steps.append((here, gift))
                on[following] = len(path)
                path.append((following, iter(edges[following])))
    return found


# ------------------------------------------------------------------------------------------------------ in words
def indexed(counter: Counter) -> str:
    """``[0, 1]``, or nothing for a single counter."""
    return _index(counter.index)


def fitting(resident: int | None) -> str:
    """``2 blocks of a rank fit``."""
    return "1 block of a rank fits" if resident == 1 else f"{resident} blocks of a rank fit"


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


def synchronised(wait: Wait | None) -> str:
    """What a role last waited for with success, as :class:`Place` has it; empty for none that has a line."""
    if wait is None or not wait[1] or not wait[2].span.line:
        return ""
    counter, needed, site = wait
    if counter.name.startswith("entry words"):
        return f"every rank has begun this launch (line {site.span.line})"
    return f"{site.op} of {counter.name}{indexed(counter)} >= {needed} (line {site.span.line})"


def signal_lines(kernel: ir.Kernel, name: str) -> list[int]:
    """The lines of the kernel that add to the counters ``name``."""
    return sorted({s.span.line for s in signalling(kernel, name)})


def signalling(kernel: ir.Kernel, name: str) -> Iterator[ir.Statement]:
    """The statements of the kernel that add to the counters ``name``."""
    for _, body in kernel.classes:
        for s in statements(body):
            if name in counters_in(s, ("signal", "signal_all", "signal_each", "barrier", "fetch_add")):
                yield s


def counters_in(s: ir.Statement, ops: tuple[str, ...]) -> set[str]:
    """The signals arrays that ``s`` itself passes to one of ``ops``."""
    calls: list[ir.Do | ir.Call] = [e for e in walk(expressions(s)) if isinstance(e, ir.Call)]
    if isinstance(s, ir.Do):
        calls.append(s)
    return {o.signals for c in calls if c.op in ops for o in c.operands if isinstance(o, ir.Signal)}


def _stage_spans(kernel: ir.Kernel) -> dict[tuple[str, str], ir.Span]:
    """Where each pipeline is filled and drained first."""
    spans: dict[tuple[str, str], ir.Span] = {}
    for _, body in kernel.classes:
        for s in statements(body):
            if isinstance(s, ir.Stage):
                spans.setdefault((s.pipeline, s.mode), s.span)
    return spans


def _stuck(role: Role) -> Stuck:
    assert role.blocked is not None
    counter, needed, site = role.blocked
    task = tuple(zip(*role.task, strict=True))
    return Stuck(role, counter, needed, counter.value, site, task, synchronised(role.passed))


def _giver(g: Gift, before: str = "") -> Place:
    r = g.role
    what = f"{before}would add {g.value} to {g.counter.name}{indexed(g.counter)}"
    return Place(r.rank, r.block, r.title, what, g.span, g.task, last=synchronised(r.passed))


def _who(me: Role, other: Role) -> str:
    if (me.rank, me.block) == (other.rank, other.block):
        return f"the {other.title} of this block"
    return f"rank {other.rank}, block {other.block}, {other.title}"


def _task(task: tuple[tuple[str, int], ...]) -> str:
    return "task " + ", ".join(f"{name}={value}" for name, value in task)


def sentence(lines: list[int]) -> str:
    """``line 3`` or ``lines 3, 5``."""
    return f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
