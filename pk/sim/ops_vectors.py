"""Meaning of what works element by element of index vectors: rows, elements, counters.

An index vector is an int32 array ``(R,)``.  Where an op takes one, a scalar stands for all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from pk.sim.bounds import fits
from pk.sim.direct import DirectStore, see
from pk.sim.divisions import note
from pk.sim.machine import Counter, CounterRef, Landing, Operation, Program, Role, SharedTile, Site, Store, Wait, Window
from pk.sim.memory import clip
from pk.sim.values import Array


class Lanes:
    """Elements or rows of a tensor, one a lane: coordinates and ranks, scalars or vectors, not yet checked."""

    __slots__ = ("coord", "ranks", "tensor")

    def __init__(self, role: Role, tensor: str, coord: tuple[Any, ...], rank: Any) -> None:
        self.tensor, self.coord, self.ranks = tensor, coord, role.rank if rank is None else rank

    def places(self, count: int) -> list[tuple[int, tuple[int, ...]]]:
        """(rank, coordinate) of each of ``count`` elements."""
        columns = [_spread(c, count) for c in (self.ranks, *self.coord)]
        return [(rank, tuple(at)) for rank, *at in zip(*columns, strict=True)]

    def extent(self, *more: Any) -> int:
        """Number of elements, of which every vector has as many."""
        return next(len(v) for v in (self.ranks, *self.coord, *more) if isinstance(v, np.ndarray))


def _spread(x: Any, count: int) -> list[int]:
    return [int(v) for v in np.broadcast_to(x, (count,))]


def _valid(role: Role, site: Site, lanes: Lanes, count: int, extents: tuple[int, ...]) -> list[Window | None]:
    """A window for each element (of ``extents``, of which the last may be clipped), None where it lies outside."""
    windows: list[Window | None] = []
    for rank, at in lanes.places(count):
        bounds = tuple(role.dims[lanes.tensor, axis] for axis in range(len(at)))
        exists = clip(bounds, at, extents)[0] is not None
        windows.append(Window(lanes.tensor, at, (role.peer(site, rank),)) if exists else None)
    return windows


def _meet(role: Role, site: Site, windows: list[Window | None], written: bool = False) -> Program:
    for w in windows:
        if w is not None:
            yield from role.reach(site, w, written)


# ------------------------------------------------------------------------------------------------------- rows
class Gather(Operation):
    """Rows on their way to a tile."""

    __slots__ = ("site", "tile", "windows")

    def __init__(self, role: Role, site: Site, tile: SharedTile, windows: list[Window | None]) -> None:
        self.site, self.tile, self.windows = site, tile, windows
        super().__init__(role, "load")
        tile.stage.begin()
        role.launch.count(self, remote=any(w is not None and w.ranks[0] != role.rank for w in windows))

    def step(self) -> None:
        """Read every row and write the tile."""
        launch, who, span, target = self.role.launch, self.role.who, self.site.span, self.tile.buffer
        values = np.zeros(target.array.shape, target.array.dtype)
        for row, w in zip(values, self.windows, strict=True):
            if w is not None:
                source = launch.buffer(w.ranks[0], w.tensor)
                row[:] = launch.memory.access(who, self.ident, "read", source, span, w.coord, row.shape)
        launch.memory.access(who, self.ident, "write", target, span, values=values)
        launch.done(self)
        self.tile.stage.done()


class Scatter(Store):
    """A tile on its way to many rows: it is read at one moment, and each row lands by itself."""

    __slots__ = ("windows",)

    def __init__(self, role: Role, site: Site, windows: list[Window | None], tile: SharedTile) -> None:
        super().__init__(role, site, Window("", (), ()), tile, add=False)
        self.windows = windows
        self._left = sum(w is not None for w in windows) + 1  # one for the read itself

    def step(self) -> None:
        """Read the stage, and send the rows."""
        launch, buffer = self.role.launch, self.tile.buffer
        data = launch.memory.access(self.role.who, self.ident, "read", buffer, self.site.span).copy()
        self.tile.stage.done()
        for row, w in zip(data, self.windows, strict=True):
            if w is not None:
                landing = RowLanding(self, w, row)
                launch.count(landing, remote=w.ranks[0] != self.rank)
                launch.schedule.add(landing)
        self.landed()


class RowLanding(Landing):
    """One row of a scatter on its way."""

    __slots__ = ("at",)

    def __init__(self, store: Store, at: Window, data: Array) -> None:
        self.at = at
        super().__init__(store, at.ranks[0], data)

    def step(self) -> None:
        """Write to memory."""
        launch, span = self.role.launch, self.store.site.span
        target = launch.buffer(self.target, self.at.tensor)
        launch.memory.access(
            self.role.who, self.ident, "write", target, span, self.at.coord, self.data.shape, self.data
        )
        launch.done(self)
        self.store.landed()


def gather_async(role: Role, site: Site, tile: SharedTile, source: Lanes) -> Program:
    """Row i of the tile := the row of ``source``'s element i, cut or filled with 0 at the tensor's edges.

    A row outside the tensor (a negative index) reads as 0.
    """
    rows, cols = tile.buffer.array.shape
    windows = _valid(role, site, source, rows, (1, cols))
    yield from _meet(role, site, windows)
    role.launch.issue(Gather(role, site, tile, windows))


def scatter_async(role: Role, site: Site, target: Lanes, tile: SharedTile) -> Program:
    """The row of ``target``'s element i := row i of the tile; what lies outside (a negative index) is dropped."""
    rows, cols = tile.buffer.array.shape
    windows = _valid(role, site, target, rows, (1, cols))
    yield from _meet(role, site, windows, written=True)
    store = Scatter(role, site, windows, tile)
    role.open_stores[store.ident] = store
    role.launch.issue(store)


# --------------------------------------------------------------------------------------------------- elements
def load_elements(role: Role, site: Site, source: Lanes) -> Generator[Wait, None, Array]:
    """The element of ``source`` at each index; ``other`` outside the tensor."""
    (count,) = site.tile.shape
    windows = _valid(role, site, source, count, (1,) * len(source.coord))
    yield from _meet(role, site, windows)
    see(role, source.tensor)
    values = np.full(count, site.attr("other"), np.int32)
    note(role, site, np.array([w is not None for w in windows]))
    for i, w in enumerate(windows):
        if w is not None:
            buffer = role.launch.buffer(w.ranks[0], w.tensor)
            values[i] = role.launch.memory.access(role.who, role.ident, "read", buffer, site.span, w.coord, ())
    return values


def store_elements(role: Role, site: Site, target: Lanes, value: Any) -> Program:
    """The element of ``target`` at each index := ``value``, in no order; outside the tensor dropped."""
    count = target.extent(value)
    windows = _valid(role, site, target, count, (1,) * len(target.coord))
    yield from _meet(role, site, windows, written=True)
    see(role, target.tensor)  # stores of one role to one place land in order
    for w, v in zip(windows, np.broadcast_to(value, (count,)), strict=True):
        if w is not None:
            store = DirectStore(role, site, w, np.full((), v, np.int32), ())
            role.launch.count(store, remote=w.ranks[0] != role.rank)
            role.open_stores[store.ident] = store
            role.launch.issue(store)


# --------------------------------------------------------------------------------------------------- counters
class Counters:
    """``signals[index]`` with index vectors: a counter a lane, none where an index is negative."""

    __slots__ = ("index", "signals")

    def __init__(self, signals: str, index: tuple[Any, ...]) -> None:
        self.signals, self.index = signals, index

    def refs(self, role: Role, site: Site, count: int) -> list[CounterRef | None]:
        """Each lane's counter, checked against the declaration."""
        rows = list(zip(*(_spread(i, count) for i in self.index), strict=True)) or [()] * count
        return [None if any(i < 0 for i in at) else role.counter(self.signals, at, site) for at in rows]

    def extent(self, *more: Any) -> int:
        """Number of lanes."""
        return next(len(v) for v in (*self.index, *more) if isinstance(v, np.ndarray))


def signal_each(role: Role, site: Site, counters: Counters, rank: Any, value: Any) -> Program:
    """``signal`` for each element, in any order; a negative index is skipped."""
    count = counters.extent(rank, value)
    lanes = zip(counters.refs(role, site, count), _spread(rank, count), _spread(value, count), strict=True)
    wanted = [(ref, role.peer(site, to), by) for ref, to, by in lanes if ref is not None]
    if any(to != role.rank for _, to, _ in wanted):
        yield from role.enter(site)
    for ref, to, by in wanted:
        role.signal(site, ref, (to,), by)


def wait_each(role: Role, site: Site, counters: Counters, value: Any) -> Program:
    """``wait`` for all elements; a negative index is skipped."""
    count = counters.extent(value)
    for ref, needed in zip(counters.refs(role, site, count), _spread(value, count), strict=True):
        if ref is not None:
            yield role.launch.signal_counter(role.rank, ref), needed, site


class Settled(Operation):
    """The moment at which every earlier store of a role has landed, and its signals have arrived."""

    __slots__ = ("after", "counter")

    def __init__(self, role: Role, counter: Counter, after: int) -> None:
        self.counter, self.after = counter, after
        super().__init__(role, "signal")

    def step(self) -> None:
        """Tell the role."""
        self.role.launch.add(self.counter, 1, self)


def fetch_add(role: Role, site: Site, ref: CounterRef, value: int) -> Generator[Wait, None, int]:
    """Add ``value`` to this rank's counter when this role's earlier stores and signals are there; the value before."""
    earlier = role.released(site)
    if earlier:
        landed: Any = Settled(role, Counter(role.launch.schedule, ref.signals, ref.index), len(earlier))
        for operation in earlier:
            operation.releases.append(landed)
        yield landed.counter, 1, site
    counter = role.launch.signal_counter(role.rank, ref)
    found = fits(role, site, counter.value)
    if role.launch.checker is not None:
        role.launch.checker.fetched(role, counter, site)
    role.launch.add(counter, value, role)
    return found


MEANING: dict[str, Callable[..., Any]] = {
    "gather_async": gather_async,
    "scatter_async": scatter_async,
    "load_elements": load_elements,
    "store_elements": store_elements,
    "signal_each": signal_each,
    "wait_each": wait_each,
    "fetch_add": fetch_add,
}

BY_LANE = frozenset({"signal_each", "wait_each"})
"""Ops whose counters are one a lane."""
