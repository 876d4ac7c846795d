"""Reads of memory that nothing wrote: scratch, stages, private tiles, and tensors that came unwritten.

Scratch and stages are poisoned when they are made (``sim.values.POISON``); a tensor element counts as unwritten if it
holds that pattern when a launch begins, bit for bit, so that memory of ``pk.empty`` is followed from launch to launch.
A window of which nothing was written is a finding where it is read.  Rows that are missing as a whole may be a tail,
never used; a window with rows of which a part is missing is a finding if the launch ends with NaN in a tensor though
it was given none.  Lanes of an index vector that are missing may be a tail too; whether it is used is seen when the
launch runs once more with something else in those places (``OTHER``, see ``sim.trial``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pk.ir import nodes as ir
from pk.ir.split import expressions, statements, walk
from pk.ir.types import DType, float32, int32
from pk.sim.diagnose import synchronised
from pk.sim.findings import Finding, Place
from pk.sim.machine import Landing
from pk.sim.values import POISON, Array, decode

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Operation, Role
    from pk.sim.memory import Access, Buffer
    from pk.sim.parts import Counter, Site

Key = tuple[int, int, str]  # rank, block (-1: none), name of a buffer
Window = tuple[tuple[int, int], ...]
SUSPECTS = 64  # partly written windows that are remembered
OTHER = 1  # what unwritten int32 elements hold instead of ``POISON``, which is no index: this mostly is one


class Mask:
    """Which elements of a buffer were written.  ``known``: windows that were, whole; to be quick."""

    __slots__ = ("bits", "known")

    def __init__(self, bits: Array) -> None:
        self.bits = bits
        self.known: set[Window] = set()

    def write(self, window: Window) -> None:
        """All of ``window`` is written now."""
        if window not in self.known:
            self.bits[_slices(window)] = True
            self.known.add(window)

    def read(self, window: Window) -> str:
        """``whole`` if all of ``window`` was written, ``nothing``, ``rows`` (of the last dimension), or ``part``."""
        if window in self.known:
            return "whole"
        part = self.bits[_slices(window)]
        if part.all():
            self.known.add(window)
            return "whole"
        if not part.any():
            return "nothing"
        return "rows" if bool((part.all(-1) | ~part.any(-1)).all()) else "part"


@dataclass(frozen=True, slots=True)
class _Read:
    """A read, to be judged when the launch ends."""

    finding: Finding
    whole: bool  # nothing of it was written
    lanes: bool = False  # it is one of an index vector of which something was written


@dataclass(slots=True)
class _Vector:
    """An index vector that is being loaded, lane by lane, and the first of its lanes that nothing has written."""

    actor: int
    span: ir.Span
    task: object
    some: bool = False  # whether a lane was written
    missing: tuple[tuple[object, ...], Finding] | None = None


class Written:
    """The detector.  ``report`` is called with each finding; ``findings``: of all detectors, races among them.

    ``lanes``: what is a finding if the launch ends otherwise with ``other`` set, which puts ``OTHER`` in place of
    ``POISON``.
    """

    def __init__(self, report: Callable[[Finding], None], findings: list[Finding]) -> None:
        self._report, self._findings = report, findings
        self.other = False
        self.lanes: list[Finding] = []
        self._forget()

    def _forget(self) -> None:
        self._masks: dict[Key, Mask] = {}
        self._tiles: set[Key] = set()  # of shared memory, that hold nothing
        self._roles: dict[tuple[int, int, str], Role] = {}
        self._reads: dict[tuple[object, ...], _Read] = {}
        self._issued: dict[int, tuple[tuple[str, ...], tuple[int, ...]]] = {}  # tasks, by operation
        self._clean: list[Buffer] = []  # tensors of floats without a NaN
        self._vectors: frozenset[ir.Span] = frozenset()  # lines that load index vectors
        self._vector: _Vector | None = None  # the one that is being loaded

    # -------------------------------------------------------------------------------------------- the launch
    def launch_begin(self, launch: Launch, kernel: ir.Kernel) -> None:
        """Scratch and shared memory hold nothing; tensors may."""
        self._forget()
        self.lanes.clear()
        self._vectors = _vector_loads(kernel)
        scratch = {s.name for s in kernel.scratch}
        for rank in range(launch.world):
            tensors = [launch.buffers[rank][t.name] for t in kernel.tensors]
            for buffer in launch.buffers[rank].values():
                if buffer.name in scratch:
                    self._masks[rank, -1, buffer.name] = Mask(np.zeros(buffer.array.shape, bool))
                    if self.other and buffer.dtype == int32:
                        buffer.array[...] = OTHER
                    continue
                missing = unwritten(buffer.array, buffer.dtype)
                if missing.any() and not any(b is not buffer and _aliased(b, buffer) for b in tensors):
                    self._masks[rank, -1, buffer.name] = Mask(~missing)
                    if self.other and buffer.dtype == int32:
                        buffer.array[missing] = OTHER
                if buffer.dtype.kind == "float" and not _nan(buffer)[~missing].any():
                    self._clean.append(buffer)
        self._all_clean = len(self._clean) == launch.world * sum(t.dtype.kind == "float" for t in kernel.tensors)
        for role in launch.roles:
            self._roles[role.rank, role.block, role.kind] = role
            self._tiles.update((role.rank, role.block, tile.buffer.name) for tile in role.private.values())
            for ring in role.rings.values():
                for stage in ring.stages:
                    self._tiles.update((role.rank, role.block, t.buffer.name) for t in stage.tiles.values())

    def launch_end(self, launch: Launch) -> None:
        """Judge the reads.  One that raced with the write is the race detector's."""
        self._end_vector()
        raced = {(p.span.file, p.span.line) for f in self._findings if f.kind == "race" for p in f.places}
        partly = self._partly(launch)
        for read in self._reads.values():
            span = read.finding.places[0].span
            if (span.file, span.line) in raced:
                continue
            if read.whole or partly:
                self._report(read.finding)
            elif read.lanes:
                self.lanes.append(read.finding)
        self._forget()

    def _partly(self, launch: Launch) -> bool:
        """Whether NaN came out of a launch that was given none."""
        if launch.running or not self._all_clean or all(read.whole for read in self._reads.values()):
            return False
        for buffer in self._clean:
            mask = self._masks.get((buffer.rank, -1, buffer.name))
            if (_nan(buffer) & (True if mask is None else mask.bits)).any():
                return True
        return False

    # ------------------------------------------------------------------------------------------------ events
    def issued(self, op: Operation) -> None:
        """Remember the task that ``op`` belongs to."""
        self._issued[op.ident] = self._issued[op.store.ident] if isinstance(op, Landing) else op.role.task

    def wait_done(self, role: Role, counter: Counter, site: Site) -> None:
        """A stage that is filled anew holds nothing."""
        if site.op == "fill":
            ring = role.rings[site.what]
            if not ring.over:
                stage = ring.stages[counter.index[0]]
                self._tiles.update((role.rank, role.block, t.buffer.name) for t in stage.tiles.values())

    def access(self, access: Access) -> None:
        """A read, write or add that is about to happen."""
        buffer = access.buffer
        key = (buffer.rank, buffer.block, buffer.name)
        if buffer.block >= 0:
            if access.kind == "write":
                self._tiles.discard(key)
            elif key in self._tiles:
                self._found(access, whole=True)
            return
        mask = self._masks.get(key)
        if mask is None:
            return
        if access.kind != "write":
            what = mask.read(access.window)
            if access.span in self._vectors:
                self._lane(access, what == "whole")
            elif what in ("nothing", "part"):
                self._found(access, whole=what == "nothing")
        if access.kind != "read":
            mask.write(access.window)

    def _lane(self, access: Access, written: bool) -> None:
        """One lane of an index vector; they come one after the other."""
        who, vector = access.who, self._vector
        task = self._roles[who.rank, who.block, who.role].task
        if vector is None or (vector.actor, vector.span) != (access.actor, access.span) or vector.task is not task:
            self._end_vector()
            vector = self._vector = _Vector(access.actor, access.span, task)
        vector.some |= written
        if not written and vector.missing is None:
            vector.missing = (access.span, access.buffer.name, who.role), self._finding(access, whole=True)

    def _end_vector(self) -> None:
        vector, self._vector = self._vector, None
        if vector is not None and vector.missing is not None and len(self._reads) < SUSPECTS:
            key, finding = vector.missing
            self._reads.setdefault((*key, not vector.some), _Read(finding, not vector.some, vector.some))

    def _found(self, access: Access, whole: bool) -> None:
        key = (access.span, access.buffer.name, access.who.role, whole)
        if key not in self._reads and len(self._reads) < SUSPECTS:
            self._reads[key] = _Read(self._finding(access, whole), whole)

    def _finding(self, access: Access, whole: bool) -> Finding:
        who, buffer, span = access.who, access.buffer, access.span
        role = self._roles[who.rank, who.block, who.role]
        task = tuple(zip(*self._issued.get(access.actor, role.task), strict=True))
        if buffer.block >= 0:
            pipeline, _, field = buffer.name.partition("[")
            private = field == f"0].{pipeline}"
            name = pipeline if private else buffer.name
            what = f"reads tile {name}"
            message = f"the {who.role} reads shared tile {name}, which nothing has written"
            message += "" if private else " since its stage was freed"
            advice = "Load or store it first, in the same fill of the stage."
        else:
            at = ", ".join(f"{a}:{b}" for a, b in access.window)
            does = "adds to" if access.kind == "add" else "reads"
            what = f"{does} {buffer.name}[{at}] of rank {buffer.rank}"
            message = f"the {who.role} {does} {buffer.name}[{at}] of rank {buffer.rank}, of which " + (
                "nothing was ever written" if whole else "a part was never written, and the results have NaN"
            )
            advice = (
                f"Write it first with store_async, and add after a wait; or clear `{buffer.name}` before the launch."
                if access.kind == "add"
                else f"Write `{buffer.name}` first and wait for it, or read another place."
            )
        stage = buffer.name.rpartition(".")[0] if buffer.block >= 0 else ""
        place = Place(who.rank, who.block, who.role, what, span, task, stage, synchronised(role.pending))
        return Finding("uninitialised", message, (place,), advice)


# --------------------------------------------------------------------------------------------------- patterns
def unwritten(array: Array, dtype: DType) -> Array:
    """Which elements of storage hold the pattern of memory that nothing has written.

    Of narrow types, which may have it as data: whole rows of at least 8, or all of the array.
    """
    if dtype == float32:
        return array.view(np.uint32) == POISON[dtype].view(np.uint32)
    found = np.asarray(array == POISON[dtype])
    if array.itemsize == 4 or not found.any() or found.all():
        return found
    return found & (found.all(-1, keepdims=True) & (found.shape[-1] >= 8))


def forget_contents(array: Array, dtype: DType) -> None:
    """Make ``array`` (storage, changed in place) look as if nothing had ever been written to it."""
    array[...] = POISON[dtype]


def _vector_loads(kernel: ir.Kernel) -> frozenset[ir.Span]:
    """The lines that load an index vector from memory."""
    return frozenset(
        e.span
        for body in (kernel.prologue, *(body for _, body in kernel.classes))
        for s in statements(body)
        for e in walk(expressions(s))
        if isinstance(e, ir.Call) and e.op == "load_elements"
    )


def _nan(buffer: Buffer) -> Array:
    return np.isnan(decode(buffer.array, buffer.dtype))


def _aliased(a: Buffer, b: Buffer) -> bool:
    return np.may_share_memory(a.array, b.array)


def _slices(window: Window) -> tuple[slice, ...]:
    return tuple(slice(first, stop) for first, stop in window)
