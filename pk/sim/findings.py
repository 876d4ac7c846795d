"""What a check finds: the one form in which races, deadlocks, bad reads and lost signals are reported.

Everything that looks for mistakes makes :class:`Finding` s; text, JSON and exit codes are made from them here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.ir import nodes as ir

KINDS: dict[str, str] = {
    "race": "two accesses that nothing orders",
    "deadlock": "roles that wait for each other, or for a signal that nobody sends",
    "lost-signal": "a signal that arrives after its counter was last needed, or is never waited for",
    "bad-count": "a wait for more than all signals together can reach",
    "counter-range": "an index outside a signals array, or outside the ranks",
    "not-resident": "blocks that wait for blocks which cannot be on the device at the same time",
    "order-dependent": "a result or an end that depends on the order in which blocks run",
    "uninitialised": "a read of memory that nothing wrote",
    "out-of-range": "a tile or an index outside its tensor",
    "clipped": "a write that was cut off at the edge of a tensor (only with strict bounds)",
    "wrong-result": "results that differ between schedules, or from the reference",
    "failed": "the kernel itself failed: an assert, a division by zero, an endless loop",
}


MINOR = ("lost-signal", "out-of-range", "clipped")
"""Kinds that come last in a list, the least of them at the end; "clipped" is no cause of anything else."""
MOST = 20  # findings of a launch, clipped writes apart


@dataclass(frozen=True, slots=True)
class Place:
    """One side of a finding: who did (or waits to do) what, at which line, and what it had last synchronised with.

    ``task`` holds the loop variables of the tile in work; ``stage`` the pipeline stage, if one is touched; ``last`` is
    a sentence such as ``wait for begun[0, 1] >= 1 (line 31)``, empty if the side never synchronised.
    """

    rank: int
    block: int
    role: str
    what: str
    span: ir.Span
    task: tuple[tuple[str, int], ...] = ()
    stage: str = ""
    last: str = ""

    def __str__(self) -> str:
        task = "".join(f" {name}={value}" for name, value in self.task)
        where = f"rank {self.rank}, block {self.block}, {self.role}{f', tile{task}' if task else ''}"
        stage = f", stage {self.stage}" if self.stage else ""
        last = f"\n    last synchronisation: {self.last}" if self.last else "\n    it has not synchronised before"
        return f"{where}{stage}: {self.what}\n{errors.frame(self.span)}{last}"

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--format json``."""
        at = {"file": self.span.file, "line": self.span.line, "column": self.span.column, "text": self.span.text}
        return {
            "rank": self.rank, "block": self.block, "role": self.role, "what": self.what, "task": dict(self.task),
            "stage": self.stage, "last_synchronisation": self.last, "at": at,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake: its kind (a row of ``KINDS``), one sentence, both sides or the whole cycle, and what to do.

    ``seed`` replays the schedule that showed it (None: every schedule does); ``trace`` is the shortest way there, if
    one was searched for.
    """

    kind: str
    message: str
    places: tuple[Place, ...]
    advice: str
    seed: int | None = None
    trace: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two findings the same mistake: its kind and the lines it is made of (and who is there)."""
        if self.kind == "clipped":
            return (self.kind, frozenset((p.span.file, p.span.line) for p in self.places))
        return (self.kind, frozenset((p.span.file, p.span.line, p.span.column, p.role) for p in self.places))

    @property
    def rank(self) -> int:
        """Its place in a list: 0 for what is worst."""
        return MINOR.index(self.kind) + 1 if self.kind in MINOR else 0

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.message}"]
        parts += ["  " + str(place).replace("\n", "\n  ") for place in self.places]
        parts += (
            ["  shortest trace:", *(f"    {i + 1}. {step}" for i, step in enumerate(self.trace))] if self.trace else []
        )
        return "\n".join([*parts, f"  {self.advice}"])

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--format json``."""
        return {
            "kind": self.kind, "message": self.message, "places": [p.as_json() for p in self.places],
            "advice": self.advice, "seed": self.seed, "trace": list(self.trace),
        }  # fmt: skip


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """The first finding of each mistake, the worst kinds first; at most ``MOST``, and as many clipped writes."""
    first: dict[object, Finding] = {}
    for finding in findings:
        first.setdefault(finding.key, finding)
    clipped = [f for f in first.values() if f.kind == "clipped"]
    return sorted(causes(first.values())[:MOST] + clipped[:MOST], key=lambda f: f.rank)


def causes(findings: Iterable[Finding]) -> list[Finding]:
    """Those that something else may come of: all but clipped writes, which ordinary tails are."""
    return [f for f in findings if f.kind != "clipped"]
