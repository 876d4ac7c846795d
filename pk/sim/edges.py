"""Tiles that miss their tensor, and signals that nobody hears.

A copy that lies outside its tensor altogether reads zeros or writes nothing.  In the last dimensions, which count
tiles, that is usual for the last pieces of a tile that an edge cuts (``n * (BN // P) + j``), and for the last of equal
shares.  So there a bulk copy or a store is judged as a whole launch: it is a finding if, in a whole task, one line
copied nothing inside a tensor while a part of that tensor was left out by the launch.  That is what an index too large
by one looks like.  A negative tile index is no tail, always a finding.  To read zeros around a tensor may be meant (a
halo): windows that do not lie on the grid of tiles (``pk.at``), and direct loads, are not judged so.

Scratch has no tails in a dimension that the kernel declares as a number (of ranks, say): to write outside there is
always a finding, and so is to read there what could not be written.

A line whose every tile in the launch lies outside is a finding if it can hardly be a tail: in a leading dimension
(which counts elements), or of scratch in one in which the tile has one element, with an index that is the same in all
tasks and turns and on all ranks; and if it writes to scratch, with any index.

Of indices that come from memory little is known.  To store at a negative one is a finding, and so is a line that never
meets its tensor, but for loads at negative ones: those may mean "none".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pk.ir import nodes as ir
from pk.ir.split import expressions, statements, walk
from pk.sim.diagnose import counters_in, indexed, sentence, signal_lines, synchronised
from pk.sim.direct import DirectStore
from pk.sim.findings import Finding, Place
from pk.sim.machine import Arrival, Load, Store
from pk.sim.memory import clip, fit
from pk.sim.ops_vectors import Scatter

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Operation, Role
    from pk.sim.memory import Access
    from pk.sim.parts import Counter, CounterRef, Site, Window

Report = Callable[[Finding], None]


# -------------------------------------------------------------------------------------------------------- windows
class Windows:
    """Looks at every tile that is copied.  ``strict``: a write that an edge cuts off is a finding too."""

    def __init__(self, report: Report, strict: bool = False) -> None:
        self._report, self.strict = report, strict
        self._forget()

    def _forget(self) -> None:
        self._tasks: dict[tuple[int, ir.Span, str], _Task] = {}
        self._missed: dict[tuple[ir.Span, str], _Miss] = {}  # the first of each line
        self._lines: dict[tuple[ir.Span, str, bool], _Line] = {}  # by line, tensor and whether it reads
        self._dropped: set[str] = set()  # scratch of which writes were dropped where there are no tails
        # By tensor and whether they were read: the windows touched on any rank, of which each may have its share.
        self._covered: dict[tuple[str, bool], set[tuple[tuple[int, int], ...]]] = {}

    def launch_begin(self, kernel: ir.Kernel) -> None:
        """Nothing was copied yet."""
        self._forget()
        self._chosen, self._fixed = chosen_by_data(kernel), fixed_entries(kernel)
        self._scratch = {s.name for s in kernel.scratch}
        self._numbers = {(s.name, axis) for s in kernel.scratch for axis, e in enumerate(s.shape) if _a_number(e)}

    def launch_end(self, launch: Launch) -> None:
        """Judge what lay outside."""
        if not launch.running:
            for task in self._tasks.values():
                self._close(task)
            for miss in self._missed.values():
                self._judge(launch, miss)
            for (_, tensor, _), line in self._lines.items():
                if line.unwritten is not None and tensor in self._dropped:
                    self._report(line.unwritten)
                elif line.outside is not None and not line.inside and not line.tail:
                    message = f"{line.outside.message}; no tile of this line lies inside it in this launch"
                    self._report(replace(line.outside, message=message))
        self._forget()

    def issued(self, op: Operation) -> None:
        """A copy begins."""
        if isinstance(op, Scatter):
            if self.strict:
                shape = (1, op.tile.buffer.array.shape[1])
                for window in op.windows:
                    if window is not None:
                        self._clipped(op.role, op.site, window, shape)
        elif isinstance(op, Load):
            self._look(op.role, op.site, op.window, op.tile.buffer.array.shape, "reads")
        elif isinstance(op, Store):
            self._look(op.role, op.site, op.window, op.tile.buffer.array.shape, "adds to" if op.add else "writes")
        elif isinstance(op, DirectStore):
            self._look(op.role, op.site, op.window, op.shape, "writes")

    def loading(self, role: Role, site: Site, window: Window, shape: tuple[int, ...], other: float) -> None:
        """A role reads a tensor directly, with ``other`` for what lies outside."""
        if not other:
            self._look(role, site, window, shape, "reads", direct=True)

    def access(self, access: Access) -> None:
        """A window of a tensor is touched."""
        if access.buffer.block < 0:
            key = (access.buffer.name, access.kind == "read")
            self._covered.setdefault(key, set()).add(access.window)

    def _look(
        self, role: Role, site: Site, window: Window, shape: tuple[int, ...], does: str, direct: bool = False
    ) -> None:
        bounds = tuple(role.dims[window.tensor, axis] for axis in range(len(window.coord)))
        extents = fit(shape, len(bounds))
        inside, part = clip(bounds, window.coord, extents)
        if inside is None and not all(bounds):
            return  # nothing lies inside an empty tensor
        reads = does == "reads"
        line = self._lines.setdefault((site.span, window.tensor, reads), _Line())
        line.inside = line.inside or inside is not None
        task = None if direct else self._task(role, site, window)
        if inside is not None:
            if task is not None:
                task.inside = True
            if part is not None and self.strict and not reads:
                self._clipped(role, site, window, shape)
            return
        at = _Outside(role, site, window, extents, bounds, does, len(bounds) - (len(shape) or 2))
        if site.span in self._chosen:
            if not at.negative:
                line.outside = line.outside or at.finding(FROM_MEMORY)
            elif not reads:
                self._report(at.finding(FROM_MEMORY))
            return
        self._one_element(line, at, reads)
        if task is not None and not any(map(_off_grid, window.coord, extents)):
            if any(c < 0 for c in window.coord):
                self._report(at.finding(TILES))
            elif task.outside is None:
                task.outside = _Miss(at.finding(TILES), window.ranks[0], window.tensor, reads)

    def _one_element(self, line: _Line, at: _Outside, reads: bool) -> None:
        """A window that lies outside in a dimension of which it has one element, or that has no tails."""
        tensor, coord = at.window.tensor, at.window.coord
        number = next(
            (d for d in at.out if (tensor, d) in self._numbers and not _off_grid(coord[d], at.extents[d])), -1
        )
        if number >= 0 and not reads:
            self._dropped.add(tensor)
            self._report(at.finding(at.larger(number)))
        elif number >= 0:
            line.unwritten = line.unwritten or at.finding(at.larger(number))
        for d in at.out:
            fixed = (at.site.span, tensor, d) in self._fixed
            element = d < at.leading or (tensor in self._scratch and at.extents[d] == 1)
            if element and (fixed or (tensor in self._scratch and not reads)):
                line.outside = line.outside or at.finding(at.larger(d))
                break
        else:
            line.tail = True

    def _task(self, role: Role, site: Site, window: Window) -> _Task:
        key = (role.ident, site.span, window.tensor)
        task = self._tasks.get(key)
        if task is None or task.task is not role.task:
            if task is not None:
                self._close(task)
            task = self._tasks[key] = _Task(role.task)
        return task

    def _close(self, task: _Task) -> None:
        if task.outside is not None and not task.inside:
            place = task.outside.finding.places[0]
            self._missed.setdefault((place.span, task.outside.tensor), task.outside)

    def _judge(self, launch: Launch, miss: _Miss) -> None:
        missing = np.ones(launch.buffers[miss.rank][miss.tensor].array.shape, bool)
        for window in self._covered.get((miss.tensor, miss.reads), ()):
            missing[tuple(slice(*ends) for ends in window)] = False
        if missing.any():
            first = ", ".join(str(int(i)) for i in np.argwhere(missing)[0])
            does = "read" if miss.reads else "written"
            message = f"{miss.finding.message}; {miss.tensor}[{first}] is never {does}"
            self._report(replace(miss.finding, message=message))

    def _clipped(self, role: Role, site: Site, window: Window, shape: tuple[int, ...]) -> None:
        bounds = tuple(role.dims[window.tensor, axis] for axis in range(len(window.coord)))
        if clip(bounds, window.coord, fit(shape, len(bounds)))[1] is None:
            return
        at = spelled(window.tensor, window.coord, fit(shape, len(bounds)))
        place = _place(role, site, f"writes {at}")
        message = f"{at} reaches over the edge of `{window.tensor}`, whose shape is {bounds}: the rest is dropped"
        advice = f"Make the extents of `{window.tensor}` multiples of the tile's, or check without strict bounds."
        self._report(Finding("clipped", message, (place,), advice))


@dataclass(frozen=True, slots=True)
class _Miss:
    """A copy that lay outside ``tensor`` of ``rank``."""

    finding: Finding
    rank: int
    tensor: str
    reads: bool


class _Task:
    """What one line of a role copied from or to one tensor, in one task."""

    __slots__ = ("inside", "outside", "task")

    def __init__(self, task: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
        self.task = task
        self.inside = False
        self.outside: _Miss | None = None


class _Line:
    """Whether one line met its tensor in this launch, and the first time that it did not, if that may be told.

    ``tail``: a tile may have missed it as tails do.  ``unwritten``: a read to be told if writes were dropped there.
    """

    __slots__ = ("inside", "outside", "tail", "unwritten")

    def __init__(self) -> None:
        self.inside = self.tail = False
        self.outside: Finding | None = None
        self.unwritten: Finding | None = None


TILES = "Coordinates count tiles in the last dimensions; check the index and the number of tasks or turns."
FROM_MEMORY = "The index comes from memory: guard the line with an `if` for those that mean nothing, or correct them."


@dataclass(frozen=True, slots=True)
class _Outside:
    """A window that lies outside its tensor, whose first ``leading`` dimensions the tile does not have."""

    role: Role
    site: Site
    window: Window
    extents: tuple[int, ...]
    bounds: tuple[int, ...]
    does: str
    leading: int

    @property
    def out(self) -> list[int]:
        """The dimensions in which it does."""
        return [d for d, c in enumerate(self.window.coord) if c >= self.bounds[d] or c + self.extents[d] <= 0]

    @property
    def negative(self) -> bool:
        """Whether an index is too small, and not too large."""
        return any(self.window.coord[d] < 0 for d in self.out)

    def larger(self, d: int) -> str:
        """What to do about dimension ``d``."""
        counts, tensor = "elements" if self.extents[d] == 1 else f"tiles of {self.extents[d]}", self.window.tensor
        return (
            f"Entry {d} of the coordinate counts {counts}, and `{tensor}` has {self.bounds[d]} elements there: correct "
            f"it, make `{tensor}` larger, or guard the line with an `if`."
        )

    def finding(self, advice: str) -> Finding:
        """It, told."""
        at = spelled(self.window.tensor, self.window.coord, self.extents)
        effect = "which reads as 0" if self.does == "reads" else "which writes nothing"
        tensor = self.window.tensor
        message = f"the {self.role.kind} {self.does} {at}, {effect}: `{tensor}` has shape {self.bounds}"
        return Finding("out-of-range", message, (_place(self.role, self.site, f"{self.does} {at}"),), advice)


def _a_number(extent: ir.Expr) -> bool:
    """Whether an extent of scratch depends on no tensor and no parameter, so that it has no tails."""
    return not any(isinstance(e, ir.Dim | ir.Param) for e in walk((extent,)))


def _off_grid(coord: int, extent: int) -> bool:
    return coord % extent != 0


def chosen_by_data(kernel: ir.Kernel) -> frozenset[ir.Span]:
    """The lines that copy to or from a place that depends on what was read from memory or a counter."""
    bodies = [kernel.prologue + body for _, body in kernel.classes]
    loaded: set[str] = set()
    size = -1
    while size != len(loaded):  # until nothing depends on what is found
        size = len(loaded)
        for body in bodies:
            loaded.update(s.var.name for s in statements(body) if isinstance(s, ir.Assign) and _loads(s.value, loaded))
            loaded.update(s.var.name for s in statements(body) if isinstance(s, ir.For) and _loads(s.start, loaded))
    return frozenset(
        op.span
        for body in bodies
        for op in _moving(body)
        if any(_loads(c, loaded) for o in op.operands for w in _windows(o) for c in w.coord)
    )


def fixed_entries(kernel: ir.Kernel) -> frozenset[tuple[ir.Span, str, int]]:
    """Entries of coordinates that are the same in all tasks and turns, and on all ranks: line, tensor, dimension."""
    fixed: set[str] = set()
    for s in kernel.prologue:
        if isinstance(s, ir.Assign) and _same(s.value, fixed):
            fixed.add(s.var.name)
    return frozenset(
        (op.span, w.tensor, d)
        for body in (kernel.prologue + body for _, body in kernel.classes)
        for op in _moving(body)
        for o in op.operands
        for w in _windows(o)
        for d, c in enumerate(w.coord)
        if _same(c, fixed)
    )


def _same(e: ir.Expr, fixed: set[str]) -> bool:
    return not any(
        e.name not in fixed if isinstance(e, ir.Var) else isinstance(e, ir.Rank | ir.Call) for e in walk((e,))
    )


def _moving(body: ir.Block) -> Iterator[ir.Do | ir.Call]:
    for s in statements(body):
        if isinstance(s, ir.Do):
            yield s
        yield from (e for e in walk(expressions(s)) if isinstance(e, ir.Call))


def _windows(o: ir.Operand) -> list[ir.Memory]:
    """The windows that operand ``o`` itself may be."""
    return [o] if isinstance(o, ir.Memory) else [*_windows(o.x), *_windows(o.y)] if isinstance(o, ir.Choose) else []


def _loads(e: ir.Operand, loaded: set[str]) -> bool:
    return any(
        e.name in loaded if isinstance(e, ir.Var) else isinstance(e, ir.Call) and e.op in _READING for e in walk((e,))
    )


_READING = ("load_global", "load_scalar", "load_elements", "fetch_add", "load")


def spelled(tensor: str, coord: tuple[int, ...], extents: tuple[int, ...]) -> str:
    """``c[0:64, 128:192]``."""
    return f"{tensor}[{', '.join(f'{c}:{c + e}' if e != 1 else str(c) for c, e in zip(coord, extents, strict=True))}]"


def _place(role: Role, site: Site, what: str) -> Place:
    task = tuple(zip(*role.task, strict=True))
    return Place(role.rank, role.block, role.kind, what, site.span, task, last=synchronised(role.pending))


# -------------------------------------------------------------------------------------------------------- signals
class Unheard:
    """Signals that nobody waits for.

    An array for which the kernel has no wait at all; a counter that ends above all that was ever waited for, though its
    neighbours, on the same rank, end exactly where they were waited for; and a rank that arrives twice at one barrier.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._asked: dict[Counter, tuple[int, Role, Site]] = {}  # the largest wait of each
        self._first: dict[str, Place] = {}  # signal of each array
        self._met: dict[tuple[int, CounterRef], Place] = {}  # who arrived at a barrier first, by its rank
        self._twice: set[str] = set()  # arrays of barriers that are reported

    def launch_begin(self, kernel: ir.Kernel) -> None:
        """Nobody has waited yet."""
        self._kernel = kernel
        self._asked.clear()
        self._first.clear()
        self._met.clear()
        self._twice.clear()

    def issued(self, op: Operation) -> None:
        """A signal is on its way."""
        if not isinstance(op, Arrival):
            return
        if op.ref.signals not in self._first:
            what = f"adds {op.value} to {_named(op.ref)} of rank {op.target}"
            self._first[op.ref.signals] = _place(op.role, op.site, what)
        if op.site.op == "barrier" and op.target == op.rank:
            place = _place(op.role, op.site, f"arrives at {_named(op.ref)}")
            first = self._met.setdefault((op.rank, op.ref), place)
            if first is not place and op.ref.signals not in self._twice:
                self._twice.add(op.ref.signals)
                message = (
                    f"rank {op.rank} arrives twice at the barrier {_named(op.ref)} in one launch: the second time it "
                    "waits for nobody, because the counter is there already"
                )
                advice = f"Give each barrier a counter of its own: `{op.ref.signals}` with one more dimension."
                places = (first, place) if first.span != place.span else (place,)
                self._report(Finding("lost-signal", message, places, advice))

    def wait_done(self, role: Role, counter: Counter, needed: int, site: Site) -> None:
        """A wait for signals is over."""
        if site.op in ("wait", "barrier", "wait_each") and (
            counter not in self._asked or self._asked[counter][0] < needed
        ):
            self._asked[counter] = (needed, role, site)

    def launch_end(self, launch: Launch) -> None:
        """Look at what is left in the counters."""
        if not launch.running:
            heard = waited_for(self._kernel)
            counters = [(c, rank) for c, rank in launch.counters() if c.value]
            self._never({c.name for c, _ in counters if c.name not in heard})
            self._surplus(counters)
        self._asked.clear()

    def _never(self, names: set[str]) -> None:
        for name in sorted(names):
            place = self._first[name]
            message = f"nobody waits for `{name}`, which is signalled at {sentence(signal_lines(self._kernel, name))}"
            advice = f"Wait for `{name}` before what it announces is used, or leave the signal out."
            self._report(Finding("lost-signal", message, (place,), advice))

    def _surplus(self, counters: list[tuple[Counter, int]]) -> None:
        known = [(c, rank, self._asked[c]) for c, rank in counters if c in self._asked]
        exact = {(c.name, rank) for c, rank, (needed, _, _) in known if needed == c.value}
        for c, rank, (needed, role, site) in known:
            if c.value > needed > 0 and (c.name, rank) in exact:
                name = f"{c.name}{indexed(c)} of rank {rank}"
                message = (
                    f"{name} ends at {c.value}, and at most {needed} was ever waited for, while the other counters of "
                    f"`{c.name}` end at what was waited for"
                )
                advice = f"Wait for {c.value}, or find the signal too many."
                place = _place(role, site, f"waits for {c.name}{indexed(c)} >= {needed}")
                self._report(Finding("lost-signal", message, (place,), advice))


def _named(ref: CounterRef) -> str:
    return f"{ref.signals}[{', '.join(map(str, ref.index))}]" if ref.index else ref.signals


def waited_for(kernel: ir.Kernel) -> frozenset[str]:
    """The signals arrays that some statement of ``kernel`` waits for or reads."""
    ops = ("wait", "barrier", "wait_each", "fetch_add")
    return frozenset(name for _, body in kernel.classes for s in statements(body) for name in counters_in(s, ops))
