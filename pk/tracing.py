""":func:`pk.trace`: record where the time of launches goes, on every rank of a group."""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pk.errors import ArgumentError, TraceError, short
from pk.timeline import Launch, Row, Timeline

if TYPE_CHECKING:
    from pk.runtime.team import Group
    from pk.runtime.tracing import Tracer

_MOST_NOTES = 1 << 20


@contextlib.contextmanager
def trace(
    path: str | Path | None = None, *, launches: int = 16, notes: int = 2048, group: Any = None
) -> Iterator[Timeline]:
    """Record every launch that this rank makes inside the ``with`` block.  Collective over ``group``, on GPUs only.

    ::

        with pk.trace("timeline.json") as timeline:
            pk.ops.matmul_reduce_scatter(a, b)
        print(timeline)

    The kernels are compiled once more, with a clock read wherever a role may wait; they are a little slower so.  Every
    rank's timeline has the launches of all ranks, their clocks aligned where the ranks begin (to about 2 us; exactly
    where ranks share a GPU).  Rank 0 writes them to ``path``, if given, as JSON for ui.perfetto.dev.  Warm up first.

    ``launches``: that there is room for; ``notes``: of each role of a block, two or three a task and pipeline.  The
    room is launches x SMs x 8 x notes x 16 bytes, 550 MB by default.

    Raises :class:`pk.errors.TraceError` in the simulator, inside another trace, and if ``path`` cannot be written;
    :class:`pk.errors.ArgumentError` for other numbers; :class:`pk.errors.BackendError` on every rank if one has no
    memory left, and where a launch is captured into a CUDA graph.
    """
    from pk.runtime import launch
    from pk.runtime.group import current

    owner = current(group)
    _check(owner, launches, notes, path)
    tracer = _begin(owner, launches, notes)
    timeline = Timeline()
    try:
        yield timeline
        launch.synchronize(owner)
        timeline.launches, timeline.missed = _gather(owner, tracer)
        if path is not None and owner.rank == 0:
            timeline.save(path)
    finally:
        _end(owner, tracer)


def _check(owner: Group, launches: int, notes: int, path: str | Path | None) -> None:
    for name, value, most in (("launches", launches, 4096), ("notes", notes, _MOST_NOTES)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ArgumentError(
                f"pk.trace: {name}={short(value)} is not a whole number from 1 to {most}.\n  Leave it out."
            )
    if owner.backend == "sim":
        raise TraceError(
            "pk.trace measures GPUs, and this rank is simulated: the simulator has an order, but no clock.\n"
            "  Run the program on a GPU, or use `python -m pk check` to see what may happen in which order."
        )
    if owner.tracer is not None:
        raise TraceError("pk.trace is already on for this group.\n  Leave its `with` block first.")
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise TraceError(f"pk.trace: the folder of {str(path)!r} does not exist.\n  Create it, or pass another path.")


def _begin(owner: Group, launches: int, notes: int) -> Tracer:
    """Room on every rank, or an error on every rank; launches go the long way from here on."""
    from pk.runtime.tracing import Tracer

    made: list[Tracer] = []
    try:
        owner.attempt("room for pk.trace", lambda: made.append(Tracer(owner, launches, notes)))
    except BaseException:
        for tracer in made:
            tracer.free()
        raise
    owner.tracer = made[0]
    if owner.context is not None:
        owner.context.warm = {}
    return made[0]


def _end(owner: Group, tracer: Tracer) -> None:
    owner.tracer = None
    if owner.context is not None:
        owner.context.warm = {}
    tracer.free()


def _gather(owner: Group, tracer: Tracer) -> tuple[list[Launch], int]:
    """The launches of all ranks, with aligned clocks."""
    gpu = owner.driver.uuid(owner.gpu)
    mine = zlib.compress(pickle.dumps((gpu, tracer.missed, tracer.read())), 1)
    told = [pickle.loads(zlib.decompress(data)) for data in owner.exchange("the end of pk.trace", mine)]
    return merged([(gpu, launches) for gpu, _, launches in told]), max(missed for _, missed, _ in told)


def merged(told: list[tuple[str, list[tuple[str, list[Row]]]]]) -> list[Launch]:
    """One list from every rank's (GPU, launches) on rank 0's clock; a kernel's n-th launch is its n-th on all ranks.

    The waits for the last rank to begin end on all ranks within the time of one signal: that is where clocks meet.
    """
    found = [_by_kernel(own) for _, own in told]
    shifts = [0 if gpu == told[0][0] else _shift(found[0], own) for (gpu, _), own in zip(told, found, strict=True)]
    launches: list[Launch] = []
    for key in dict.fromkeys(key for own in found for key in own):
        launch = Launch(key[0], len(launches))
        for own, shift in zip(found, shifts, strict=True):
            launch.rows += [_moved(row, shift) for row in own.get(key, ())]
        origin = min((row.begin for row in launch.rows), default=0)
        launch.rows = [_moved(row, -origin) for row in launch.rows]
        launches.append(launch)
    return launches


def _by_kernel(launches: list[tuple[str, list[Row]]]) -> dict[tuple[str, int], list[Row]]:
    """Rows by kernel and which of its launches, in order: ranks may differ in kernels that meet no other rank."""
    found: dict[tuple[str, int], list[Row]] = {}
    count: Counter[str] = Counter()
    for kernel, rows in launches:
        found[kernel, count[kernel]] = rows
        count[kernel] += 1
    return found


def _shift(first: dict[tuple[str, int], list[Row]], other: dict[tuple[str, int], list[Row]]) -> int:
    """Nanoseconds to add to the times of ``other``."""
    pairs = [(_begun(first[key]), _begun(other[key])) for key in first.keys() & other.keys()]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    return int(median(found)) if found else 0


def _begun(rows: list[Row]) -> int | None:
    """When the first block of a rank knew that every rank had begun."""
    ends = [s.begin + s.waited for r in rows for s in r.spans if s.site.role == "launch" and s.site.op == "entry"]
    return min(ends, default=None)


def _moved(row: Row, by: int) -> Row:
    return replace(
        row,
        begin=row.begin + by,
        end=row.end + by,
        spans=tuple(replace(s, begin=s.begin + by, end=s.end + by) for s in row.spans),
        tasks=tuple((t + by, at) for t, at in row.tasks),
    )
