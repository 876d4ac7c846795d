"""Systems of counters for the explorer: schemes that people write, right and wrong, and random ones."""

from __future__ import annotations

import random

from pk.sim.system import Guard, System, at_least, exactly


def barrier(ranks: int, uses: int, monotone: bool) -> System:
    """All ranks meet ``uses`` times on one counter a rank.

    ``monotone``: the k-th use waits for at least k * ranks.  Otherwise as ParallelKittens does it: wait for exactly
    ``ranks``, then subtract them, which a fast rank's next arrival can come between.
    """
    system = System()
    counters = [system.counter(f"arrived at {r}") for r in range(ranks)]
    for r in range(ranks):
        rank = system.actor(f"rank {r}")
        for use in range(1, uses + 1):
            rank.step("signals everyone", adds=dict.fromkeys(counters, 1))
            if monotone:
                rank.step("waits", at_least(counters[r], use * ranks))
            else:
                rank.step("waits and subtracts", exactly(counters[r], ranks), adds={counters[r]: -ranks})
    return system


def ring(ranks: int, slots: int, tiles: int) -> System:
    """Every rank sends ``tiles`` tiles to the next, of which ``slots`` fit there, and only then takes its own.

    Right if they all fit; else everyone waits for the next.
    """
    system = System()
    free = [system.counter(f"free slots at {r}", slots) for r in range(ranks)]
    full = [system.counter(f"tiles at {r}") for r in range(ranks)]
    for r in range(ranks):
        rank, after = system.actor(f"rank {r}"), (r + 1) % ranks
        for _ in range(tiles):
            rank.step("sends", at_least(free[after], 1), adds={free[after]: -1, full[after]: 1})
        for _ in range(tiles):
            rank.step("takes", at_least(full[r], 1), adds={full[r]: -1, free[r]: 1})
    return system


def credits_one_by_one(senders: int, credits: int, needed: int) -> System:
    """Senders take ``needed`` credits from one pool, one after the other, and give them back at the end."""
    system = System()
    pool = system.counter("credits", credits)
    for i in range(senders):
        sender = system.actor(f"sender {i}")
        for _ in range(needed):
            sender.step("takes a credit", at_least(pool, 1), adds={pool: -1})
        sender.step("gives them back", adds={pool: needed})
    return system


def store_then_signal(released: bool) -> System:
    """A writer stores and signals, a reader waits and reads; ``released``: the signal waits for the store to land."""
    system = System()
    ready, landed = system.counter("ready"), system.counter("landed")
    writer, reader = system.actor("writer"), system.actor("reader")
    writer.step("issues a store and a signal")
    store, signal = system.actor("store"), system.actor("signal")
    store.step("lands", writer.past(), adds={landed: 1})
    signal.step("arrives", writer.past(), *[at_least(landed, 1)][: int(released)], adds={ready: 1})
    reader.step("waits and reads", at_least(ready, 1), requires=(at_least(landed, 1),))
    for i in range(3):  # what has nothing to do with it
        idle = system.actor(f"idle {i}")
        idle.step("works")
        idle.step("works on")
    return system


def lattice(actors: int, steps: int) -> System:
    """Actors in a ring, none more than two steps ahead of the one before: many states, no failure."""
    system = System()
    done = [system.counter(f"done {i}") for i in range(actors)]
    for i in range(actors):
        actor = system.actor(f"actor {i}")
        for k in range(steps):
            actor.step("works", at_least(done[i - 1], max(0, k - 2)), adds={done[i]: 1})
    return system


def random_system(seed: int) -> System:
    """A few actors and counters with all that a system may have."""
    rng = random.Random(seed)
    system = System()
    counters = [system.counter(f"c{i}", rng.choice((0, 0, 1))) for i in range(rng.randint(1, 4))]
    actors = [system.actor(f"a{i}") for i in range(rng.randint(1, 5))]
    for actor in actors:
        for _ in range(rng.randint(0, 5)):
            guards = [_guard(rng, system, counters) for _ in range(rng.choice((0, 1, 1, 2)))]
            adds = {rng.choice(counters): rng.choice((1, 1, 1, 2, -1)) for _ in range(rng.choice((0, 1, 1, 2)))}
            required = (Guard(_guard(rng, system, counters).variable, rng.randint(0, 3)),)
            actor.step("moves", *guards, adds=adds, requires=required[: rng.random() < 0.15])
    return system


def _guard(rng: random.Random, system: System, counters: list[int]) -> Guard:
    if rng.random() < 0.2:
        return rng.choice(system.actors).past(rng.randint(0, 3))
    return Guard(rng.choice(counters), rng.randint(0, 3), exact=rng.random() < 0.1)
