"""What the ops of the table mean to a skeleton: waits, operations in flight, accesses, and no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import Tile
from pk.ir.vectors import has_vector
from pk.sim.memory import Kind, clip, fit
from pk.sim.skeleton_parts import Draft, Key, Note, NotExplorable, Place, Skeleton, Window, name_of
from pk.sim.skeleton_values import UNKNOWN, combine, lanes, made, negated, spread
from pk.sim.system import Guard

SOMEBODY = -1  # a rank that only the data knows
Wanted = list[tuple[Key, int | None]]


class Where:
    """A window of a tensor, resolved: on which ranks, and where (None: unknown)."""

    __slots__ = ("ranks", "tensor", "window")

    def __init__(self, tensor: str, ranks: tuple[int, ...], window: Window | None) -> None:
        self.tensor, self.ranks, self.window = tensor, ranks, window


class Operands:
    """A role's place, values and current step; evaluates operands and writes steps down."""

    def __init__(self, skeleton: Skeleton, place: Place, kind: str) -> None:
        self.made, self.place, self.kind = skeleton, place, kind
        self.values: dict[str, Any] = {}
        self.task: tuple[tuple[str, int], ...] = ()
        self.held: dict[str, Key] = {}  # pipeline -> the counter of the use in hand
        self.at_stage = ""
        self.name = f"rank {place.rank}, block {place.block}, {kind}"
        self.actor = skeleton.actor(self.name)
        self.draft: Draft | None = None
        self.entered = skeleton.world == 1 or skeleton.early
        self.stores: dict[Key, int] = {}  # landings under way since the last signals, by the counter they land on
        self.interval = 0
        self.direct: dict[str, list[Guard]] = {}  # tensor -> this role's stores of threads that it has not met yet

    # --------------------------------------------------------------------------------------------- steps
    def where(self) -> str:
        """This role, for messages."""
        task = f" at task {', '.join(f'{n}={v}' for n, v in self.task)}" if self.task else ""
        return self.name + task

    def refuse(self, what: str, span: ir.Span) -> NotExplorable:
        """The error for synchronisation that depends on data."""
        return NotExplorable(
            f"{what} depends on values loaded from a tensor, which an exhaustive exploration does not have",
            span, self.where(),
            "Check this kernel without --exhaustive: random and adversarial schedules run it on its data.",
        )  # fmt: skip

    def note(self, kind: str, what: str, span: ir.Span) -> Note:
        """Where a step comes from."""
        return Note(self.place.rank, self.place.block, self.kind, kind, what, span, self.task, self.at_stage)

    def wait(self, op: str, text: str, span: ir.Span, needed: Any, guaranteed: Wanted | None = None) -> None:
        """End the current step; the next begins when ``needed`` holds."""
        self.close()
        note = self.note(op, text, span)
        self.draft = Draft(f"{text}{_line(span)}", note, list(needed), requires=list(guaranteed or ()))

    def close(self) -> None:
        """Write the current step down."""
        if self.draft is not None:
            self.made.step(self.actor, self.draft)
            self.draft = None

    def add(self, key: Key, value: int) -> None:
        """Add to a counter in the current step."""
        assert self.draft is not None
        self.draft.adds[key] = self.draft.adds.get(key, 0) + value

    def issued(self) -> Guard:
        """A guard: the current step has been taken."""
        return Guard(-1 - self.actor.index, self.made.length(self.actor) + 1)

    def touch(self, kind: Kind, where: Where, span: ir.Span) -> None:
        """The current step accesses memory."""
        for rank in where.ranks:
            self.made.touch(self.actor, self.made.length(self.actor), kind, rank, where.tensor, where.window, span)

    def reach(self, where: Where, span: ir.Span, written: bool = False) -> None:
        """Before an access to a window: ``enter``, if peers may touch that memory too."""
        self.enter(() if written and where.tensor in self.made.work_space else where.ranks, span)

    def enter(self, ranks: tuple[int, ...], span: ir.Span) -> None:
        """Before the first access to a peer: every rank must be known to have begun."""
        if not self.entered and ranks != (self.place.rank,):
            begun = [(("entries", self.place.rank), self.made.world)]
            self.wait("enter", "waits until every rank has begun", span, begun)
            self.entered = True

    def see(self, tensor: str, span: ir.Span) -> None:
        """The role's own stores of threads to ``tensor`` have landed before it looks at it again."""
        if tensor in self.direct:
            self.wait("see", f"sees its own stores to {tensor}", span, self.direct.pop(tensor))

    # --------------------------------------------------------------------------------------------- values
    def value(self, e: ir.Expr) -> Any:
        """The value of an expression, if it is a scalar or index vector and depends on no data; else UNKNOWN."""
        if isinstance(e, ir.Const):
            return e.value
        if isinstance(e, ir.Var):
            return self.values.get(e.name, UNKNOWN)
        if isinstance(e, ir.Dim):
            return self.made.dims[self.place.rank][e.tensor][e.axis]
        if isinstance(e, ir.Param):
            return self.made.scalars[self.place.rank].get(e.name, UNKNOWN)
        if isinstance(e, ir.Rank):
            return self.place.rank
        if isinstance(e, ir.World):
            return self.made.world
        if isinstance(e, ir.Unary):
            return negated(e, self.value(e.x))
        if isinstance(e, ir.Select):
            cond = self.value(e.cond)
            return UNKNOWN if cond is UNKNOWN else self.value(e.x if cond else e.y)
        if isinstance(e, ir.Binary):
            return self.binary(e)
        return self.call(e)

    def binary(self, e: ir.Binary) -> Any:
        """``value`` of a binary expression; the second side only where it counts."""
        x = self.value(e.x)
        if e.op in ("and", "or") and x is not UNKNOWN and not isinstance(e.type, Tile) and bool(x) == (e.op == "or"):
            return bool(x)
        try:
            return combine(e, x, self.value(e.y))
        except ZeroDivisionError:
            raise errors.SimulationError("division by zero", e.span, self.where()) from None

    def call(self, e: ir.Call) -> Any:
        """An op with a result: what it waits for and reads is noted."""
        if e.op in ("load_global", "load_scalar", "load_elements"):
            shape = e.type.shape if isinstance(e.type, Tile) and e.op == "load_global" else ()
            self.effects(e.operands[1:])
            source = self.memory(e.operands[0], shape, e.span)
            self.reach(source, e.span)
            self.see(source.tensor, e.span)
            self.touch("read", source, e.span)
            return UNKNOWN
        if e.op == "fetch_add":
            return self.fetch_add(e)
        return made(e, self.effects(e.operands))

    def fetch_add(self, e: ir.Call) -> Any:
        """Adds in the current step, after the role's earlier stores; what it found is unknown."""
        key = self.counter(e.operands[0], e.span)
        value = self.known(e.operands[1], "how much is added", e.span)
        guards, _ = self.released(e.attrs)
        if guards:
            self.wait("fetch_add", "waits for its earlier stores to land", e.span, guards)
        self.add((*key[:1], self.place.rank, *key[2:]), value)
        return UNKNOWN

    def effects(self, operands: Any) -> list[Any]:
        """The values of operands; what is no expression counts as unknown."""
        places = ir.Memory | ir.Choose | ir.Shared | ir.Signal
        return [UNKNOWN if isinstance(o, places) else self.value(o) for o in operands]

    def known(self, e: Any, what: str, span: ir.Span) -> int:
        """The value of a scalar that synchronisation depends on."""
        value = self.value(e)
        if value is UNKNOWN:
            raise self.refuse(what, span)
        return int(value)

    def memory(self, e: Any, shape: tuple[int, ...], span: ir.Span) -> Where:
        """A window of memory."""
        if isinstance(e, ir.Choose):
            cond = self.value(e.cond)
            if cond is UNKNOWN:
                raise self.refuse("which tensor is accessed", span)
            return self.memory(e.x if cond else e.y, shape, span)
        assert isinstance(e, ir.Memory)
        coord = [self.value(c) for c in e.coord]
        ranks = self.ranks(e, span)
        bounds = self.made.dims[max(ranks[0], 0)][e.tensor]
        if has_vector((e,)) or ranks == (SOMEBODY,) or any(c is UNKNOWN for c in coord):
            return Where(e.tensor, ranks, None)
        inside, _ = clip(bounds, tuple(map(int, coord)), fit(shape, len(bounds)))
        return Where(e.tensor, ranks, () if inside is None else tuple((s.start, s.stop) for s in inside))

    def ranks(self, e: ir.Memory, span: ir.Span) -> tuple[int, ...]:
        """The ranks whose copies are meant; SOMEBODY alone if that depends on data."""
        if e.everyone:
            return tuple(range(self.made.world))
        rank = self.place.rank if e.rank is None else self.value(e.rank)
        if rank is UNKNOWN:
            return (SOMEBODY,)
        return tuple(sorted({self.peer(int(r), span) for r in np.atleast_1d(rank)}))

    def peer(self, rank: int, span: ir.Span) -> int:
        """``rank``, checked."""
        if not 0 <= rank < self.made.world:
            raise errors.SimulationError(
                f"rank {rank} does not exist: ranks are 0 to {self.made.world - 1}", span, self.where()
            )
        return rank

    def counter(self, e: Any, span: ir.Span) -> Key:
        """``("signal", -1, signals, *index)``: a counter, the rank left out."""
        assert isinstance(e, ir.Signal)
        index = tuple(self.known(i, f"which counter of `{e.signals}` is meant", span) for i in e.index)
        return self.checked(e.signals, index, span)

    def checked(self, signals: str, index: tuple[int, ...], span: ir.Span) -> Key:
        """``counter`` of a known index."""
        shape = self.made.signals[signals]
        if not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise errors.SimulationError(f"index {index} is outside `{signals}` of shape {shape}", span, self.where())
        return ("signal", -1, signals, *index)

    # ------------------------------------------------------------------------------------------ in flight
    def landing(self, bulk: bool) -> Key:
        """The counter on which the role's stores since the last signals count when they land."""
        key = ("landed", self.place.rank, self.place.block, self.kind, "bulk" if bulk else "direct", self.interval)
        self.stores[key] = self.stores.get(key, 0) + 1
        return key

    def released(self, attrs: tuple[tuple[str, object], ...]) -> tuple[Wanted, Wanted]:
        """The landings that a signal waits for, and those that it should wait for but (in a mutant) does not."""
        self.interval += 1
        mine = list(self.stores.items())
        if ("scope", "block") in attrs:
            return [], [*mine]
        weak = ("completion", False) in attrs
        kept: Wanted = [(key, n) for key, n in mine if not (weak and key[4] == "bulk")]
        return kept, [(key, n) for key, n in mine if weak and key[4] == "bulk"]

    def signal(self, key: Key, ranks: tuple[int, ...], value: int, s: ir.Do, released: tuple[Wanted, Wanted]) -> None:
        """Signals on their way: each arrives some time after the stores that it releases have landed."""
        guards, skipped = released
        for rank in ranks:
            target = (key[0], rank, *key[2:])
            text = f"+{value} arrives at {name_of(target)}"
            draft = Draft(f"{text}{_line(s.span)}", self.note("signal", text, s.span), [self.issued(), *guards])
            draft.adds[target], draft.requires = value, list(skipped)
            self.made.operation(f"signal of {self.name}", [draft])

    def put(self, where: Where, s: ir.Do | ir.Call) -> None:
        """Stores of threads: they land some time, each on its rank."""
        self.see(where.tensor, s.span)
        for rank in where.ranks:
            text = f"the store to {where.tensor} lands on {_rank(rank)}"
            draft = Draft(f"{text}{_line(s.span)}", self.note("land", text, s.span), [self.issued()])
            draft.adds[self.landing(bulk=False)] = 1
            actor = self.made.operation(f"store of {self.name}", [draft])
            self.made.touch(actor, 0, "write", rank, where.tensor, where.window)
            self.direct.setdefault(where.tensor, []).append(Guard(-1 - actor.index, 1))

    def part(self, shared: Any) -> Key:
        """The counter of the stage in hand, on which one operation more will count."""
        key = self.held[shared.pipeline]
        self.made.parts[key] = self.made.parts.get(key, 0) + 1
        return key


def _rank(rank: int) -> str:
    return "a rank" if rank == SOMEBODY else f"rank {rank}"


def _line(span: ir.Span) -> str:
    return f" (line {span.line})" if span.line else ""


# ---------------------------------------------------------------------------------------------------- the ops
def _load(role: Operands, s: ir.Do) -> None:
    tile, source = s.operands
    assert isinstance(tile, ir.Shared)
    where = role.memory(source, tile.type.shape, s.span)
    role.reach(where, s.span)
    text = f"the load of {where.tensor} into {tile.name} takes effect"
    draft = Draft(f"{text}{_line(s.span)}", role.note("load", text, s.span), [role.issued()], {role.part(tile): 1})
    actor = role.made.operation(f"load of {role.name}", [draft])
    for rank in where.ranks:
        role.made.touch(actor, 0, "read", rank, where.tensor, where.window)


def _store(role: Operands, s: ir.Do) -> None:
    target, tile = s.operands
    assert isinstance(tile, ir.Shared)
    where = role.memory(target, tile.type.shape, s.span)
    role.reach(where, s.span, written=True)
    text = f"the store to {where.tensor} reads {tile.name}"
    read = Draft(f"{text}{_line(s.span)}", role.note("read", text, s.span), [role.issued()], {role.part(tile): 1})
    store = role.made.operation(f"store of {role.name}", [read])
    kind: Kind = "add" if s.op == "store_add_async" else "write"
    for rank in where.ranks:
        text = f"the store to {where.tensor} lands on {_rank(rank)}"
        draft = Draft(f"{text}{_line(s.span)}", role.note("land", text, s.span), [], {role.landing(bulk=True): 1})
        actor = store
        if len(where.ranks) == 1:
            role.made.step(store, draft)
        else:
            draft.guards.append(Guard(-1 - store.index, 1))
            actor = role.made.operation(f"store of {role.name} to rank {rank}", [draft])
        step = role.made.length(actor) - 1
        role.made.touch(actor, step, kind, rank, where.tensor, where.window)


def _put(role: Operands, s: ir.Do) -> None:
    value = s.operands[1]
    rest = role.effects(s.operands[1:])
    shape: tuple[int, ...] = ()
    if s.op == "store_global":
        kind = getattr(value, "type", None)
        assert isinstance(kind, Tile)
        rows = kind.shape[0] if rest[1] is UNKNOWN else min(max(int(rest[1]), 0), kind.shape[0])
        if not rows:
            return
        shape = (rows, *kind.shape[1:])
    where = role.memory(s.operands[0], shape, s.span)
    role.reach(where, s.span, written=True)
    role.put(where, s)


def _reduce(role: Operands, s: ir.Do) -> None:
    shape: Any = s.attr("shape")
    source = role.memory(s.operands[-1], shape, s.span)
    target = role.memory(s.operands[0], shape, s.span)
    everyone = tuple(range(role.made.world))
    role.enter(everyone, s.span)
    for tensor in {source.tensor, target.tensor}:
        role.see(tensor, s.span)
    role.touch("read", Where(source.tensor, everyone, source.window), s.span)
    role.put(target, s)


def _signal(role: Operands, s: ir.Do) -> None:
    key = role.counter(s.operands[0], s.span)
    everyone = s.op != "signal"
    ranks = tuple(range(role.made.world))
    if not everyone:
        ranks = (role.peer(role.known(s.operands[1], "who is signalled", s.span), s.span),)
    value = 1 if s.op == "barrier" else role.known(s.operands[-1], "how much is signalled", s.span)
    role.enter(ranks if not everyone else (), s.span)
    role.signal(key, ranks, value, s, role.released(s.attrs))
    if s.op == "barrier":
        _await(role, key, role.made.world, s)


def _wait(role: Operands, s: ir.Do) -> None:
    key = role.counter(s.operands[0], s.span)
    _await(role, key, role.known(s.operands[1], "what is waited for", s.span), s)


def _await(role: Operands, key: Key, needed: int, s: ir.Do) -> None:
    mine = (key[0], role.place.rank, *key[2:])
    role.wait("wait", f"waits for {name_of(mine)} >= {needed}", s.span, [(mine, needed)])


def _each(role: Operands, s: ir.Do) -> None:
    """``signal_each`` and ``wait_each``."""
    counters = s.operands[0]
    assert isinstance(counters, ir.Signal)
    values = [*map(role.value, counters.index), *role.effects(s.operands[1:])]
    if any(v is UNKNOWN for v in values):
        raise role.refuse("which counters are meant", s.span)
    count, index = lanes(values), len(counters.index)
    rows = zip(*(spread(v, count) for v in values), strict=True)
    kept = [row for row in rows if all(i >= 0 for i in row[:index])]
    found = [(role.checked(counters.signals, row[:index], s.span), row[index:]) for row in kept]
    if s.op == "wait_each":
        for key, (needed,) in found:
            _await(role, key, needed, s)
        return
    role.enter(tuple(sorted({role.peer(to, s.span) for _, (to, _) in found} | {role.place.rank})), s.span)
    released = role.released(s.attrs)
    for key, (to, by) in found:
        role.signal(key, (to,), by, s, released)


def _reckon(role: Operands, s: ir.Do) -> None:
    role.effects(s.operands)


DOES: dict[str, Callable[[Any, ir.Do], None]] = {
    "load_async": _load,
    "gather_async": _load,
    "store_async": _store,
    "store_add_async": _store,
    "scatter_async": _store,
    "store_global": _put,
    "store_scalar": _put,
    "store_elements": _put,
    "reduce": _reduce,
    "all_reduce": _reduce,
    "signal": _signal,
    "signal_all": _signal,
    "barrier": _signal,
    "wait": _wait,
    "wait_each": _each,
    "signal_each": _each,
    "mma": _reckon,
    "store": _reckon,
}
"""What each op with an effect does; ops with a result are in ``Operands.call``."""
