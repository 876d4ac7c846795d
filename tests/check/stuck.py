"""Kernels that come to a stop, each in its own way, and small ones that do not."""

from __future__ import annotations

import pk


@pk.kernel
def nobody(x: pk.Global):
    never = pk.signals(4)
    for i in pk.tasks(1):
        pk.wait(never, 2, 1)


@pk.kernel
def elsewhere(x: pk.Global):
    """The right rank, the wrong counter."""
    ready = pk.signals(pk.world_size() + 1)
    for i in pk.tasks(1):
        pk.signal(ready, pk.rank() + 1, (pk.rank() + 1) % pk.world_size())
        pk.wait(ready, (pk.rank() + pk.world_size() - 1) % pk.world_size(), 1)


@pk.kernel
def too_few(x: pk.Global):
    """Every rank signals once, and everyone waits for one more than there are."""
    ready = pk.signals(1)
    for i in pk.tasks(1):
        pk.signal_all(ready, 0)
        pk.wait(ready, 0, pk.world_size() + 1)


@pk.kernel
def ring(x: pk.Global):
    """Everyone waits for the rank before before it signals the next."""
    turn = pk.signals(1)
    for i in pk.tasks(1):
        pk.wait(turn, 0, 1)
        pk.signal(turn, 0, (pk.rank() + 1) % pk.world_size())


@pk.kernel
def itself(x: pk.Global):
    mine = pk.signals(1)
    for i in pk.tasks(1):
        pk.wait(mine, 0, 1)
        pk.signal(mine, 0, pk.rank())


@pk.kernel
def behind(x: pk.Global):
    """Rank 0 waits for rank 1, which waits for a counter that nobody signals."""
    first, never = pk.signals(1), pk.signals(1)
    for i in pk.tasks(1):
        if pk.rank() == 0:
            pk.wait(first, 0, 1)
        else:
            pk.wait(never, 0, 1)
            pk.signal(first, 0, 0)


@pk.kernel
def never_reached(x: pk.Global):
    """The signal stands in a branch that no rank takes."""
    ready = pk.signals(1)
    for i in pk.tasks(1):
        if pk.rank() == pk.world_size():
            pk.signal(ready, 0, 0)
        pk.wait(ready, 0, 1)


@pk.kernel
def between_roles(x: pk.Global, y: pk.Global):
    """The storer signals what the loader waits for, after draining what the loader has not filled."""
    pipe = pk.pipeline(1, t=pk.shared((8, 16), x.dtype))
    ready = pk.signals(1)
    for i in pk.tasks(1):
        with pk.loader():
            pk.wait(ready, 0, 1)
            with pipe.fill() as s:
                pk.load_async(s.t, x, (0, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (0, 0))
            pk.signal(ready, 0, pk.rank())


@pk.kernel
def grid_barrier(x: pk.Global):
    """All blocks of a rank meet: right if all of them fit."""
    met = pk.signals(1)
    for i in pk.tasks(4):
        pk.signal(met, 0, pk.rank())
        pk.wait(met, 0, 4)


@pk.kernel
def one_after_the_other(x: pk.Global):
    """Task i waits for task i - 1."""
    done = pk.signals(4)
    for i in pk.tasks(4):
        if i > 0:
            pk.wait(done, i - 1, 1)
        pk.signal(done, i, pk.rank())


@pk.kernel
def small_counters(x: pk.Global):
    """One counter fewer than there are ranks."""
    ready = pk.signals(pk.world_size() - 1)
    for i in pk.tasks(1):
        pk.signal_all(ready, pk.rank())


@pk.kernel
def next_rank(x: pk.Global):
    """The last rank has no next one."""
    ready = pk.signals(1)
    for i in pk.tasks(1):
        pk.signal(ready, 0, pk.rank() + 1)


@pk.kernel
def unheard(x: pk.Global):
    """Nobody waits for ``done``."""
    ready, done = pk.signals(1), pk.signals(1)
    for i in pk.tasks(1):
        pk.signal_all(ready, 0)
        pk.wait(ready, 0, pk.world_size())
        pk.signal_all(done, 0)


@pk.kernel
def polls(x: pk.Global):
    """Waits for a counter that is signalled after a loop on a value in memory, which never changes."""
    ready = pk.signals(1)
    for i in pk.tasks(1):
        pk.wait(ready, 0, 1)
        while pk.load(x, (0, 0)) == 0.0:
            pk.wait(ready, 0, 1)
        pk.signal(ready, 0, pk.rank())


@pk.kernel
def surplus(x: pk.Global):
    """Rank r signals counter r of every rank, and rank 0 once more."""
    ready = pk.signals(pk.world_size())
    for i in pk.tasks(1):
        pk.signal_all(ready, pk.rank())
        if pk.rank() == 0:
            pk.signal_all(ready, 0)
        for r in pk.range(pk.world_size()):
            pk.wait(ready, r, 1)


@pk.kernel
def credits(x: pk.Global):
    """Four messages to the next rank, two of which may be under way; the last two credits are never needed."""
    data, credit = pk.signals(1), pk.signals(2)
    W = pk.world_size()
    for i in pk.tasks(1):
        for k in pk.range(4):
            if k > 1:
                pk.wait(credit, k % 2, k // 2)
            pk.signal(data, 0, (pk.rank() + 1) % W)
            pk.wait(data, 0, k + 1)
            pk.signal(credit, k % 2, (pk.rank() + W - 1) % W)
