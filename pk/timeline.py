"""Where the time of a launch goes: what :func:`pk.trace` returns.  Pure data; no torch, no GPU.

A role of a block is a row.  Its ``Span``s say which wait or signal of the kernel it had come to, from when to when, and
how much of that it waited; the rest it worked.  Times are nanoseconds since the first rank began the launch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pk.artifact import Site
from pk.errors import TraceError

_SHARE = 0.01  # of a role's time: what waits for less is not in the table


@dataclass(frozen=True, slots=True)
class Span:
    """From coming to ``site`` until coming to the next one; ``waited`` nanoseconds of it were spent waiting there.

    ``task``: the coordinates that the role worked on, () before the first.  ``index``: of the counter or stage.
    """

    site: Site
    begin: int
    end: int
    waited: int
    task: tuple[int, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One role of one block, from its first to its last moment.  ``lost``: notes that found no room."""

    rank: int
    block: int
    role: str
    begin: int
    end: int
    spans: tuple[Span, ...]
    tasks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    lost: int = 0

    @property
    def waited(self) -> int:
        """Nanoseconds spent waiting."""
        return sum(s.waited for s in self.spans)


@dataclass(slots=True)
class Launch:
    """One launch on all ranks that were traced."""

    kernel: str
    number: int  # in the order of launching
    rows: list[Row] = field(default_factory=list)

    @property
    def nanoseconds(self) -> int:
        """From the first row's begin to the last one's end."""
        return max((r.end for r in self.rows), default=0) - min((r.begin for r in self.rows), default=0)

    def roles(self, rank: int) -> dict[str, list[Row]]:
        """The rows of ``rank`` by role; the launch warp's, which waits for the others, last."""
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows:
            if row.rank == rank:
                found[row.role].append(row)
        return dict(sorted(found.items(), key=lambda item: (item[0] == "launch", item[0])))

    def __str__(self) -> str:
        """A table for each rank: how busy each role was, and what it waited for."""
        return "\n".join(_table(self))


@dataclass(slots=True)
class Timeline:
    """What :func:`pk.trace` recorded, complete when its block has ended.

    launches: in order.  missed: launches that came after the room for them was used up.
    """

    launches: list[Launch] = field(default_factory=list)
    missed: int = 0

    def __str__(self) -> str:
        """The table of the last launch of each kernel, and what was left out."""
        last = {launch.kernel: launch for launch in self.launches}
        text = [str(launch) for launch in last.values()] or ["no launch was recorded"]
        if self.missed:
            wanted = len(self.launches) + self.missed
            text.append(f"{self.missed} more launches found no room: pk.trace(launches={wanted}) keeps them all")
        return "\n\n".join(text)

    def save(self, path: str | Path) -> None:
        """Write the events as JSON that ui.perfetto.dev and chrome://tracing open.

        A rank is a process, a role of a block a thread; launches follow each other with a gap of their own length.
        Raises :class:`pk.errors.TraceError` if the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps({"traceEvents": list(_events(self.launches)), "displayTimeUnit": "ns"}))
        except OSError as error:
            raise TraceError(
                f"pk.trace: {str(path)!r} cannot be written: {error}.\n  Pass a path in a folder that exists."
            ) from error


# ------------------------------------------------------------------------------------------------------------- table
def _table(launch: Launch) -> Iterator[str]:
    if not launch.rows:
        yield f"{launch.kernel}, launch {launch.number}: no notes"
    for rank in sorted({row.rank for row in launch.rows}):
        roles = launch.roles(rank)
        rows = [row for found in roles.values() for row in found]
        begin, end = min(r.begin for r in rows), max(r.end for r in rows)
        ends = [max(r.end for r in rows if r.block == block) for block in {r.block for r in rows}]
        idle = 1 - sum(e - begin for e in ends) / (len(ends) * (end - begin)) if end > begin else 0.0
        yield (
            f"{launch.kernel}, launch {launch.number}, rank {rank}: {len(ends)} blocks, {(end - begin) / 1e3:.1f} us; "
            f"blocks end {(end - min(ends)) / 1e3:.1f} us before the last at most, {100 * idle:.1f} % of their time"
        )
        yield "  role                  busy   waits for"
        for role, found in roles.items():
            yield f"  {role:20s}  {_busy(found):4.0f} %  {'; '.join(_waits(found)) or '-'}"
        lost = sum(row.lost for row in rows)
        if lost:
            yield f"  {lost} notes found no room, so that some rows are short: pk.trace(notes=...) makes more"


def _busy(rows: Sequence[Row]) -> float:
    whole = sum(r.end - r.begin for r in rows)
    return 100 * (1 - sum(r.waited for r in rows) / whole) if whole else 100.0


def _waits(rows: Sequence[Row]) -> list[str]:
    """What the rows waited for, longest first, as shares of their time."""
    whole = sum(r.end - r.begin for r in rows) or 1.0
    waited: dict[Site, float] = defaultdict(float)
    for row in rows:
        for span in row.spans:
            waited[span.site] += span.waited
    found = sorted(waited.items(), key=lambda item: -item[1])
    return [f"{_named(site)} {100 * t / whole:.1f} %" for site, t in found if t >= _SHARE * whole]


def _named(site: Site) -> str:
    where = f":{site.line}" if site.line else ""
    return f"{site.what}.{site.op}{where}" if site.role != "launch" else site.what


# -------------------------------------------------------------------------------------------------------------- JSON
def _events(launches: Sequence[Launch]) -> Iterator[dict[str, Any]]:
    """Chrome's trace events: complete events ("X") in microseconds, names of processes and threads ("M")."""
    threads: dict[tuple[int, int, str], int] = {}
    start = 0.0
    for launch in launches:
        for row in sorted(launch.rows, key=lambda r: (r.rank, r.block, r.role)):
            key = (row.rank, row.block, row.role)
            if key not in threads:
                threads[key] = len(threads)
                yield _name("process_name", row.rank, threads[key], f"rank {row.rank}")
                yield _name("thread_name", row.rank, threads[key], f"block {row.block} {row.role}")
            for name, begin, end, about in _pieces(launch, row):
                yield {
                    "name": name, "ph": "X", "ts": (start + begin) / 1e3, "dur": max(end - begin, 0.0) / 1e3,
                    "pid": row.rank, "tid": threads[key], "args": about,
                }  # fmt: skip
        start += 2 * max((row.end for row in launch.rows), default=0.0)


def _pieces(launch: Launch, row: Row) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin, end and arguments of the row's events, outer ones first."""
    yield launch.kernel, row.begin, row.end, {"launch": launch.number}
    stops = [*(begin for begin, _ in row.tasks[1:]), row.end]
    for (begin, task), stop in zip(row.tasks, stops, strict=False):  # of no task there is no stop to use
        yield f"task {', '.join(map(str, task))}", begin, stop, {}
    for span in row.spans:
        site = span.site
        about = {"waited_us": span.waited / 1e3, "index": span.index, "line": f"{site.file}:{site.line}"}
        yield _named(site), span.begin, span.end, {**about, "text": site.text}


def _name(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
