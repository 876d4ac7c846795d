"""The device's part of :func:`pk.trace`: memory for the logs of launches, and what their bytes mean.

Each launch gets room of its own, blocks x 8 logs x notes (layout: ``pk/include/pk/comm/trace.cuh``), taken before the
first launch, because nothing may be allocated while launches wait for each other.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pk.errors import BackendError
from pk.runtime.context import TRACE, TRACE_OFFSET
from pk.timeline import Row, Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from pk.artifact import Site, Source
    from pk.runtime.team import Group

LOGS = 8  # of a block
NOTE_BYTES = 16
_TASK, _STAMP = 1, 2  # in the upper half of a note's ``what``; 0: a site
_PLACES = ("loader", "storer", "launch", "communicator")  # of roles of one warp; those of several come behind
_NOTE = np.dtype([("begin", "<u4"), ("waited", "<u4"), ("what", "<u4"), ("value", "<i4")])


@dataclass(frozen=True, slots=True)
class Taken:
    """The room of one launch."""

    source: Source
    blocks: int
    address: int


class Tracer:
    """Records the launches of one rank between :func:`pk.trace`'s begin and end."""

    def __init__(self, group: Group, launches: int, notes: int) -> None:
        """Room for ``launches`` launches with ``notes`` notes of each role of a block.

        Raises :class:`pk.errors.BackendError` if the GPU has not so much memory left.
        """
        self.group, self.notes = group, notes
        self._room = group.sms * LOGS * notes * NOTE_BYTES
        self._launches = launches
        self._base = group.driver.allocate(group.gpu, self._room * launches)
        group.driver.zero(group.gpu, self._base, self._room * launches)
        self.taken: list[Taken] = []
        self.missed = 0

    def take(self, source: Source, blocks: int) -> int:
        """Address of the logs of the next launch; 0 if there is no room left."""
        if len(self.taken) == self._launches:
            self.missed += 1
            return 0
        address = self._base + self._room * len(self.taken)
        self.taken.append(Taken(source, blocks, address))
        return address

    def read(self) -> list[tuple[str, list[Row]]]:
        """Kernel and rows of every launch, which have ended; times by this GPU's clock, nanoseconds."""
        return [(t.source.name, self._rows(t)) for t in self.taken]

    def _rows(self, taken: Taken) -> list[Row]:
        data = self.group.driver.read(self.group.gpu, taken.address, taken.blocks * LOGS * self.notes * NOTE_BYTES)
        logs = np.frombuffer(data, _NOTE).reshape(taken.blocks, LOGS, self.notes)
        rows = []
        for block, place in zip(*np.nonzero(logs["begin"][:, :, 0]), strict=True):
            log = logs[block, place]
            count, lost = int(log[0]["begin"]), int(log[0]["waited"])
            where = self.group.rank, int(block), int(place), lost
            rows += [row(part, taken.source.sites, *where) for part in parts(log[1:count])]
        return rows

    def free(self) -> None:
        """Give the memory back; no launch that has room may be under way."""
        if self._base:
            self.group.driver.free(self.group.gpu, self._base)
            self._base = 0


def parts(log: Any) -> list[Any]:
    """The notes of one role, or of two: a block of ``pk.communicator(joins=True)`` has one first and another behind."""
    stamps = np.flatnonzero(log["what"] >> 16 == _STAMP)
    return [log[a : b + 1] for a, b in zip(stamps[::2], stamps[1::2], strict=False)]


def row(log: Any, sites: tuple[Site, ...], rank: int, block: int, place: int, lost: int = 0) -> Row:
    """What the notes ``log`` of one role say; the first and the last are stamps."""
    kinds, numbers = log["what"] >> 16, log["what"] & 0xFFFF
    times = _nanoseconds(log)
    scale = _scale(log)
    spans: list[Span] = []
    tasks: list[tuple[int, tuple[int, ...]]] = []
    task: tuple[int, ...] = ()
    for i, kind in enumerate(kinds[:-1]):
        note = log[i]
        if kind == _TASK:
            task = _coordinates(note, int(numbers[i]))
            tasks.append((times[i], task))
        elif kind != _STAMP:
            waited = _down(float(note["waited"]) * scale)
            spans.append(Span(sites[numbers[i]], times[i], times[i + 1], waited, task, int(note["value"])))
    role = next((s.site.role for s in spans if s.site.role != "launch"), "")
    return Row(rank, block, role or _role(place), times[0], times[-1], tuple(spans), tuple(tasks), lost)


def _role(place: int) -> str:
    return _PLACES[place] if place < len(_PLACES) else "consumer"


def _coordinates(note: Any, count: int) -> tuple[int, ...]:
    low, high = int(note["waited"]), int(note["value"]) & 0xFFFFFFFF
    return (low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16)[:count]


def _stamp(note: Any) -> int:
    return (int(note["value"]) & 0xFFFFFFFF) << 32 | int(note["waited"])


def _scale(log: Any) -> float:
    """Nanoseconds a cycle, between the two stamps."""
    cycles = (int(log[-1]["begin"]) - int(log[0]["begin"])) & 0xFFFFFFFF
    return (_stamp(log[-1]) - _stamp(log[0])) / cycles if cycles else 0.0


def _nanoseconds(log: Any) -> list[int]:
    """The time of each note on the GPU's global timer.  A launch is shorter than the 2^32 cycles of a clock's turn."""
    cycles = (log["begin"] - log["begin"][0]).astype(np.float64)  # unsigned: right across the turn
    first = _stamp(log[0])  # since 1970: a float64 would round it to 256 ns
    return [first + _down(t) for t in cycles * _scale(log)]


def _down(nanoseconds: float) -> int:
    """Rounded down, so that no wait is longer than its span; not to the number below by an error of the arithmetic."""
    return int(nanoseconds + 1e-3)


def tracing(
    group: Group, source: Source, blocks: int, buffer: ctypes.Array[ctypes.c_char], launch: Callable[[int], None]
) -> Callable[[int], None]:
    """``launch`` of a kernel built for tracing, whose parameters are in ``buffer``: each has logs of its own, or none.

    Raises :class:`pk.errors.BackendError` while the stream is captured.
    """
    offset = next(f.offset for f in source.fields if f.kind == "context") + TRACE_OFFSET

    def enqueue(stream: int) -> None:
        tracer = group.tracer
        if tracer is not None and group.driver.capturing(group.gpu, stream):
            raise BackendError(
                "pk.trace is on while a CUDA graph is captured, and a replay has no logs of its own.\n"
                "  Trace the same calls without the graph."
            )
        TRACE.pack_into(
            buffer, offset, *((tracer.notes, tracer.take(source, blocks)) if tracer is not None else (0, 0))
        )
        launch(stream)

    return enqueue
