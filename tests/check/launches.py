"""Launches that follow each other, as a system: which counters and which scratch a rank that is ahead may touch.

Each launch is one of

    "push"   stores to every peer's scratch, signals, waits for every peer's signal, reads
    "quiet"  the same, but nobody waits or reads
    "pull"   writes its own scratch, signals, waits for every peer's signal, reads the peers'

in lower case if it is early, in upper case if it waits until every rank has begun before it touches what peers touch.
Early launches use ``scratch_sets`` of scratch in turn, the others one that is no early launch's.
"""

from __future__ import annotations

from pk.sim.system import Actor, Guard, System, at_least


class Launches:
    """The system, while it is built.  Lists are by rank, then by launch."""

    def __init__(
        self, ranks: int, kinds: tuple[str, ...], scratch_sets: int, counter_sets: int, open_waits: bool
    ) -> None:
        self.system, self.ranks, self.kinds = System(), ranks, kinds
        self.scratch_sets, self.counter_sets, self.open_waits = scratch_sets, counter_sets, open_waits
        names = "entered", "arrived", "cleared", "landed", "read", "pulled"
        self.at = {
            n: [[self.system.counter(f"{n} {r}.{g}") for g in range(len(kinds))] for r in range(ranks)] for n in names
        }
        for r in range(ranks):
            self.stream(r)

    def stream(self, r: int) -> None:
        """The launches of one rank, one after the other."""
        stream = self.system.actor(f"stream of rank {r}")
        for g, kind in enumerate(self.kinds):
            stream.step(f"begins launch {g}")
            begun = stream.past()
            for peer in range(self.ranks):
                self.system.actor(f"entry word {r}.{g}").step("arrives", begun, adds={self.at["entered"][peer][g]: 1})
            parts = [self.opened(r, g, begun), *self.work(r, g, kind, begun)]
            stream.step(f"ends launch {g}", *(part.past() for part in parts))

    def everyone(self, what: str, r: int, g: int, ranks: int) -> Guard:
        return at_least(self.at[what][r][g], ranks)

    def opened(self, r: int, g: int, begun: Guard) -> Actor:
        """The launch warp: every rank has begun, so the counters of the launch before are at rest."""
        warp = self.system.actor(f"launch warp {r}.{g}")
        warp.step("waits for all", begun, *([self.everyone("entered", r, g, self.ranks)] if self.open_waits else []))
        if g:
            quiet = self.everyone("arrived", r, g - 1, self.ranks - 1)
            warp.step(
                f"clears the counters of launch {g - 1}", adds={self.at["cleared"][r][g - 1]: 1}, requires=(quiet,)
            )
        return warp

    def before(self, g: int) -> int | None:
        """The last launch before ``g`` that used the same scratch."""
        if self.kinds[g].isupper():
            return next((h for h in range(g - 1, -1, -1) if self.kinds[h].isupper()), None)
        return next(
            (h for h in range(g - 1, -1, -1) if self.kinds[h].islower() and (g - h) % self.scratch_sets == 0), None
        )

    def at_rest(self, r: int, g: int) -> tuple[Guard, ...]:
        """Nobody uses the scratch of rank ``r`` for an earlier launch any more."""
        h = self.before(g)
        if h is None:
            return ()
        peers = self.ranks - 1
        if self.kinds[h].lower() == "pull":
            return (self.everyone("pulled", r, h, peers),)
        used = self.everyone("landed", r, h, peers)
        return (used, at_least(self.at["read"][r][h], 1)) if self.kinds[h].lower() == "push" else (used,)

    def work(self, r: int, g: int, kind: str, begun: Guard) -> list[Actor]:
        """A role, and what it has under way."""
        role, peers = self.system.actor(f"role {r}.{g}"), [p for p in range(self.ranks) if p != r]
        gate = [self.everyone("entered", r, g, self.ranks)] if kind.isupper() else []
        pulls = kind.lower() == "pull"
        role.step(
            "writes its own scratch" if pulls else "pushes", begun, *gate, requires=self.at_rest(r, g) if pulls else ()
        )
        sent, issued = [], role.past()
        for p in peers:
            message = self.system.actor(f"message {r}.{g} to {p}")
            if not pulls:
                message.step("lands", issued, adds={self.at["landed"][p][g]: 1}, requires=self.at_rest(p, g))
            old = g - self.counter_sets
            cleared = (at_least(self.at["cleared"][p][old], 1),) if old >= 0 else ()
            message.step("signals", issued, adds={self.at["arrived"][p][g]: 1}, requires=cleared)
            sent.append(message)
        if kind.lower() != "quiet":
            wait = self.everyone("arrived", r, g, len(peers))
            if pulls:
                role.step("reads its peers' scratch", wait, adds={self.at["pulled"][p][g]: 1 for p in peers})
            else:
                landed = (self.everyone("landed", r, g, len(peers)),)
                role.step("reads what came", wait, adds={self.at["read"][r][g]: 1}, requires=landed)
        return [role, *sent]


def launches(ranks: int, *kinds: str, scratch_sets: int = 2, counter_sets: int = 4, open_waits: bool = True) -> System:
    """See above.  ``open_waits``: whether no launch ends before every rank has begun it."""
    return Launches(ranks, kinds, scratch_sets, counter_sets, open_waits).system
