"""One role of a block, walked: its statements executed on integers, its waits and operations written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from pk import errors
from pk.ir import nodes as ir
from pk.ir.order import coordinate
from pk.ir.split import statements
from pk.sim.loops import endless, while_turns
from pk.sim.skeleton_ops import DOES, Operands, Wanted
from pk.sim.skeleton_parts import Key, Place, Skeleton
from pk.sim.skeleton_values import UNKNOWN

_INERT = (ir.Assign, ir.For, ir.While, ir.If, ir.Assert)
_PURE = frozenset({"mma", "store"})


class RoleWalk(Operands):
    """Walks a role's slice.  ``claimed``: the tasks that its block claims, in order; None if it claims none.

    ``claims``: this role claims for the others.  ``counting``: count the tasks of the class, and write nothing down.
    """

    def __init__(
        self, made: Skeleton, place: Place, kind: str, claims: bool, claimed: list[int] | None, counting: bool = False
    ) -> None:
        super().__init__(made, place, kind)
        self.claims, self.counting = claims, counting
        numbers: Iterator[int] = itertools.count() if counting else itertools.chain(claimed or (), itertools.repeat(-1))
        self._numbers, self._taken, self._claimed = numbers, 0, -2
        self.tasks_done = 0  # tasks of the class's loops so far
        self._cursors: dict[tuple[str, str], int] = {}

    def run(self, block: ir.Block) -> None:
        """Walk it all."""
        self.wait("begins", "begins", self.made.kernel.span, [(("begun", self.place.rank), 1)])
        self.block(block)
        self.close()

    # ---------------------------------------------------------------------------------------- statements
    def block(self, block: ir.Block) -> None:
        """Walk statements."""
        for s in block:
            self.statement(s)

    def statement(self, s: ir.Statement) -> None:
        """Walk one."""
        if isinstance(s, ir.Assign):
            self.values[s.var.name] = self.value(s.value)
        elif isinstance(s, ir.For):
            self.loop(s)
        elif isinstance(s, ir.While):
            self.conditional_loop(s)
        elif isinstance(s, ir.Tasks):
            self.tasks(s)
        elif isinstance(s, ir.If):
            cond = self.value(s.cond)
            if cond is UNKNOWN:
                self.undecided(s, (*s.then, *s.orelse), "whether a branch is taken")
            else:
                self.block(s.then if cond else s.orelse)
        elif isinstance(s, ir.Stage):
            self.stage(s)
        elif isinstance(s, ir.Do):
            DOES[s.op](self, s)
        elif isinstance(s, ir.Assert):
            if self.value(s.cond) is not UNKNOWN and not self.value(s.cond):
                raise errors.SimulationError(f"assertion failed: {s.text}", s.span, self.where())
        elif isinstance(s, ir.Role):
            raise AssertionError(f"a {s.kind} block inside a role")

    def undecided(self, s: ir.Statement, body: ir.Block, what: str) -> None:
        """A statement whose course depends on loaded values: harmless if it only reckons, else refused."""
        for inner in statements(body):
            calls = inner.op not in _PURE if isinstance(inner, ir.Do) else not isinstance(inner, _INERT)
            if calls:
                raise self.refuse(what, s.span)
        for inner in statements((s,)):
            if isinstance(inner, ir.Assign | ir.For):
                self.values[inner.var.name] = UNKNOWN

    def loop(self, s: ir.For) -> None:
        """All turns."""
        start, stop = self.value(s.start), self.value(s.stop)
        if start is UNKNOWN or stop is UNKNOWN:
            self.undecided(s, s.body, "how often a loop runs")
            return
        for i in range(start, stop):
            self.values[s.var.name] = i
            self.block(s.body)

    def conditional_loop(self, s: ir.While) -> None:
        """Turns while the condition holds."""
        most = while_turns()
        for turn in itertools.count():
            cond = self.value(s.cond)
            if cond is UNKNOWN:
                self.undecided(s, s.body, "how often a loop runs")
                return
            if not cond:
                return
            if turn >= most:
                raise endless(most, s.span, self.where())
            self.block(s.body)

    def tasks(self, s: ir.Tasks) -> None:
        """The tasks that this block takes."""
        extents = [self.known(e, "how many tasks there are", s.span) for e in s.extents]
        group, number = self.known(s.group, "the order of tasks", s.span), 1
        for extent in extents:
            number *= max(extent, 0)
        dealt = self.claimed_tasks(s, number) if s.dynamic else self.dealt_tasks(number)
        for task in dealt:
            at = coordinate(task, extents, group)
            self.values.update({v.name: i for v, i in zip(s.vars, at, strict=True)})
            self.task = tuple((v.name, i) for v, i in zip(s.vars, at, strict=True))
            self.block(s.body)
        self.tasks_done += number
        self.task = ()

    def dealt_tasks(self, number: int) -> Iterator[int]:
        """Those dealt to the block in turn; the count runs on from loop to loop."""
        return iter(range((self.place.index - self.tasks_done) % self.place.of, number, self.place.of))

    def claimed_tasks(self, s: ir.Tasks, number: int) -> Iterator[int]:
        """The tasks of this loop that the block claims; the number past them belongs to the next loop."""
        if self._claimed == -2:
            self.claim(s)
        while self._claimed != -1 and self._claimed < self.tasks_done + number:
            yield self._claimed - self.tasks_done
            self.claim(s)

    def claim(self, s: ir.Tasks) -> None:
        """Take the next number: -1 when all are taken."""
        self._claimed = next(self._numbers)
        at, self._taken = self._taken, self._taken + 1
        if self.counting:
            return
        work: Key = ("work", self.place.owner, self.place.rank)
        published: Key = ("published", self.place.rank, self.place.block)
        self.made.parts.setdefault(work, 0)
        if not self.claims:
            self.wait("tasks", f"reads claim {at}", s.span, [(published, at + 1)])
            return
        if self._claimed < 0:  # there is no task left to claim when all have been claimed
            self.wait("claim", "claims past the last task", s.span, [(work, None)])
        else:
            self.made.parts[work] = self.made.parts.get(work, 0) + 1
            self.wait("claim", f"claims task {self._claimed}", s.span, [(work, self._claimed)])
            self.add(work, 1)
        self.add(published, 1)

    # -------------------------------------------------------------------------------------------- stages
    def stage(self, s: ir.Stage) -> None:
        """Hold a stage: wait for the other side, do the body, count on this side's counter of the use."""
        place, pipeline = self.place, self.made.kernel.pipeline(s.pipeline)
        cursor = self._cursors.get((s.pipeline, s.mode), 0)
        self._cursors[s.pipeline, s.mode] = cursor + 1
        use, at = divmod(cursor, pipeline.stages)
        theirs, mine, before = ("empty", "full", use - 1) if s.mode == "fill" else ("full", "empty", use)
        stage = (place.rank, place.block, s.pipeline, at)
        early = s.early  # only mutants: so many uses fewer are waited for
        needed: Wanted = [((theirs, *stage, before - early), None)] if before - early >= 0 else []
        guaranteed: Wanted = [((theirs, *stage, before), None)] if early and before >= 0 else []
        self.held[s.pipeline] = key = (mine, *stage, use)
        self.at_stage = f"{at} of {s.pipeline}"
        if needed or guaranteed:
            self.wait(s.mode, f"{s.mode}s stage {at} of {s.pipeline}", s.span, needed, guaranteed)
        self.block(s.body)
        self.at_stage = ""
        self.add(key, 1)
        self.made.parts[key] = self.made.parts.get(key, 0) + 1
