"""The simulated machine: roles, pipelines, counters and asynchronous operations of one launch on all ranks.

A role is a Python generator (see ``sim.translate``) that yields whenever it must wait; it always waits for a
:class:`Counter` to reach a value.  Whatever takes effect later (a load, a store, a signal) is an operation that stands
in the schedule's pool by itself until it is picked.  Whatever is picked runs without interruption.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import DType, Tile, Type
from pk.sim.memory import Buffer, Kind, Memory, Who
from pk.sim.schedule import Schedule
from pk.sim.values import POISON, Array, poisoned

if TYPE_CHECKING:
    from pk.sim.claims import Claims


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A statement or op of the kernel, as the running program refers to it."""

    op: str
    what: str  # the signals array or pipeline that it waits for
    span: ir.Span
    type: Type | None = None
    attrs: tuple[tuple[str, Any], ...] = ()

    def attr(self, name: str) -> Any:
        """A compile-time attribute of the op."""
        return dict(self.attrs)[name]

    @property
    def tile(self) -> Tile:
        """The type of the op's result."""
        assert isinstance(self.type, Tile)
        return self.type


class Counter:
    """A number that grows, and the roles that wait until it is large enough."""

    __slots__ = ("index", "name", "schedule", "value", "waiters")

    def __init__(self, schedule: Schedule, name: str, index: tuple[int, ...] = ()) -> None:
        self.schedule, self.name, self.index = schedule, name, index
        self.value = 0
        self.waiters: list[tuple[int, Role]] = []

    def add(self, value: int) -> None:
        """Add, and let those go on who have what they need."""
        self.value += value
        if self.waiters:
            still = []
            for needed, role in self.waiters:
                if self.value >= needed:
                    role.blocked = None
                    self.schedule.add(role)
                else:
                    still.append((needed, role))
            self.waiters = still


Wait = tuple[Counter, int, Site]
Program = Generator[Wait, None, None]


# ------------------------------------------------------------------------------------------------ pipelines
class SharedTile:
    """A tile of a stage, or its transposed view."""

    __slots__ = ("T", "buffer", "stage")

    def __init__(self, stage: Stage, buffer: Buffer, mirror: SharedTile | None = None) -> None:
        self.stage, self.buffer = stage, buffer
        if mirror is None:
            turned = Buffer(buffer.name, buffer.rank, buffer.block, buffer.array.T, buffer.dtype)
            mirror = SharedTile(stage, turned, self)
        self.T = mirror


class Stage:
    """One stage of a pipeline: its tiles, and how often it was published (``full``) and freed (``empty``)."""

    __slots__ = ("_leaving", "_pending", "empty", "full", "tiles")

    def __init__(self, launch: Launch, pipeline: ir.Pipeline, at: int, rank: int, block: int) -> None:
        self.full = Counter(launch.schedule, pipeline.name, (at,))
        self.empty = Counter(launch.schedule, pipeline.name, (at,))
        self.tiles: dict[str, SharedTile] = {}
        for field, tile in pipeline.tiles:
            array = poisoned(tile.shape, tile.dtype)
            name = f"{pipeline.name}[{at}].{field}"
            self.tiles[field] = SharedTile(self, Buffer(name, rank, block, array, tile.dtype))
        self._pending = 0
        self._leaving: Counter | None = None

    def enter_fill(self) -> None:
        """The filling role has the stage: what the use before left in it counts as unwritten."""
        for tile in self.tiles.values():
            tile.buffer.array[...] = POISON[tile.buffer.dtype]

    def leave(self, counter: Counter) -> None:
        """The role has left: count on ``counter`` when its asynchronous operations on the stage are done."""
        if self._pending:
            self._leaving = counter
        else:
            counter.add(1)

    def begin(self) -> None:
        """An asynchronous operation will read or write the stage."""
        self._pending += 1

    def done(self) -> None:
        """It has."""
        self._pending -= 1
        if not self._pending and self._leaving is not None:
            counter, self._leaving = self._leaving, None
            counter.add(1)


def private_tile(launch: Launch, declared: ir.SharedTile, rank: int, block: int) -> SharedTile:
    """A tile of the consumer of one block: in a stage of its own, which nobody fills or drains."""
    stage = Stage(launch, ir.Pipeline(declared.name, 1, ((declared.name, declared.type),)), 0, rank, block)
    return stage.tiles[declared.name]


class Ring:
    """A pipeline of one block.  Each role counts its own fills and drains."""

    __slots__ = ("stages",)

    def __init__(self, launch: Launch, pipeline: ir.Pipeline, rank: int, block: int) -> None:
        self.stages = [Stage(launch, pipeline, i, rank, block) for i in range(pipeline.stages)]


# ------------------------------------------------------------------------------------------------- operands
class Window:
    """Where an op touches memory: element ``coord`` of ``tensor`` on each of ``ranks``."""

    __slots__ = ("coord", "ranks", "tensor")

    def __init__(self, tensor: str, coord: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        self.tensor, self.coord, self.ranks = tensor, coord, ranks


@dataclass(frozen=True, slots=True)
class CounterRef:
    """One counter of a signals array, on whatever rank the op says."""

    signals: str
    index: tuple[int, ...]


# ---------------------------------------------------------------------------------------------------- roles
class Role:
    """The threads of one role of one block: what the schedule runs, and what the ops act on."""

    __slots__ = (
        "block",
        "blocked",
        "claims",
        "dims",
        "entered",
        "ident",
        "index",
        "kind",
        "launch",
        "of",
        "open_stores",
        "private",
        "program",
        "rank",
        "rings",
        "scalars",
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
        self.entered = launch.world == 1
        self.open_stores: dict[int, Releasing] = {}

    def step(self) -> None:
        """Run until the next wait."""
        assert self.program is not None
        wait = next(self.program, None)
        if wait is None:
            self.launch.running -= 1
            return
        counter, needed, _ = wait
        if counter.value >= needed:
            self.launch.schedule.add(self)
        else:
            self.launch.waits += 1
            self.blocked = wait
            counter.waiters.append((needed, self))

    def where(self) -> str:
        """This role, for messages."""
        names, values = self.task
        task = f" at task {', '.join(f'{n}={v}' for n, v in zip(names, values, strict=True))}" if names else ""
        return f"rank {self.rank}, block {self.block}, {self.kind}{task}"

    def fail(self, site: Site, what: str) -> errors.SimulationError:
        """The error for something this role must not do."""
        return errors.SimulationError(what, site.span, self.where())

    def enter(self, site: Site) -> Program:
        """Before a role's first access to a peer: wait until every rank is known to have begun this launch."""
        if not self.entered:
            yield self.launch.entries[self.rank], self.world, site
            self.entered = True

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

    def signal(self, ref: CounterRef, ranks: tuple[int, ...], value: int) -> None:
        """Issue signals: they leave when every store issued before them has landed, and arrive in any order."""
        for rank in ranks:
            arrival = Arrival(self, ref, rank, value, len(self.open_stores))
            self.launch.count(arrival, remote=rank != self.rank)
            for store in self.open_stores.values():
                store.releases.append(arrival)
            if not self.open_stores:
                self.launch.schedule.add(arrival)


# ---------------------------------------------------------------------------------- asynchronous operations
class Operation:
    """Something that a role issued and that has not happened yet."""

    __slots__ = ("block", "ident", "kind", "rank", "role")

    def __init__(self, role: Role, kind: str) -> None:
        self.role, self.rank, self.block, self.kind = role, role.rank, role.block, kind
        self.ident = role.launch.new_ident()

    def step(self) -> None:
        """Take effect."""
        raise NotImplementedError


class Load(Operation):
    """A bulk load: reads memory and fills the tile at one moment between its issue and the stage's publication."""

    __slots__ = ("site", "tile", "window")

    def __init__(self, role: Role, site: Site, tile: SharedTile, window: Window) -> None:
        super().__init__(role, "load")
        self.site, self.tile, self.window = site, tile, window
        tile.stage.begin()
        role.launch.count(self, remote=window.ranks[0] != role.rank)

    def step(self) -> None:
        """Read and publish."""
        launch, who, span = self.role.launch, self.role.who, self.site.span
        source = launch.buffer(self.window.ranks[0], self.window.tensor)
        target = self.tile.buffer
        values = launch.memory.access(who, self.ident, "read", source, span, self.window.coord, target.array.shape)
        launch.memory.access(who, self.ident, "write", target, span, values=values)
        launch.in_flight -= 1
        self.tile.stage.done()


class Releasing(Protocol):
    """A store that has not landed everywhere: the signals that wait for it."""

    releases: list[Arrival]


class Store(Operation):
    """A bulk store or reduce-add.  Its own step is the read of the stage; then it lands on each rank by itself."""

    __slots__ = ("_left", "add", "releases", "site", "tile", "window")

    def __init__(self, role: Role, site: Site, window: Window, tile: SharedTile, add: bool) -> None:
        super().__init__(role, "read")
        self.site, self.window, self.tile, self.add = site, window, tile, add
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
            del self.role.open_stores[self.ident]
            for arrival in self.releases:
                arrival.after -= 1
                if not arrival.after:
                    self.role.launch.schedule.add(arrival)


class Landing(Operation):
    """The data of a store, on its way to one rank."""

    __slots__ = ("data", "store", "target")

    def __init__(self, store: Store, target: int, data: Array) -> None:
        super().__init__(store.role, "land")
        self.store, self.target, self.data = store, target, data

    def step(self) -> None:
        """Write or add to memory."""
        launch, store = self.role.launch, self.store
        target = launch.buffer(self.target, store.window.tensor)
        kind: Kind = "add" if store.add else "write"
        shape = self.data.shape
        launch.memory.access(
            self.role.who, self.ident, kind, target, store.site.span, store.window.coord, shape, self.data
        )
        launch.in_flight -= 1
        store.landed()


class Arrival(Operation):
    """A signal.  ``after``: stores of its role that must land before it may leave."""

    __slots__ = ("after", "ref", "target", "value")

    def __init__(self, role: Role, ref: CounterRef, target: int, value: int, after: int) -> None:
        super().__init__(role, "signal")
        self.ref, self.target, self.value, self.after = ref, target, value, after

    def step(self) -> None:
        """Add to the counter."""
        launch = self.role.launch
        launch.in_flight -= 1
        launch.signal_counter(self.target, self.ref).add(self.value)


class Begin:
    """A rank whose stream has not reached the launch yet; then its entry word to one peer."""

    __slots__ = ("block", "ident", "kind", "launch", "rank", "target")

    def __init__(self, launch: Launch, rank: int, target: int | None = None) -> None:
        self.launch, self.rank, self.block, self.target = launch, rank, 0, target
        self.kind = "signal"
        self.ident = launch.new_ident()

    def step(self) -> None:
        """Begin: release the rank's roles, and tell every rank (oneself too)."""
        launch = self.launch
        if self.target is not None:
            launch.entries[self.target].add(1)
            return
        launch.begun[self.rank] = True
        for role in launch.roles:
            if role.rank == self.rank:
                launch.schedule.add(role)
        for peer in range(launch.world):
            launch.schedule.add(Begin(launch, self.rank, peer))


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
        self.world = len(buffers)
        self.scalars, self.signal_shapes = scalars, signal_shapes
        self.dims = [
            {(name, axis): n for name, b in mine.items() for axis, n in enumerate(b.array.shape)} for mine in buffers
        ]
        self.entries = [Counter(schedule, f"entry words of rank {r}") for r in range(self.world)]
        self.begun = [False] * self.world
        self.roles: list[Role] = []
        self.running = 0
        self.turns = 100_000_000  # of a role's loops, before they are taken for endless
        self.waits = self.in_flight = self.max_in_flight = self.messages = 0
        self.operations = {"load": 0, "land": 0, "signal": 0}
        self._buffers = buffers
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

    def begin(self) -> None:
        """Let every rank begin, some time."""
        for rank in range(self.world):
            self.schedule.add(Begin(self, rank))

    def buffer(self, rank: int, name: str) -> Buffer:
        """Rank ``rank``'s copy of tensor or scratch ``name``."""
        assert self.begun[rank], f"rank {rank} is touched before it has begun"
        return self._buffers[rank][name]

    def signal_counter(self, rank: int, ref: CounterRef) -> Counter:
        """Rank ``rank``'s counter."""
        assert self.begun[rank], f"rank {rank} is signalled before it has begun"
        counter = self._counters[rank].get(ref)
        if counter is None:
            counter = self._counters[rank][ref] = Counter(self.schedule, ref.signals, ref.index)
        return counter

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
