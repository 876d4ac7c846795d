"""What a check hears of a simulated launch: one method for each moment that orders something, or touches memory.

``simulate(..., checker=Checker())`` calls them; without a checker none of them costs anything.  A detector is asked in
the methods that concern it, and tells what it found through :meth:`Checker.report`.  One checker may see several
launches, one after the other: they are then the launches of one stream a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pk.sim.edges import Unheard, Windows
from pk.sim.findings import MOST, Finding
from pk.sim.races import Races
from pk.sim.written import Written

if TYPE_CHECKING:
    from pk.ir import nodes as ir
    from pk.sim.begin import Begin
    from pk.sim.machine import Launch, Operation, Role
    from pk.sim.memory import Access
    from pk.sim.parts import Counter, Site, Stage, Window


class Checker:
    """Listens to launches and collects ``findings``, each mistake once, at most ``MOST`` and as many clipped writes.

    ``seed``: of the schedule, written into what is found; set by ``simulate``.  ``exit_words``: whether a rank's launch
    ends only when every rank's has (None: as the compiler decides for the kernel).  ``strict``: a write that the edge
    of a tensor cuts off is a mistake.
    """

    def __init__(self, exit_words: bool | None = None, strict: bool = False) -> None:
        self.findings: list[Finding] = []
        self.seed: int | None = None
        self._keys: set[tuple[object, ...]] = set()
        self.races = Races(self.report, exit_words)
        self.written = Written(self.report, self.findings)
        self.windows = Windows(self.report, strict)
        self.unheard = Unheard(self.report)

    def report(self, finding: Finding) -> None:
        """Keep ``finding``, unless the same mistake is known or there are enough."""
        if finding.key in self._keys:
            return
        if sum((f.kind == "clipped") == (finding.kind == "clipped") for f in self.findings) < MOST:
            self._keys.add(finding.key)
            self.findings.append(finding)

    # -------------------------------------------------------------------------------------------- the launch
    def launch_begin(self, launch: Launch, kernel: ir.Kernel) -> None:
        """All roles are made, nothing runs yet."""
        self.races.seed = self.seed
        self.races.launch_begin(launch, kernel)
        self.written.launch_begin(launch, kernel)
        self.windows.launch_begin(kernel)
        self.unheard.launch_begin(kernel)

    def rank_begin(self, launch: Launch, rank: int) -> None:
        """The stream of ``rank`` has reached the launch; its roles may run."""

    def role_end(self, role: Role) -> None:
        """``role`` has run to its end; its asynchronous operations may still be under way."""

    def launch_end(self, launch: Launch) -> None:
        """Nothing can happen any more.  ``launch.running``: roles that have not ended (a deadlock), 0 if all have."""
        self.races.launch_end(launch)
        self.written.launch_end(launch)
        self.windows.launch_end(launch)
        self.unheard.launch_end(launch)

    # ---------------------------------------------------------------------------------------- what orders
    def issued(self, op: Operation) -> None:
        """A role has issued ``op`` (all its fields are set); it takes effect later."""
        self.races.issued(op)
        self.written.issued(op)
        self.windows.issued(op)
        self.unheard.issued(op)

    def done(self, op: Operation) -> None:
        """``op`` has taken effect, and makes no more accesses."""
        self.races.done(op)

    def counter_add(self, counter: Counter, value: int, actor: Role | Operation | Begin | Stage) -> None:
        """``value`` is about to be added: by a signal (its ``Arrival``), a stage left, an entry word, a role itself."""
        self.races.counter_add(counter, value, actor)

    def wait_done(self, role: Role, counter: Counter, needed: int, site: Site) -> None:
        """``role`` goes on after waiting for ``counter >= needed``: a signal, a stage (``site.op``: fill, drain), ...

        Entry words (``launch.entries``) and claims are waited for in the same way.
        """
        self.races.wait_done(role, counter, needed, site)
        self.written.wait_done(role, counter, site)
        self.unheard.wait_done(role, counter, needed, site)

    def fetched(self, role: Role, counter: Counter, site: Site) -> None:
        """``role`` reads ``counter`` at once, and is about to add to it (``counter_add`` follows)."""
        self.races.fetched(role, counter)

    def stage_left(self, role: Role, stage: Stage) -> None:
        """``role`` leaves the stage; it is handed on (``counter_add`` by the stage) when its operations are done."""
        self.races.stage_left(role, stage)

    # ---------------------------------------------------------------------------------------- what is touched
    def loading(self, role: Role, site: Site, window: Window, shape: tuple[int, ...], other: float) -> None:
        """``role`` reads a window of a tensor into registers, and ``other`` for what lies outside it."""
        self.windows.loading(role, site, window, shape, other)

    def access(self, access: Access) -> None:
        """A read, write or add of a window is about to happen."""
        self.races.access(access)
        self.written.access(access)
        self.windows.access(access)
