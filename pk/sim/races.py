"""Data races: two accesses of one place, not both reads and not both adds, that nothing orders (happens-before).

What orders, and no more: the program of a role; entry words; a pipeline's stages handed on; a signal and the wait that
needs it; claims of tasks; the end of a launch of a rank and its next.  A bulk copy is an actor of its own, issued by
its role and done when its stage is handed on (a load, the read of a store) or when a later signal of its role leaves
(the landing of a store).  So a race is found from almost any schedule, not only from one in which it does harm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from pk.ir import nodes as ir
from pk.ir.split import counters_of, expressions, statements, walk
from pk.sim.begin import Begin
from pk.sim.clocks import BULK, DIRECT, Actor, History, Known, Thread, grown, join, waited
from pk.sim.direct import DirectStore
from pk.sim.findings import Finding, Place
from pk.sim.machine import Arrival, Landing, Load, Operation, Role, Store
from pk.sim.ops_vectors import Gather, Settled
from pk.sim.parts import Counter, Site, Stage
from pk.sim.shadow import Record, Shadow

if TYPE_CHECKING:
    from pk.sim.machine import Launch
    from pk.sim.memory import Access, Buffer

__all__ = ["Races"]


class Races:
    """The detector.  ``exit_words``: whether a launch ends only when every rank's has (None: as the compiler decides).

    One detector may see several launches of the same ranks, one after the other; ``report`` is called with each race.
    """

    def __init__(self, report: Callable[[Finding], None], exit_words: bool | None = None) -> None:
        self._report, self._exit_words = report, exit_words
        self._streams: list[Known] = []
        self._size = 0  # components so far
        self._scratch: dict[tuple[object, ...], Shadow] = {}  # lives from launch to launch
        self._launches = 0  # that met
        self._seen: set[tuple[object, ...]] = set()
        self.seed: int | None = None
        self._forget()

    def _forget(self) -> None:
        """What ends with a launch."""
        self._threads: dict[int, Thread] = {}
        self._actors: dict[int, Actor] = {}  # by number in the schedule: roles and operations
        self._landings: dict[int, Actor] = {}  # of stores, by the store's number
        self._told: dict[int, Known | None] = {}  # by operation: what its signal will tell
        self._left: dict[Stage, Known] = {}
        self._histories: dict[Counter, History] = {}
        self._shadows: dict[int, Shadow] = {}  # by id of the buffer
        self._named: dict[tuple[object, ...], Shadow] = {}
        self._fetching: Role | None = None

    # -------------------------------------------------------------------------------------------- the launch
    def launch_begin(self, launch: Launch, kernel: ir.Kernel) -> None:
        """Each rank's stream goes on, from where its last launch left it."""
        self._forget()
        if len(self._streams) != launch.world:
            self._streams = [np.zeros(launch.world, np.int32) for _ in range(launch.world)]
            self._size, self._scratch = launch.world, {}
        first, self._size = self._size, self._size + sum(map(Thread.components, launch.roles))
        self._streams = [grown(known, self._size) for known in self._streams]
        for rank, known in enumerate(self._streams):
            known[rank] += 1
        for role in launch.roles:
            thread = Thread(role, self._streams[role.rank], first)
            self._threads[role.ident] = self._actors[role.ident] = thread
            first += Thread.components(role)
        self._remote = _touches_peers(kernel)
        self._work_space = launch.work_space
        self._meets = bool(self._work_space or counters_of(kernel)) or any(t.kind == "parallel" for t in kernel.tensors)
        self._launches += self._meets
        self._set = self._launches % 2 if launch.early else -1

    def launch_end(self, launch: Launch) -> None:
        """The streams go on: each when its rank's part has ended and, if there are any, exit words have come."""
        if launch.running:
            return
        ends = [known.copy() for known in self._streams]
        for thread in self._threads.values():
            end = thread.release(tuple(thread.counts))
            np.maximum(ends[thread.role.rank], end, out=ends[thread.role.rank])
        if self._meets:  # no launch ends before all ranks have begun it
            begun = functools.reduce(join, self._streams)
            ends = [join(end, begun) for end in ends]
        if self._remote if self._exit_words is None else self._exit_words:
            everything = ends[0]
            for end in ends[1:]:
                everything = join(everything, end)
            # Nothing of this launch can race with what comes: start afresh.
            self._streams = [everything[: launch.world].copy() for _ in ends]
            self._size, self._scratch = launch.world, {}
        else:
            self._streams = ends
            self._hand_over(ends)
        self._forget()

    def _hand_over(self, ends: list[Known]) -> None:
        """The end of a launch reads and writes all that is not work space."""
        for shadow in self._shadows.values():
            rank = shadow.begun[0]
            if rank < 0 or shadow.buffer.block >= 0:
                continue
            for cell in shadow.cells.values():
                for r in (cell.write, *cell.reads.values(), *cell.adds.values()):
                    if r is not None and ends[rank][r.component] < r.number:
                        self._unfinished(r)

    # ---------------------------------------------------------------------------------------- what orders
    def issued(self, op: Operation) -> None:
        """Take down what the operation knows, and which event it will be."""
        thread = self._threads[op.role.ident]
        if isinstance(op, Arrival):
            self._told[op.ident] = _told(thread, op.site)
        elif isinstance(op, Store):
            self._actors[op.ident] = thread.issue(thread.ring(op.tile.stage.pipeline, "read"))
            self._landings[op.ident] = thread.issue(thread.program + BULK)
        elif isinstance(op, Landing):
            self._actors[op.ident] = self._landings[op.store.ident]
        elif isinstance(op, Load | Gather):
            self._actors[op.ident] = thread.issue(thread.ring(op.tile.stage.pipeline, "load"))
        elif isinstance(op, DirectStore):
            self._actors[op.ident] = thread.issue(thread.program + DIRECT, thread.own)
        elif isinstance(op, Settled):
            self._told[op.ident] = thread.release((thread.program + BULK, thread.program + DIRECT))

    def done(self, op: Operation) -> None:
        """It touches nothing any more."""
        self._actors.pop(op.ident, None)
        self._landings.pop(op.ident, None)

    def counter_add(self, counter: Counter, value: int, actor: Role | Operation | Begin | Stage) -> None:
        """Whoever waits for this add will know what its actor knew."""
        history = self._histories.get(counter)
        if history is None:
            history = self._histories[counter] = History()
        if isinstance(actor, Stage):
            history.add(value, self._left.pop(actor, None), alone=True)
        elif isinstance(actor, Role):
            thread = self._threads[actor.ident]
            stores = (thread.program + BULK, thread.program + DIRECT) if actor is self._fetching else ()
            self._fetching = None
            history.add(value, thread.release(stores), alone=not stores)
        elif isinstance(actor, Begin):
            history.add(value, self._streams[actor.rank], alone=False)
        else:
            history.add(value, self._told.pop(actor.ident), alone=False)

    def wait_done(self, role: Role, counter: Counter, needed: int, site: Site) -> None:
        """The role knows what the adds told that made the count."""
        history = self._histories.get(counter)
        told = None if history is None else history.reached(needed)
        if needed <= 0:
            return
        thread = self._threads[role.ident]
        signal = site.op not in ("fill", "drain", "tasks", "joins")
        if told is not None:
            thread.acquire(told, ("fence", False) not in site.attrs, signal)
        if signal:
            thread.waited = (counter, needed, site)
        else:
            thread.stage = (counter, needed, site)

    def fetched(self, role: Role, counter: Counter) -> None:
        """The role knows what all adds so far told; its own add tells of its stores."""
        history = self._histories.get(counter)
        told = None if history is None else history.all()
        if told is not None:
            self._threads[role.ident].acquire(told)
        self._fetching = role

    def stage_left(self, role: Role, stage: Stage) -> None:
        """Handed on: what the role did, and its copies into and out of the pipeline's stages, this one's at last."""
        thread = self._threads[role.ident]
        rings = thread.rings
        self._left[stage] = thread.release((rings[stage.pipeline, "load"], rings[stage.pipeline, "read"]))

    # ---------------------------------------------------------------------------------------- what is touched
    def access(self, access: Access) -> None:
        """Compare with what was done there before."""
        actor, kind, window = self._actors[access.actor], access.kind, access.window
        shadow = self._shadows.get(id(access.buffer))
        if shadow is None:
            shadow = self._shadow(access.buffer)
        if access.buffer.block >= 0:
            window = ()  # of shared tiles there are no parts
        elif shadow.begun[0] >= 0 and not actor.follows(*shadow.begun):
            self._early(Record(actor, kind, access.span, access.buffer, window))
        cell = shadow.cells.get(window)
        if cell is None:
            cell = shadow.new(window)
        record = Record(actor, kind, access.span, access.buffer, window)
        found = cell.conflict(actor, kind)
        if found is not None:
            self._race(found, record)
        for other in cell.others:
            found = other.conflict(actor, kind)
            if found is not None:
                self._race(found, record)
        cell.keep(record)

    def _shadow(self, buffer: Buffer) -> Shadow:
        """The shadow of a buffer seen for the first time in this launch: new, or that of the same memory."""
        array = buffer.array
        if buffer.block >= 0:
            key: tuple[object, ...] = (buffer.rank, buffer.block, buffer.name)
            known, begun = self._named, (-1, 0)
        elif buffer.name in self._work_space:
            key, known, begun = (buffer.rank, buffer.name, array.shape, self._set), self._scratch, (-1, 0)
        else:
            key = (buffer.rank, array.__array_interface__["data"][0], array.shape, array.strides)
            known, begun = self._named, (buffer.rank, int(self._streams[buffer.rank][buffer.rank]))
        shadow = known.get(key)
        if shadow is None:
            shadow = Shadow(buffer, begun)
            if begun[0] >= 0:
                for other in known.values():
                    if other.begun == begun:
                        shadow.relate(other)
            known[key] = shadow
        self._shadows[id(buffer)] = shadow
        return shadow

    # ------------------------------------------------------------------------------------------------ reports
    def _race(self, first: Record, second: Record) -> None:
        if self._known(first.span, first.offset, first.role.kind, second.span, second.offset, second.role.kind):
            return
        places, buffer, other = (_place(first), _place(second)), first.buffer, second.buffer
        if buffer.block >= 0:
            what = f"`{buffer.name}` of rank {buffer.rank}, block {buffer.block} is {_past(first)} and {_past(second)}"
        elif buffer.name != other.name:
            what = (
                f"`{buffer.name}` and `{other.name}` of rank {buffer.rank} share memory: `{buffer.name}` is "
                f"{_past(first)} and `{other.name}` {_past(second)}"
            )
        else:
            what = f"`{buffer.name}` of rank {buffer.rank} is {_past(first)} and {_past(second)}"
        message = f"{what}, and nothing orders the two."
        self._report(Finding("race", message, places, _advice(buffer, first, second), self.seed))

    def _early(self, record: Record) -> None:
        if self._known("early", record.span, record.role.kind):
            return
        b = record.buffer
        message = f"`{b.name}` of rank {b.rank} is {_past(record)} before that rank is known to have begun the launch."
        advice = f"Wait for a signal of rank {b.rank} first."
        self._report(Finding("race", message, (_place(record),), advice, self.seed))

    def _unfinished(self, record: Record) -> None:
        if self._known("end", record.span, record.role.kind):
            return
        buffer = record.buffer
        message = (
            f"the launch of rank {buffer.rank} may end, and `{buffer.name}` be read and overwritten by what follows, "
            f"while rank {record.role.rank} still {_present(record)} it."
        )
        advice = (
            f"Let rank {record.role.rank} signal when it is done and rank {buffer.rank} wait for that before its end, "
            "or end with exit words."
        )
        self._report(Finding("race", message, (_place(record),), advice, self.seed))

    def _known(self, *what: object) -> bool:
        """Whether this was reported (a racy kernel shows the same race in every tile)."""
        known = what in self._seen
        self._seen.add(what)
        return known


def _told(thread: Thread, site: Site) -> Known | None:
    """What a signal tells: what its role did before, and its stores.  Mutants say less (``Role.released``)."""
    if ("scope", "block") in site.attrs:
        return None
    stores = (thread.program + DIRECT,)
    return thread.release(stores if ("completion", False) in site.attrs else (*stores, thread.program + BULK))


def _touches_peers(kernel: ir.Kernel) -> bool:
    """Whether a user's tensor may be touched by another rank: then the compiler emits exit words."""
    users = {t.name for t in kernel.tensors if t.kind == "parallel"}
    bodies = [kernel.prologue, *(body for _, body in kernel.classes)]
    return any(
        isinstance(o, ir.Memory) and o.tensor in users and (o.everyone or not isinstance(o.rank, ir.Rank | None))
        for body in bodies
        for s in statements(body)
        for o in walk(expressions(s))
    )


# --------------------------------------------------------------------------------------------------- in words
_VERBS: dict[str, tuple[str, str]] = {
    "read": ("read", "reads"),
    "write": ("written", "writes"),
    "add": ("added to", "adds to"),
}
"""The participle, and the third person."""


def _by(r: Record) -> str:
    if not r.offset:
        return ""
    if r.offset == BULK:
        return " by a bulk store" if r.kind == "write" else " by a bulk add"
    if r.offset == DIRECT:
        return " by a store"
    return " by a bulk load" if (r.offset - DIRECT) % 2 else " by a bulk store"


def _past(r: Record) -> str:
    return f"{_VERBS[r.kind][0]}{_by(r)} (line {r.span.line})"


def _present(r: Record) -> str:
    return _VERBS[r.kind][1]


def _place(r: Record) -> Place:
    (names, values), buffer = r.task, r.buffer
    part = f"[{', '.join(f'{a}:{b}' for a, b in r.window)}]" if r.window else ""
    of = "" if buffer.block >= 0 else f" of rank {buffer.rank}"
    what = f"{_present(r)} `{buffer.name}`{part}{of}{_by(r)}"
    last: Any = r.stage if buffer.block >= 0 else r.waited
    stage = buffer.name.rpartition(".")[0] if buffer.block >= 0 else ""
    task = tuple(zip(names, values, strict=True))
    return Place(r.role.rank, r.role.block, r.role.kind, what, r.span, task, stage, waited(last))


def _advice(buffer: Buffer, first: Record, second: Record) -> str:
    if buffer.block >= 0:
        return "A stage may be touched only between the wait for it and its release: inside `fill()` or `drain()`."
    if first.role is second.role:
        if first.offset in (BULK, DIRECT):
            return "Signal after the first and wait for that signal before the second: a store lands some time later."
        return "The copy is under way until its stage is handed on; let what follows wait for that."
    alike = (first.role.rank, first.role.kind) == (second.role.rank, second.role.kind)
    here, there = (f"rank {r.role.rank}'s {r.role.kind}" + f" of block {r.role.block}" * alike for r in (first, second))
    if "read" not in (first.kind, second.kind):
        return (
            f"Let the one that shall be first ({here} or {there}) signal after it, and the other wait for that.  "
            "A signal covers what its own role did before."
        )
    reader, writer = (here, there) if first.kind == "read" else (there, here)
    return (
        f"To read what is written, let {writer} signal after the write and {reader} wait for that; to read what was "
        "there, the other way round.  A signal covers what its own role did before."
    )
