"""Kernels with scheduling options: each computes the same with and without them."""

from __future__ import annotations

import pk

__all__ = ["copy_halves", "doubling", "ring_gather", "two_communicators"]


@pk.kernel
def copy_halves(
    a: pk.Global,  # (M, N)
    b: pk.Global,  # (M, N)
    out: pk.Global,  # (2, M, N)  a, then b
    DYNAMIC: pk.constexpr = False,
):
    """A choice between tensors, and two turns of a task loop whose count runs on."""
    ring = pk.pipeline(3, x=pk.shared((64, 64), a.dtype))
    rows, cols = pk.cdiv(a.rows, 64), pk.cdiv(a.cols, 64)
    for part in pk.range(2):
        for m, c in pk.tasks(rows, cols, dynamic=DYNAMIC):
            src = a if part == 0 else b
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.x, src, (m, c))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_async(out, s.x, (part, m, c))


@pk.kernel
def ring_gather(
    x: pk.Global,  # (1, M, N)
    out: pk.Global,  # (world, M, N)  every rank's x, passed from hand to hand
    DYNAMIC: pk.constexpr = False,
):
    """The first hop reads the caller's tensor, the others what has arrived in scratch."""
    ring = pk.pipeline(2, x=pk.shared((64, 64), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 64), pk.cdiv(x.cols, 64)
    hop, got = pk.scratch((W, x.rows, x.cols), x.dtype), pk.signals(W, rows, cols)
    for step, m, c in pk.tasks(W, rows, cols, group=1, dynamic=DYNAMIC):
        src, here = (x, 0) if step == 0 else (hop[me], step)
        with pk.loader():
            if step > 0:
                pk.wait(got, (step, m, c), 1)
            with ring.fill() as s:
                pk.load_async(s.x, src, (here, m, c))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(out, s.x, ((me - step) % W, m, c))
                if step < W - 1:
                    pk.store_async(hop[(me + 1) % W], s.x, (step + 1, m, c))
            if step < W - 1:
                pk.signal(got, (step + 1, m, c), (me + 1) % W)


@pk.kernel
def doubling(
    x: pk.Global,  # (M, N)
    out: pk.Global,  # (copies, M, N)  x in places 0, 1, 2, 4, 8, ...; the others stay
    DYNAMIC: pk.constexpr = False,
):
    """``while`` in shared code around task loops, and in a role; batches of 1, 2, 4, ... rows of tiles."""
    ring = pk.pipeline(2, x=pk.shared((64, 64), x.dtype))
    rows, cols, copies = pk.cdiv(x.rows, 64), pk.cdiv(x.cols, 64), out.depth
    done, size = 0, 1
    while done < rows:
        for m, c in pk.tasks(pk.min(size, rows - done), cols, dynamic=DYNAMIC):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.x, x, (done + m, c))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_async(out, s.x, (0, done + m, c))
                    copy = 1
                    while copy < copies:
                        pk.store_async(out, s.x, (copy, done + m, c))
                        copy = copy * 2
        done = done + size
        size = size * 2


@pk.kernel
def two_communicators(
    x: pk.Global,  # (M, N)
    out: pk.Parallel,  # (world, M, N)  every rank's x
    twice: pk.Parallel,  # (world, M, N)  every rank's x, a second time
    mine: pk.Global,  # (M, N)  a copy of x
    COMM: pk.constexpr = 2,
    DYNAMIC: pk.constexpr = False,
):
    """Three classes of blocks: one program pushes to the peers before this rank, one to those behind, one computes."""
    first, second = pk.pipeline(2, x=pk.shared((64, 64), x.dtype)), pk.pipeline(3, x=pk.shared((64, 64), x.dtype))
    third = pk.pipeline(2, x=pk.shared((64, 64), x.dtype))
    me, rows, cols = pk.rank(), pk.cdiv(x.rows, 64), pk.cdiv(x.cols, 64)
    with pk.communicator(sms=COMM):
        for r, m, c in pk.tasks(pk.ranks_from(me), rows, cols, dynamic=DYNAMIC):
            with pk.loader():
                with first.fill() as s:
                    pk.load_async(s.x, x, (m, c))
            with pk.storer():
                with first.drain() as s:
                    pk.store_async(out[r], s.x, (me, m, c))
    with pk.communicator(sms=1):
        for m, c in pk.tasks(rows, cols):
            with pk.loader():
                with second.fill() as s:
                    pk.load_async(s.x, x, (m, c))
            with pk.storer():
                with second.drain() as s:
                    pk.store_async(twice, s.x, (me, m, c))
    for m, c in pk.tasks(rows, cols):
        with pk.loader():
            with third.fill() as s:
                pk.load_async(s.x, x, (m, c))
        with pk.storer():
            with third.drain() as s:
                pk.store_async(mine, s.x, (m, c))
