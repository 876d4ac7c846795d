"""Who goes next: a seeded, adversarial choice among all that could happen.

Roles that can go on and asynchronous operations that may take effect stand in one pool, and each step picks one
at random.  On top, the schedule starves someone for a while (a rank, a block, a kind of role, all landings, ...): its
members wait until the others have nothing left to do or the spell is over.  This finds orders that uniform
choice reaches with vanishing probability: a rank that is late by a whole tile, stores that land after everything else.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from typing import Protocol

ROLES = frozenset({"loader", "consumer", "storer", "team"})
OPERATIONS = frozenset({"load", "read", "land", "signal"})

# Kinds to starve together; None is everything.
_TARGETS: tuple[frozenset[str] | None, ...] = (
    None,
    None,
    ROLES,
    OPERATIONS,
    *(frozenset({kind}) for kind in sorted(ROLES | OPERATIONS)),
)


class Actor(Protocol):
    """What the schedule chooses from.  ``kind`` is a role, or what an asynchronous operation does next."""

    ident: int
    rank: int
    block: int
    kind: str

    def step(self) -> None:
        """Go on until the next wait, or take effect."""


class Schedule:
    """The pool and the choice.  The same seed and the same program give the same steps and the same digest."""

    __slots__ = ("_block", "_held", "_kinds", "_left", "_rank", "_ready", "_sms", "_trace", "_world", "random")

    def __init__(self, seed: int, world: int, sms: int) -> None:
        self.random = random.Random(seed)
        self._world, self._sms = world, sms
        self._ready: list[Actor] = []
        self._held: list[Actor] = []
        self._trace = array("I")
        self._left = 0
        self._rank: int | None = None
        self._block: int | None = None
        self._kinds: frozenset[str] | None = frozenset()

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return len(self._trace)

    def digest(self) -> str:
        """A hash of all the choices made."""
        return hashlib.blake2b(self._trace.tobytes(), digest_size=8).hexdigest()

    def add(self, actor: Actor) -> None:
        """``actor`` can go on."""
        (self._held if self._starved(actor) else self._ready).append(actor)

    def pick(self) -> Actor | None:
        """Take the next one out of the pool; None when it is empty."""
        if not self._left or not self._ready:
            self._new_spell()
        ready = self._ready
        if not ready:
            return None
        self._left -= 1
        at = int(self.random.random() * len(ready))
        actor = ready[at]
        last = ready.pop()
        if last is not actor:
            ready[at] = last
        self._trace.append(actor.ident)
        return actor

    def _starved(self, actor: Actor) -> bool:
        return (
            (self._kinds is None or actor.kind in self._kinds)
            and (self._rank is None or actor.rank == self._rank)
            and (self._block is None or actor.block == self._block)
        )

    def _new_spell(self) -> None:
        everyone = self._ready + self._held
        rng = self.random
        self._left = rng.choice((4, 32, 256, 1024))
        self._kinds = rng.choice(_TARGETS) if rng.random() < 0.75 else frozenset()
        # Everything of every rank would be everyone: at least the rank is named then.
        one_rank = self._kinds is None or rng.random() < 0.5
        self._rank = rng.randrange(self._world) if one_rank else None
        self._block = rng.randrange(self._sms) if one_rank and rng.random() < 0.5 else None
        self._held = [a for a in everyone if self._starved(a)]
        self._ready = [a for a in everyone if not self._starved(a)]
        if not self._ready:  # nobody else can go on: the starved may
            self._kinds, self._ready, self._held = frozenset(), everyone, []
