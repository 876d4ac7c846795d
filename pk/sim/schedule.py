"""Who goes next: a seeded, adversarial choice among all that could happen.

Roles that can go on and asynchronous operations that may take effect stand in one pool, and each step picks one
at random.  On top, the schedule starves someone for a while (a rank, a block, a kind of role, all landings, ...): its
members wait until the others have nothing left to do or the spell is over.  This finds orders that uniform
choice reaches with vanishing probability: a rank that is late by a whole tile, stores that land after everything else.

A seed names a schedule.  Below ``FAMILY`` it is a random one; above, ``seed // FAMILY`` names a kind of adversary and
``seed % FAMILY`` the victim: a rank, a block or a kind of role that goes on only when nothing else can, one store, one
signal or one load that takes effect as late as possible, or a fixed order of blocks.  ``make`` makes the schedule of
a seed, ``describe`` says in words what it does, ``plan`` chooses the seeds of a check.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from array import array
from collections.abc import Iterator
from typing import Protocol

ROLES = frozenset({"loader", "consumer", "storer", "team", "communicator"})
OPERATIONS = frozenset({"load", "read", "land", "signal"})

# Roles that are starved by themselves, the communicator warp as the team of one warp that it is: what a seed chooses
# does not change with it.
_ROLES = {kind: frozenset({kind}) for kind in ("loader", "consumer", "storer")} | {
    "team": frozenset({"team", "communicator"})
}

# Kinds to starve together; None is everything.
_TARGETS: tuple[frozenset[str] | None, ...] = (
    None,
    None,
    ROLES,
    OPERATIONS,
    *(_ROLES.get(kind, frozenset({kind})) for kind in sorted(OPERATIONS.union(_ROLES))),
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


# ----------------------------------------------------------------------------------------------------- adversaries
FAMILY = 1_000_000
_VICTIM, _LAND, _SIGNAL, _LOAD, _READ, _ORDER = range(1, 7)
_LATE = {_LAND: "land", _SIGNAL: "signal", _LOAD: "load", _READ: "read"}  # families of one late operation
_NOUNS = {"land": "landing of a store", "signal": "signal", "load": "load", "read": "read of a stage by a store"}

# What a victim may be, None being all that a rank or block does; numbers in seeds count on the order.
_VICTIMS: tuple[tuple[str, frozenset[str] | None], ...] = (
    ("everything", None),
    *((f"every {kind}", kinds) for kind, kinds in _ROLES.items()),
    *((f"every {_NOUNS[kind]}", frozenset({kind})) for kind in ("land", "signal", "load", "read")),
    ("every asynchronous operation", OPERATIONS),
    ("every role", ROLES),
)
_ORDERS: tuple[str, ...] = (
    "the last block goes first",
    "the first block goes first",
    "the last rank goes first",
    "the first rank goes first",
    "whatever could go on last goes on first",
    "whatever could go on first goes on first",
    "the last block of the last rank goes first",
    "blocks go on as they like, the last first, and everything asynchronous is late",
)


class Ranked(Schedule):
    """A schedule that always picks the actor of least rank, and by chance among equals."""

    __slots__ = ("_adds", "_heap", "_kth", "_number", "_seen", "_tied", "_victim", "_what")

    def __init__(self, seed: int, world: int, sms: int) -> None:
        super().__init__(seed, world, sms)
        self._heap: list[tuple[int, float, int, Actor]] = []
        self._adds = 0
        family, number = divmod(seed, FAMILY)
        self._number = number
        self._kth = _LATE.get(family)
        self._seen = 0
        self._victim = _victim(number, world, sms) if family == _VICTIM else None

    def add(self, actor: Actor) -> None:
        """``actor`` can go on."""
        self._adds += 1
        rank, tie = self._rank_of(actor)
        heapq.heappush(self._heap, (rank, tie, self._adds, actor))

    def pick(self) -> Actor | None:
        """Take the next one out of the pool; None when it is empty."""
        if not self._heap:
            return None
        actor = heapq.heappop(self._heap)[-1]
        self._trace.append(actor.ident)
        return actor

    def _rank_of(self, actor: Actor) -> tuple[int, float]:
        if self._kth is not None:
            late = False
            if actor.kind == self._kth:
                late = self._seen == self._number
                self._seen += 1
            return late, self.random.random()
        if self._victim is not None:
            kinds, rank, block = self._victim
            late = (
                (kinds is None or actor.kind in kinds)
                and (rank is None or actor.rank == rank)
                and (block is None or actor.block == block)
            )
            return late, self.random.random()
        return _ordered(self._number % len(_ORDERS), actor, self._adds, self.random.random())


def _ordered(order: int, actor: Actor, at: int, chance: float) -> tuple[int, float]:
    """The rank of ``actor``, the ``at``-th to be added, in one of ``_ORDERS``."""
    return (
        (-actor.block, chance),
        (actor.block, chance),
        (-actor.rank, chance),
        (actor.rank, chance),
        (0, -at),
        (0, at),
        (-actor.rank, -actor.block),
        (actor.kind in OPERATIONS, -actor.block),
    )[order]


def _victim(number: int, world: int, sms: int) -> tuple[frozenset[str] | None, int | None, int | None]:
    number, block = divmod(number, sms + 1)
    kind, rank = divmod(number, world + 1)
    return _VICTIMS[kind % len(_VICTIMS)][1], rank - 1 if rank else None, block - 1 if block else None


def victim(kind: int, rank: int | None, block: int | None, world: int, sms: int) -> int:
    """The seed of the schedule that starves row ``kind`` of the victims, of one rank and block or (None) of all."""
    at = kind * (world + 1) + (0 if rank is None else rank + 1)
    return _VICTIM * FAMILY + at * (sms + 1) + (0 if block is None else block + 1)


def late(kind: str, number: int) -> int:
    """The seed of the schedule in which operation ``number`` of ``kind`` (``"land"``, ``"signal"``, ...) is late."""
    return next(family for family, name in _LATE.items() if name == kind) * FAMILY + number


def make(seed: int, world: int, sms: int) -> Schedule:
    """The schedule that ``seed`` names, for ``world`` ranks of ``sms`` blocks."""
    return (Ranked if 1 <= seed // FAMILY <= _ORDER else Schedule)(seed, world, sms)


def describe(seed: int, world: int, sms: int) -> str:
    """One phrase: what the schedule of ``seed`` does."""
    family, number = divmod(seed, FAMILY)
    if family in _LATE:
        return f"{_NOUNS[_LATE[family]]} no. {number} is as late as possible"
    if family == _ORDER:
        return _ORDERS[number % len(_ORDERS)]
    if family != _VICTIM:
        return "random"
    rest, block = divmod(number, sms + 1)
    kind, rank = divmod(rest, world + 1)
    where = (f" of rank {rank - 1}" if rank else "") + (f" of block {block - 1}" if block else "")
    return f"{_VICTIMS[kind % len(_VICTIMS)][0]}{where} is as late as possible"


def plan(seed: int, schedules: int, world: int, sms: int, counts: dict[str, int], roles: frozenset[str]) -> list[int]:
    """The seeds of ``schedules`` different schedules, ``seed`` first.

    Half are random, from ``seed`` on.  The others are adversaries: orders of blocks and ranks, every rank, role and
    kind of operation starved, and, in turn with these, single operations that are late.  ``counts``: how many
    operations of each kind a launch has; ``roles``: kinds of role that the kernel has.
    """
    random_ones = itertools.count(seed % FAMILY if seed >= FAMILY else seed + 1)
    rng = random.Random(seed)
    systematic, single = _systematic(world, sms, roles), _single(counts, rng)
    chosen = {seed: None}  # keeps the order
    sources: list[Iterator[int]] = [systematic, random_ones, single, random_ones]
    for source in itertools.cycle(sources):
        if len(chosen) >= schedules:
            break
        for number in itertools.islice(source, 1):
            chosen.setdefault(number)
    return list(chosen)


def _systematic(world: int, sms: int, roles: frozenset[str]) -> Iterator[int]:
    kinds = [k for k, (_, names) in enumerate(_VICTIMS) if k and (not names or names - ROLES or names & roles)]
    ranks = range(world) if world > 1 else ()
    yield from (_ORDER * FAMILY + order for order in (0, 4, 7, 2, 6, 1, 5, 3))
    yield from (victim(0, rank, None, world, sms) for rank in ranks)
    yield from (victim(kind, None, None, world, sms) for kind in kinds)
    yield from (victim(0, None, block, world, sms) for block in range(sms) if sms > 1)
    yield from (victim(kind, rank, None, world, sms) for kind in kinds for rank in ranks)
    yield from (victim(0, rank, block, world, sms) for rank in ranks for block in range(sms) if sms > 1)
    yield from (
        victim(kind, rank, block, world, sms) for kind in kinds for rank in ranks for block in range(sms) if sms > 1
    )


def _single(counts: dict[str, int], rng: random.Random) -> Iterator[int]:
    """Single late operations: all of a small launch, a sample of a large one; stores and signals before loads."""
    queues = []
    for kind in ("land", "signal", "load", "read"):
        number = min(counts.get(kind, 0), FAMILY)
        queues.append(iter(rng.sample(range(number), min(number, 4096))))
    shares = (0, 1, 0, 1, 0, 1, 2, 3)
    left = set(range(len(queues)))
    while left:
        for q in shares:
            number_ = next(queues[q], None)
            if number_ is None:
                left.discard(q)
            else:
                yield late(("land", "signal", "load", "read")[q], number_)
