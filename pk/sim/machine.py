"""The simulated machine: roles, pipelines, counters and asynchronous operations of one launch on all ranks.

A role is a Python generator (see ``sim.translate``) that yields whenever it must wait; it always waits for a
:class:`Counter` to reach a value.  Whatever takes effect later (a load, a store, a signal) is an operation that stands
in the schedule's pool by itself until it is picked.  Whatever is picked runs without interruption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pk import errors
from pk.ir.types import DType
from pk.sim.begin import Begin
from pk.sim.memory import Buffer, Kind, Memory, Who
from pk.sim.parts import (
    Counter,
    CounterRef,
    Program,
    Ring,
    SharedTile,
    Site,
    Stage,
    Wait,
    Window,
    private_tile,
)
from pk.sim.schedule import Schedule
from pk.sim.values import Array, poisoned

if TYPE_CHECKING:
    from pk.sim.checker import Checker
    from pk.sim.claims import Claims
    from pk.sim.joins import Joined
    from pk.sim.residency import Room

__all__ = [
    "Counter",
    "CounterRef",
    "Program",
    "Ring",
    "SharedTile",
    "Site",
    "Stage",
    "Wait",
    "Window",
    "private_tile",
]


# ---------------------------------------------------------------------------------------------------- roles
class Role:
    """The threads of one role of one block: what the schedule runs, and what the ops act on."""

    __slots__ = (
        "block",
        "blocked",
        "claims",
        "dims",
        "edges",
        "entered",
        "first",
        "ident",
        "index",
        "joins",
        "kind",
        "launch",
        "of",
        "open_signals",
        "open_stores",
        "passed",
        "pending",
        "private",
        "program",
        "rank",
        "rings",
        "scalars",
        "started",
        "taken",
        "task",
        "who",
        "world",
    )

    def __init__(self, launch: Launch, rank: int, block: int, kind: str, index: int, of: int) -> None:
        self.launch, self.rank, self.block, self.kind = launch, rank, block, kind
        self.index, self.of = index, of  # number of this block in its class, and how many the class has
        self.world = launch.world
        self.ident = launch.new_ident()
        self.who = Who(rank, block, kind)
        self.dims = launch.dims[rank]
        self.scalars = launch.scalars[rank]
        self.rings: dict[str, Ring] = {}
        self.private: dict[str, SharedTile] = {}
        self.program: Program | None = None
        self.claims: Claims | None = None  # of the block, if its class takes tasks dynamically
        self.taken = 0  # how many of them this role has read
        self.task: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        self.blocked: Wait | None = None
        self.pending: Wait | None = None  # what it yielded last, for the checker
        self.passed: Wait | None = None  # and before that: its last wait that is over, for reports
        self.edges: dict[int, Any] | None = None  # of a role that divides tiles: where its loads read last
        self.first: Wait | None = None  # what it waits for before its program begins
        self.joins: Joined | None = None  # who waits for its end
        self.started = True  # False: its block has no room on the device yet
        self.entered = launch.world == 1 or launch.early
        self.open_stores: dict[int, Releasing] = {}
        self.open_signals: dict[int, Arrival] = {}

    def step(self) -> None:
        """Run until the next wait."""
        assert self.program is not None
        checker = self.launch.checker
        if checker is not None and self.pending is not None:
            checker.wait_done(self, *self.pending)
        self.passed = self.pending
        wait, self.first = self.first or next(self.program, None), None
        self.pending = wait
        if wait is None:
            self.leave()
            self.launch.ended(self)
            return
        counter, needed, _ = wait
        if counter.value >= needed:
            self.launch.schedule.add(self)
        else:
            self.launch.waits += 1
            self.blocked = wait
            counter.waiters.append((needed, self))

    @property
    def title(self) -> str:
        """Its kind; of a block that joins, which class it belongs to, too."""
        return self.kind if self.joins is None else f"communicator's {self.kind}"

    def leave(self) -> None:
        """Its program has ended."""
        if self.joins is not None:
            self.joins.left(self)

    def where(self) -> str:
        """This role, for messages."""
        names, values = self.task
        task = f" at task {', '.join(f'{n}={v}' for n, v in zip(names, values, strict=True))}" if names else ""
        return f"rank {self.rank}, block {self.block}, {self.title}{task}"

    def fail(self, site: Site, what: str) -> errors.SimulationError:
        """The error for something this role must not do."""
        return errors.SimulationError(what, site.span, self.where())

    def enter(self, site: Site) -> Program:
        """Before a role's first access to a peer: wait until every rank is known to have begun this launch."""
        if not self.entered:
            yield self.launch.entries[self.rank], self.world, site
            self.entered = True

    def reach(self, site: Site, window: Window, written: bool = False) -> Program:
        """Before an access to a window: ``enter``, if peers may touch that memory too.

        A peer that is late may still read the scratch of this rank in the launch before.
        """
        if window.ranks != (self.rank,) or (written and window.tensor in self.launch.work_space):
            yield from self.enter(site)

    def peer(self, site: Site, rank: int) -> int:
        """``rank``, checked."""
        if not 0 <= rank < self.world:
            raise self.fail(site, f"rank {rank} does not exist: ranks are 0 to {self.world - 1}")
        return rank

    def counter(self, signals: str, index: tuple[int, ...], site: Site) -> CounterRef:
        """The counter ``signals[index]``, checked against the declaration."""
        shape = self.launch.signal_shapes[signals]
        if not all(0 <= i < n for i, n in zip(index, shape, strict=True)):
            raise self.fail(site, f"index {_tuple(index)} is outside `{signals}` of shape {_tuple(shape)}")
        return CounterRef(signals, index)

    def window(self, tensor: str, coord: tuple[int, ...], rank: int | None, site: Site) -> Window:
        """A window of one rank's copy (None: this rank's)."""
        return Window(tensor, coord, (self.rank if rank is None else self.peer(site, rank),))

    def everyone(self, tensor: str, coord: tuple[int, ...]) -> Window:
        """A window of every rank's copy."""
        return Window(tensor, coord, tuple(range(self.world)))

    def store(self, site: Site, window: Window, tile: SharedTile, add: bool) -> None:
        """Issue a bulk store: it reads the stage later, and lands on each rank later still."""
        store = Store(self, site, window, tile, add)
        self.open_stores[store.ident] = store
        self.launch.issue(store)

    def signal(self, site: Site, ref: CounterRef, ranks: tuple[int, ...], value: int) -> None:
        """Issue signals: they leave when what was issued before them is there (``released``), and arrive in any order.

        Raises :class:`pk.errors.SimulationError` for a negative ``value``: counters only grow.
        """
        if value < 0:
            raise self.fail(site, f"a signal adds {value} to `{ref.signals}`: counters only grow")
        earlier = self.released(site, ref.signals)
        for rank in ranks:
            arrival = Arrival(self, site, ref, rank, value, len(earlier))
            self.launch.count(arrival, remote=rank != self.rank)
            self.open_signals[arrival.ident] = arrival
            for operation in earlier:
                operation.releases.append(arrival)
            if not earlier:
                self.launch.schedule.add(arrival)

    def released(self, site: Site, signals: str = "") -> list[Releasing]:
        """What the signal at ``site`` leaves after: all stores that are open, and the signals of other statements.

        Those of its own statement may come later: signals in a row share one release (``codegen.deferred``).

        Two attributes, which only mutants have (``ir.mutate``), say otherwise.  ``completion=False``: bulk stores are
        not waited for.  ``scope="block"``: nothing is released beyond the thread block.
        """
        if ("scope", "block") in site.attrs:
            return []
        stores = list(self.open_stores.values())
        if ("completion", False) in site.attrs:
            return [s for s in stores if not s.bulk]
        mine = (site.span.file, site.span.line, signals)  # as the device tells statements apart
        return [*stores, *(a for a in self.open_signals.values() if a.statement != mine)]


# ---------------------------------------------------------------------------------- asynchronous operations
class Operation:
    """Something that a role issued and that has not happened yet."""

    __slots__ = ("block", "ident", "kind", "rank", "role")

    def __init__(self, role: Role, kind: str) -> None:
        self.role, self.rank, self.block, self.kind = role, role.rank, role.block, kind
        self.ident = role.launch.new_ident()
        if role.launch.checker is not None:
            role.launch.checker.issued(self)

    def step(self) -> None:
        """Take effect."""
        raise NotImplementedError


class Load(Operation):
    """A bulk load: reads memory and fills the tile at one moment between its issue and the stage's publication."""

    __slots__ = ("site", "tile", "window")

    def __init__(self, role: Role, site: Site, tile: SharedTile, window: Window) -> None:
        self.site, self.tile, self.window = site, tile, window
        super().__init__(role, "load")
        tile.stage.begin()
        role.launch.count(self, remote=window.ranks[0] != role.rank)

    def step(self) -> None:
        """Read and publish."""
        launch, who, span = self.role.launch, self.role.who, self.site.span
        source = launch.buffer(self.window.ranks[0], self.window.tensor)
        target = self.tile.buffer
        values = launch.memory.access(who, self.ident, "read", source, span, self.window.coord, target.array.shape)
        launch.memory.access(who, self.ident, "write", target, span, values=values)
        launch.done(self)
        self.tile.stage.done()


class Releasing(Protocol):
    """A store that has not landed everywhere, or a signal that has not arrived: the signals that wait for it."""

    releases: list[Arrival]

    @property
    def bulk(self) -> bool:
        """Whether TMA makes it."""


class Store(Operation):
    """A bulk store or reduce-add.  Its own step is the read of the stage; then it lands on each rank by itself."""

    __slots__ = ("_left", "add", "releases", "site", "tile", "window")
    bulk: ClassVar[bool] = True

    def __init__(self, role: Role, site: Site, window: Window, tile: SharedTile, add: bool) -> None:
        self.site, self.window, self.tile, self.add = site, window, tile, add
        super().__init__(role, "read")
        self.releases: list[Arrival] = []
        self._left = len(window.ranks)
        tile.stage.begin()

    def step(self) -> None:
        """Read the stage, and send."""
        launch, buffer = self.role.launch, self.tile.buffer
        data = launch.memory.access(self.role.who, self.ident, "read", buffer, self.site.span).copy()
        self.tile.stage.done()
        for rank in self.window.ranks:
            landing = Landing(self, rank, data)
            launch.count(landing, remote=rank != self.rank)
            launch.schedule.add(landing)

    def landed(self) -> None:
        """One rank has it.  When all have, the signals that were waiting for it may leave."""
        self._left -= 1
        if not self._left:
            if self.role.launch.checker is not None:
                self.role.launch.checker.done(self)
            del self.role.open_stores[self.ident]
            self.role.launch.let_go(self.releases)


class Landing(Operation):
    """The data of a store, on its way to one rank."""

    __slots__ = ("data", "store", "target")

    def __init__(self, store: Store, target: int, data: Array) -> None:
        self.store, self.target, self.data = store, target, data
        super().__init__(store.role, "land")

    def step(self) -> None:
        """Write or add to memory."""
        launch, store = self.role.launch, self.store
        target = launch.buffer(self.target, store.window.tensor)
        kind: Kind = "add" if store.add else "write"
        shape = self.data.shape
        launch.memory.access(
            self.role.who, self.ident, kind, target, store.site.span, store.window.coord, shape, self.data
        )
        launch.done(self)
        store.landed()


class Arrival(Operation):
    """A signal.  ``after``: stores and signals of its role that must be there before it may leave."""

    __slots__ = ("after", "ref", "releases", "site", "target", "value")
    bulk: ClassVar[bool] = False

    def __init__(self, role: Role, site: Site, ref: CounterRef, target: int, value: int, after: int) -> None:
        self.site, self.ref, self.target, self.value, self.after = site, ref, target, value, after
        self.releases: list[Arrival] = []
        super().__init__(role, "signal")

    @property
    def statement(self) -> tuple[str, int, str]:
        """File and line, and the array that it adds to."""
        return self.site.span.file, self.site.span.line, self.ref.signals

    def step(self) -> None:
        """Add to the counter."""
        launch = self.role.launch
        launch.done(self)
        launch.add(launch.signal_counter(self.target, self.ref), self.value, self)
        del self.role.open_signals[self.ident]
        launch.let_go(self.releases)


# --------------------------------------------------------------------------------------------------- launch
class Launch:
    """One launch of one kernel on all ranks: counters that start at zero, buffers, roles, and what is in flight."""

    def __init__(
        self,
        schedule: Schedule,
        memory: Memory,
        buffers: list[dict[str, Buffer]],
        scalars: list[dict[str, int | float]],
        signal_shapes: dict[str, tuple[int, ...]],
        multicast: bool = False,
    ) -> None:
        self.schedule, self.memory, self.multicast = schedule, memory, multicast
        self.checker: Checker | None = None
        self.world = len(buffers)
        self.scalars, self.signal_shapes = scalars, signal_shapes
        self.dims = [
            {(name, axis): n for name, b in mine.items() for axis, n in enumerate(b.array.shape)} for mine in buffers
        ]
        self.entries = [Counter(schedule, f"entry words of rank {r}") for r in range(self.world)]
        self.begun = [False] * self.world
        self.roles: list[Role] = []
        self.running = 0
        self.room: Room | None = None  # None: all blocks have room at the same time
        self.turns = 100_000_000  # of a role's loops, before they are taken for endless
        self.waits = self.in_flight = self.max_in_flight = self.messages = 0
        self.operations = {"load": 0, "land": 0, "signal": 0}
        self.buffers = buffers
        self.work_space: frozenset[str] = frozenset()  # names of scratch
        self.early = False  # ranks need not see each other begin: see pk.ir.early
        self._counters: list[dict[CounterRef, Counter]] = [{} for _ in range(self.world)]
        self._idents = 0

    def new_ident(self) -> int:
        """The next number of an actor in the schedule."""
        self._idents += 1
        return self._idents - 1

    def add_role(self, role: Role) -> None:
        """Count ``role`` in; it starts when its rank begins."""
        self.roles.append(role)
        self.running += 1

    def start_roles(self, rank: int) -> None:
        """Let the roles of ``rank`` go on, as far as their blocks have room."""
        if self.room is not None:
            self.room.begin(rank)
            return
        for role in self.roles:
            if role.rank == rank:
                self.schedule.add(role)

    def ended(self, role: Role) -> None:
        """``role`` has run to its end."""
        self.running -= 1
        if self.checker is not None:
            self.checker.role_end(role)
        if self.room is not None:
            self.room.ended(role)

    def begin(self) -> None:
        """Let every rank begin, some time."""
        for rank in range(self.world):
            self.schedule.add(Begin(self, rank))

    def buffer(self, rank: int, name: str) -> Buffer:
        """Rank ``rank``'s copy of tensor or scratch ``name``."""
        assert self.early or self.begun[rank], f"rank {rank} is touched before it has begun"
        return self.buffers[rank][name]

    def signal_counter(self, rank: int, ref: CounterRef) -> Counter:
        """Rank ``rank``'s counter."""
        assert self.early or self.begun[rank], f"rank {rank} is signalled before it has begun"
        counter = self._counters[rank].get(ref)
        if counter is None:
            counter = self._counters[rank][ref] = Counter(self.schedule, ref.signals, ref.index)
        return counter

    def counters(self) -> list[tuple[Counter, int]]:
        """Every counter of signals that was touched, and its rank."""
        return [(counter, rank) for rank, mine in enumerate(self._counters) for counter in mine.values()]

    def add(self, counter: Counter, value: int, actor: Role | Operation | Begin | Stage) -> None:
        """``actor`` adds to a counter."""
        if self.checker is not None:
            self.checker.counter_add(counter, value, actor)
        counter.add(value)

    def done(self, operation: Operation) -> None:
        """``operation`` is in flight no longer."""
        self.in_flight -= 1
        if self.checker is not None:
            self.checker.done(operation)

    def let_go(self, signals: list[Arrival]) -> None:
        """One of the things that ``signals`` come after is there."""
        for arrival in signals:
            arrival.after -= 1
            if not arrival.after:
                self.schedule.add(arrival)

    def issue(self, operation: Operation) -> None:
        """``operation`` may take effect from now on."""
        self.schedule.add(operation)

    def count(self, operation: Operation, remote: bool) -> None:
        """Book an operation that is in flight from now on."""
        self.operations[operation.kind] += 1
        self.messages += remote
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)


def run(launch: Launch) -> None:
    """Step until nothing is left to do.  Roles may remain: then they are deadlocked."""
    launch.begin()
    schedule = launch.schedule
    actor = schedule.pick()
    while actor is not None:
        actor.step()
        actor = schedule.pick()


def scratch_buffer(name: str, rank: int, shape: tuple[int, ...], dtype: DType) -> Buffer:
    """Symmetric work space as a launch finds it: poisoned."""
    return Buffer(name, rank, -1, poisoned(shape, dtype), dtype)


def _tuple(values: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, values))})" if len(values) != 1 else f"({values[0]},)"
