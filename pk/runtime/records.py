"""What a device wrote when it gave up, in the words of the kernel's author.

A record is 128 bytes of host-mapped memory (``pk/include/pk/comm/context.cuh`` writes it); ``Finding`` is one in words,
and can travel to other ranks; ``explain`` makes the text of a ``HangError`` of all ranks' findings.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pk.artifact import Site, Source

SLOTS = 16
RECORD_BYTES = 128
PAGE_BYTES = SLOTS * RECORD_BYTES

COUNTER, ENTRY, EXIT, PIPELINE, DISAGREE, ASSERT, TOLD, BOUNDS = range(1, 9)

_LAYOUT = struct.Struct("<7I2i5I4i2Q40x")
assert _LAYOUT.size == RECORD_BYTES
_SHOWN = 8  # blocked roles that a message lists


class Record(NamedTuple):
    """The fields of a record, in the order of memory."""

    state: int
    reason: int
    kernel: int
    site: int
    rank: int
    block: int
    flat: int
    seen: int
    needed: int
    gen: int
    peer: int
    hash_mine: int
    hash_theirs: int
    ntile: int
    tile: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Launched:
    """A kernel that a context launched: what ``kernel`` of a record stands for."""

    source: Source
    signals: Mapping[str, tuple[int, ...]]
    identity: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One record in words.  ``what`` is the waited-for thing with its index, such as ``begun[0, 2, 3]``.

    ``signallers``: the statements of the kernel that add to the array waited for, None if it waits for no counter.
    """

    kernel: str
    reason: int
    rank: int
    block: int
    site: Site | None
    what: str
    seen: int
    needed: int
    peer: int
    tile: tuple[int, ...]
    seconds: float
    identity: str
    signallers: tuple[Site, ...] | None = None


def read(page: bytes) -> list[Record]:
    """The complete records of a page."""
    found = []
    for at in range(0, PAGE_BYTES, RECORD_BYTES):
        values = _LAYOUT.unpack_from(page, at)
        if values[0] == 1:
            tile = values[14 : 14 + min(values[13], 4)]
            found.append(Record._make((*values[:14], tile, *values[18:])))
    return found


def describe(record: Record, kernels: Sequence[Launched]) -> Finding:
    """A record in words, by the tables of the kernel that wrote it."""
    known = kernels[record.kernel] if record.kernel < len(kernels) else None
    site = known.source.sites[record.site] if known and record.site < len(known.source.sites) else None
    what = site.what if site else ""
    signallers = None
    if known and what in known.signals:
        signallers = tuple(s for s in known.source.signallers if s.what == what)
        what += f"[{', '.join(map(str, unflatten(record.flat, known.signals[what])))}]"
    return Finding(
        kernel=known.source.name if known else f"number {record.kernel}",
        reason=record.reason,
        rank=record.rank,
        block=record.block,
        site=site,
        what=what,
        seen=record.seen,
        needed=record.needed,
        peer=record.peer,
        tile=record.tile,
        seconds=max(record.end - record.begin, 0) / 1e9,
        identity=known.identity if known else "",
        signallers=signallers,
    )


def unflatten(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of element number ``index`` of an array of ``shape``."""
    found = []
    for extent in reversed(shape[1:]):
        found.append(index % max(extent, 1))
        index //= max(extent, 1)
    return (index, *reversed(found)) if shape else ()


def headline(finding: Finding) -> str:
    """One line: what went wrong."""
    f = finding
    who, after = f"kernel `{f.kernel}`: rank {f.rank}", f"{f.seconds:.1f} s"
    if f.reason == TOLD and f.site is not None and f.site.role == "launch":
        return f"{who} had waited {after} for rank {f.peer} to {f.site.op.replace('entry', 'begin')} this launch"
    return {
        COUNTER: f"{who} waited {after} for {f.what}, which is {f.seen} and must reach {f.needed}",
        ENTRY: f"{who} waited {after} for rank {f.peer} to begin this launch",
        EXIT: f"{who} waited {after} for rank {f.peer} to finish this launch",
        PIPELINE: f"{who} waited {after} for pipeline `{f.what}`",
        DISAGREE: f"{who} and rank {f.peer} launch different kernels or different shapes",
        ASSERT: f"{who}: an assert failed" + (f": {f.what}" if f.what else ""),
        BOUNDS: f"{who}: {f.what} is {f.seen}, which is none of 0 to {f.needed - 1}",
        TOLD: f"{who} was told to stop by rank {f.peer}",
    }.get(f.reason, f"{who} gave up (reason {f.reason})")


def explain(findings: Sequence[Finding], notes: Sequence[str], limits: tuple[float, float], cause: str = "") -> str:
    """The text of a HangError: the first cause, where it is, and who else was blocked on what.

    ``notes``: what else is known, one line each.  ``limits``: the two time-outs in force, seconds.  ``cause``: what no
    record says, such as the end of a process.
    """
    ordered = sorted(findings, key=_order)
    lines = [headline(ordered[0]) + "." if ordered else "a peer gave up, and left no record."]
    lines = [f"{cause}.", *(lines if ordered else [])] if cause else lines
    if ordered and ordered[0].reason == DISAGREE:
        lines += [f"  rank {f.rank}: {f.identity}" for f in {f.rank: f for f in reversed(ordered)}.values()]
    elif ordered:
        lines += [*_place(ordered[0]), *_awaited(ordered)]
    others = ordered[1:]
    if others:
        lines.append("  Blocked at that time:")
        lines += [f"    {_blocked(f)}" for f in others[:_SHOWN]]
        if len(others) > _SHOWN:
            lines.append(f"    and {len(others) - _SHOWN} more")
    lines += [f"  {note}" for note in notes if note != cause]
    lines.append(
        f"  Limits: PK_TIMEOUT_S={limits[0]:g}, PK_ENTRY_TIMEOUT_S={limits[1]:g} (a late rank).  "
        "Outputs of this launch are NaN.\n  The group launches nothing until every rank calls pk.reset()."
    )
    return "\n".join(lines)


def _order(finding: Finding) -> tuple[int, int, int]:
    causes = (DISAGREE, BOUNDS, ASSERT, COUNTER, ENTRY, EXIT, PIPELINE, TOLD)
    return (causes.index(finding.reason) if finding.reason in causes else 0, finding.rank, finding.block)


def _place(finding: Finding) -> list[str]:
    tile = f", tile {_tuple(finding.tile)}" if finding.tile else ""
    if finding.site is None:
        return [f"  rank {finding.rank}, block {finding.block}{tile}"]
    return [
        f"  rank {finding.rank}, block {finding.block}, {finding.site.role}{tile}",
        f'  File "{finding.site.file}", line {finding.site.line}',
        f"    {finding.site.text.strip()}",
    ]


def _awaited(findings: Sequence[Finding]) -> list[str]:
    """Who should have signalled what the first finding waited for, and whether those are blocked themselves."""
    first = findings[0]
    if first.signallers is None:
        return []
    name = first.what.partition("[")[0]
    if not first.signallers:
        return [f"  No statement of the kernel signals `{name}`."]
    short = first.needed - first.seen
    lines = [f"  {short} more {'is' if short == 1 else 'are'} due.  What signals `{name}`:"]
    for s in first.signallers:
        lines.append(f"    {s.role}, {s.file.rpartition('/')[2]}:{s.line}: {s.text.strip()}")
        stuck = sorted({f.rank for f in findings[1:] if f.site and f.site.role == s.role and f.kernel == first.kernel})
        if stuck:
            who = f"rank{'s' * (len(stuck) > 1)} {', '.join(map(str, stuck))}"
            lines.append(f"      blocked itself, see below, on {who}")
    return lines


def _blocked(finding: Finding) -> str:
    f = finding
    role = f" {f.site.role}" if f.site else ""
    tile = f", tile {_tuple(f.tile)}" if f.tile else ""
    where = f" ({f.site.file.rpartition('/')[2]}:{f.site.line})" if f.site else ""
    if f.what and f.needed:
        doing = f"{f.what} is {f.seen}, needs {f.needed}"
    elif f.reason in (ENTRY, EXIT):
        doing = f"waiting for rank {f.peer}"
    else:
        doing = f"waiting for {f.what}" if f.what else "waiting"
    return f"rank {f.rank}{role}, block {f.block}{tile}: {doing}{where}"


def _tuple(values: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, values))})"
