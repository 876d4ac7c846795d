"""Places of a kernel that may wait, as the host names them; and what reaches another rank, and so waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pk.artifact import Site
from pk.codegen.facts import Facts
from pk.codegen.names import enumerator
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.ops import TABLE
from pk.ir.rules import spelled

if TYPE_CHECKING:
    from pk.codegen.plan import ClassPlan

LAUNCH_SITES = (
    Site("launch", "entry", "every rank has begun", "", 0, ""),
    Site("launch", "exit", "every rank has finished", "", 0, ""),
)


def site_names(sites: tuple[Site, ...]) -> list[str]:
    """A C++ enumerator for each site, such as ``SITE_INPUTS_FILL``."""
    names: list[str] = []
    for s in sites:
        subject = "" if s.role == "launch" or s.op == "assert" else f"{s.what}_"
        name = base = enumerator(f"SITE_{subject}{s.op}")
        n = 1
        while name in names:
            n += 1
            name = f"{base}_{n}"
        names.append(name)
    return names


def site_of(role: str, op: str, what: str, span: ir.Span) -> Site:
    """The site of one wait."""
    return Site(role, op, what, span.file, span.line, span.text.strip().rstrip("\\"))


def sites_of(classes: tuple[ClassPlan, ...]) -> tuple[Site, ...]:
    """Every place that may wait, in the order of the emitted text, then the two of the launch itself."""
    found: dict[Site, None] = {}
    for c in classes:
        for r in c.roles:
            for s in split.statements(r.body):
                for op, what in waits_of(s, r.facts):
                    found[site_of(r.name, op, what, s.span)] = None
    return (*found, *LAUNCH_SITES)


def signallers_of(classes: tuple[ClassPlan, ...]) -> tuple[Site, ...]:
    """Every statement that adds to a counter, each with the array it adds to: who ends the waits for it."""
    found: dict[Site, None] = {}
    for c in classes:
        for r in c.roles:
            for s in split.statements(r.body):
                for op, counter in _adds_of(s):
                    found[site_of(r.name, op, counter.signals, s.span)] = None
    return tuple(found)


def _adds_of(s: ir.Statement) -> Iterator[tuple[str, ir.Signal]]:
    """(op, counter) of each add that a statement itself does."""
    ops: list[ir.Do | ir.Call] = [e for e in split.walk(split.expressions(s)) if isinstance(e, ir.Call)]
    if isinstance(s, ir.Do):
        ops.append(s)
    for op in ops:
        first = op.operands[0] if op.operands else None
        if isinstance(first, ir.Signal) and 0 in TABLE[op.op].writes:
            yield op.op, first


def waits_of(s: ir.Statement, facts: Facts) -> Iterator[tuple[str, str]]:
    """(op, what) of each wait that a statement itself may do; some accesses wait for the ranks to have begun."""
    if isinstance(s, ir.Stage):
        yield s.mode, s.pipeline
    elif isinstance(s, ir.Assert):
        yield "assert", s.text
    elif isinstance(s, ir.Bounds):
        yield "bounds", s.what
    elif isinstance(s, ir.Do):
        first = s.operands[0] if s.operands else None
        if isinstance(first, ir.Signal):
            yield s.op, first.signals
        elif touched := gated_windows(s, facts):
            yield spelled(s.op), touched[0].tensor
    elif touched := gated_windows(s, facts):
        yield "load", touched[0].tensor


def remote_access(s: ir.Statement, facts: Facts) -> bool:
    """Whether a statement itself (not the blocks inside it) touches another rank's memory or counters."""
    if isinstance(s, ir.Do) and s.op in ("signal_all", "barrier"):
        return True
    if isinstance(s, ir.Do) and s.op in ("signal", "signal_each") and not facts.is_own_rank(s.operands[1]):
        return True
    return bool(remote_windows(s, facts))


def remote_windows(s: ir.Statement, facts: Facts) -> list[ir.Memory]:
    """Other ranks' memory that a statement itself touches."""
    return [at for at, _ in windows(s) if facts.is_remote(at)]


def gated_windows(s: ir.Statement, facts: Facts) -> list[ir.Memory]:
    """What a statement itself touches only when every rank has begun, and so has left the launch before.

    Other ranks' memory, which they may still prepare; and scratch that it writes, which they may still read.
    """
    return [at for at, written in windows(s) if facts.is_remote(at) or (written and at.tensor in facts.work_space)]


def windows(s: ir.Statement) -> Iterator[tuple[ir.Memory, bool]]:
    """Every window of a tensor that a statement itself touches, and whether it writes there."""
    for e in split.walk(split.expressions(s)):
        if isinstance(e, ir.Memory):
            written_to = [s.operands[i] for i in TABLE[s.op].writes] if isinstance(s, ir.Do) else []
            written = any(o is e for o in split.walk(written_to))
            yield e, written
