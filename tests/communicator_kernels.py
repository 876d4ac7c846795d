"""Kernels with a communicator warp: copies of tiles, arithmetic on them, task loops of every kind beside it."""

from __future__ import annotations

import pk


@pk.kernel
def gather(
    x: pk.Global,  # (rows, cols)
    out: pk.Global,  # (world, rows, cols)
    R: pk.constexpr = 32, C: pk.constexpr = 64, DYNAMIC: pk.constexpr = False, SIGNAL: pk.constexpr = True,
    WAIT: pk.constexpr = True, CLUSTER: pk.constexpr = 1, SMS: pk.constexpr = 0,
):  # fmt: skip
    """out[r] = x of rank r: the warps push rows into scratch, the other roles copy them out as they come.

    SIGNAL, WAIT: False is a mistake.  SMS: the pushing class, if not warps.
    """
    back = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    full = pk.scratch((W, x.rows, x.cols), x.dtype)
    ready = pk.signals(W, rows)
    if SMS:
        with pk.communicator(sms=SMS):
            for m, n in pk.tasks(rows, cols, group=1):
                push(x, full, ready, me, m, n, R, C, SIGNAL)
    else:
        with pk.communicator():
            for m, n in pk.tasks(rows, cols, group=1):
                push(x, full, ready, me, m, n, R, C, SIGNAL)
    for i, m, n in pk.tasks(pk.ranks_from(me), rows, cols, group=2, dynamic=DYNAMIC, cluster=CLUSTER):
        with pk.loader():
            if WAIT:
                pk.wait(ready, (i, m), 2 * cols)
            with back.fill() as s:
                pk.load_async(s.x, full[me], (i, m, n))
        with pk.storer():
            with back.drain() as s:
                pk.store_async(out, s.x, (i, m, n))


@pk.function
def push(x, full, ready, me, m, n, R, C, SIGNAL):
    """One window to every rank, in two halves, and a signal."""
    for half in pk.range(2):
        t = pk.load(x, pk.at(m * R + half * (R // 2), n * C), (R // 2, C))
        for r in pk.ranks_from(me + 1, pk.world_size()):
            pk.store(full[r], t, pk.at(me, m * R + half * (R // 2), n * C))
    if SIGNAL:
        pk.signal_all(ready, (me, m), 2)


@pk.kernel
def reckon(
    x: pk.Global,  # (rows, cols) float32 or narrower
    total: pk.Parallel,  # (world, rows, 1) float32: sums of every rank's rows
    tops: pk.Parallel,  # (world, 1, cols) float32: the greatest of every rank's columns
    copy: pk.Global,  # (rows, cols)
    R: pk.constexpr = 8, C: pk.constexpr = 64,
):  # fmt: skip
    """A warp that computes: reductions both ways, a barrier, several task loops, a while loop, scalars.

    Beside it a loader and a storer copy x.
    """
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, rows, cols = pk.rank(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    met = pk.signals(rows)
    with pk.communicator():
        for m in pk.tasks(rows):
            acc = pk.zeros((R, 1), pk.float32)
            n = 0
            while n < cols:
                acc = acc + pk.sum(pk.load(x, (m, n), (R, C)), axis=1)
                n = n + 1
            pk.store(total, acc, (me, m, 0))
            pk.barrier(met, m)
        for n in pk.tasks(cols):
            most = pk.full((1, C), -pk.inf, pk.float32)
            for m in pk.range(rows):
                t = pk.load(x, (m, n), (R, C), other=-pk.inf)
                most = pk.max(most, pk.max(t, axis=0))
            pk.store(tops, most, (me, 0, n))
    for m, n in pk.tasks(rows, cols):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(copy, s.x, (m, n))


@pk.kernel
def odd_copies(
    x: pk.Global, y: pk.Parallel, a: pk.Global, b: pk.Global, R: pk.constexpr = 5, C: pk.constexpr = 24,
    ROWS: pk.constexpr = 5, AT: pk.constexpr = 0,
):  # fmt: skip
    """y (world, rows, cols) = x of every rank, in tiles of odd shapes and places; beside it b = a, (16, 16)."""
    ring = pk.pipeline(1, x=pk.shared((16, 16), a.dtype))
    me = pk.rank()
    with pk.communicator():
        for m, n in pk.tasks(pk.cdiv(x.rows, ROWS), pk.cdiv(x.cols + AT, C)):
            t = pk.load(x, pk.at(m * ROWS, n * C - AT), (R, C), other=1)
            pk.store(y, t, pk.at(me, m * ROWS, n * C - AT), rows=ROWS)
    for _ in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, a, (0, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(b, s.x, (0, 0))
