"""What was done to a buffer so far, window by window, as far as it can still race with something.

Two tensors that overlap in memory, and are not the same view of it, have a shadow each; a window of the one is linked
with the windows of the other that share bytes with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from pk.ir import nodes as ir
from pk.sim.clocks import Actor
from pk.sim.memory import Buffer, Kind
from pk.sim.values import Array

Window = tuple[tuple[int, int], ...]


class Record:
    """One access, for comparisons and for the report."""

    __slots__ = (
        "buffer", "component", "direct", "kind", "number", "offset", "role", "span", "stage", "task", "waited",
        "window",
    )  # fmt: skip

    def __init__(self, actor: Actor, kind: Kind, span: ir.Span, buffer: Buffer, window: Window) -> None:
        self.buffer = buffer  # as the access names it: another parameter may name the same memory
        self.component, self.number = actor.component, actor.number
        self.offset = actor.component - actor.program  # which of the role's components: what kind of access
        self.direct = actor.direct
        self.role, self.kind, self.span, self.window = actor.role, kind, span, window
        self.task = actor.task if self.offset else actor.role.task
        self.waited, self.stage = actor.waited, actor.stage


class Cell:
    """One window.  ``write``: the last write; ``reads`` and ``adds`` after it, the last of each component.

    ``others``: the cells of the buffer, and of others in the same memory, that overlap this one.
    """

    __slots__ = ("adds", "others", "reads", "window", "write")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.write: Record | None = None
        self.reads: dict[int, Record] = {}
        self.adds: dict[int, Record] = {}
        self.others: list[Cell] = []

    def conflict(self, actor: Actor, kind: Kind) -> Record | None:
        """An access that conflicts with what ``actor`` does now, and that nothing orders before it."""
        w = self.write
        if w is not None and not _before(w, actor):
            return w
        if self.adds and kind != "add":
            for r in self.adds.values():
                if not _before(r, actor):
                    return r
        if self.reads and kind != "read":
            for r in self.reads.values():
                if not _before(r, actor):
                    return r
        return None

    def keep(self, record: Record) -> None:
        """The access has happened."""
        if record.kind == "write":
            self.write = record
            if self.reads:
                self.reads = {}
            if self.adds:
                self.adds = {}
            return
        known = self.reads if record.kind == "read" else self.adds
        old = known.get(record.component)
        if old is None or old.number <= record.number:
            known[record.component] = record


def _before(r: Record, actor: Actor) -> bool:
    return actor.follows(r.component, r.number) or r.component == actor.own


class Shadow:
    """The cells of one buffer.  ``begun``: the stream of its rank and its launch (-1: work space, no stream's).

    ``kin``: shadows of other views that share memory with this one; see :meth:`relate`.
    """

    __slots__ = ("_grids", "begun", "buffer", "cells", "kin")

    def __init__(self, buffer: Buffer, begun: tuple[int, int]) -> None:
        self.buffer, self.begun = buffer, begun
        self.cells: dict[Window, Cell] = {}
        self._grids: dict[tuple[int, ...], _Grid] = {}
        self.kin: list[Shadow] = []

    def relate(self, other: Shadow) -> None:
        """Compare with ``other`` too, if any element of the two lies in the same memory.  Before it has cells."""
        assert not self.cells
        if np.shares_memory(self.buffer.array, other.buffer.array):
            self.kin.append(other)
            other.kin.append(self)

    def new(self, window: Window) -> Cell:
        """The cell of a window that was not touched before."""
        cell = self.cells[window] = Cell(window)
        for grid in self._grids.values():
            for other in grid.meeting(window):
                cell.others.append(other)
                other.others.append(cell)
        extents = tuple([stop - start for start, stop in window])
        own = self._grids.get(extents)
        if own is None:
            own = self._grids[extents] = _Grid(extents)
        own.add(cell)
        for kin in self.kin:
            mine = _part(self.buffer, window)
            for other in kin.cells.values():
                if np.shares_memory(mine, _part(kin.buffer, other.window)):
                    cell.others.append(other)
                    other.others.append(cell)
        return cell


class _Grid:
    """Windows of equal extents, by their place in a grid of that step: what meets a window is looked up.

    ``aligned``: all begin where a place does, as tiles do.
    """

    __slots__ = ("aligned", "places", "step")

    def __init__(self, extents: tuple[int, ...]) -> None:
        self.step, self.aligned = extents, True
        self.places: dict[tuple[int, ...], list[Cell]] = {}

    def add(self, cell: Cell) -> None:
        place = []
        for (start, _), step in zip(cell.window, self.step, strict=True):
            at, rest = divmod(start, step)
            self.aligned = self.aligned and not rest
            place.append(at)
        self.places.setdefault(tuple(place), []).append(cell)

    def meeting(self, window: Window) -> list[Cell]:
        """The cells that overlap ``window``."""
        spans, count = [], 1
        for (start, stop), step in zip(window, self.step, strict=True):
            # What does not begin with its place may reach into the next one.
            first, last = (start if self.aligned else start - step + 1) // step, (stop - 1) // step
            spans.append(range(first, last + 1))
            count *= last + 1 - first
        places = self.places
        if count > len(places):
            near: Iterable[list[Cell]] = places.values()
        else:
            near = [places[place] for place in product(*spans) if place in places]
        return [cell for cells in near for cell in cells if _overlap(cell.window, window)]


def _part(buffer: Buffer, window: Window) -> Array:
    part: Array = buffer.array[tuple([slice(start, stop) for start, stop in window])]
    return part


def _overlap(x: Window, y: Window) -> bool:
    for (a, b), (c, d) in zip(x, y, strict=True):  # noqa: SIM110  a generator takes longer
        if a >= d or c >= b:
            return False
    return True
