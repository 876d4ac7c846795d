"""Kernels that combine and move windows of every rank, for the simulator and for the compiler."""

from __future__ import annotations

import pk


@pk.kernel
def reduce_2d(x: pk.Parallel, out: pk.Global, R: pk.constexpr, C: pk.constexpr, OP: pk.constexpr = "sum"):
    """(rows, cols) both: every rank gets the whole."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.reduce(out, (m, n), x, (m, n), shape=(R, C), op=OP)


@pk.kernel
def reduce_1d(x: pk.Parallel, out: pk.Global, B: pk.constexpr, OP: pk.constexpr = "sum"):
    """(n,) both."""
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        pk.reduce(out, i, x, i, shape=B, op=OP)


@pk.kernel
def reduce_4d(x: pk.Parallel, out: pk.Global, R: pk.constexpr, C: pk.constexpr):
    """(batch, depth, rows, cols) -> (depth, rows, cols) of batch ``rank``."""
    for d, m, n in pk.tasks(x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.reduce(out, (d, m, n), x, (pk.rank(), d, m, n), shape=(R, C))


@pk.kernel
def reduce_shifted(x: pk.Parallel, out: pk.Global, dy: int, dx: int):
    """(rows, cols) both: the sum, moved by elements; zeros come in from outside."""
    for m, n in pk.tasks(pk.cdiv(out.rows, 8), pk.cdiv(out.cols, 32)):
        pk.reduce(out, (m, n), x, pk.at(m * 8 + dy, n * 32 + dx), shape=(8, 32))


@pk.kernel
def all_reduce_2d(x: pk.Parallel, R: pk.constexpr, C: pk.constexpr, OP: pk.constexpr = "sum"):
    """(rows, cols), in place: windows are dealt to the ranks."""
    W, cols = pk.world_size(), pk.cdiv(x.cols, C)
    for i in pk.tasks(pk.cdiv(pk.cdiv(x.rows, R) * cols - pk.rank(), W)):
        w = i * W + pk.rank()
        pk.all_reduce(x, (w // cols, w % cols), shape=(R, C), op=OP)


@pk.kernel
def reduce_in_consumer(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):
    """(rows, cols) both: tiles go through every rank's scratch, and a consumer combines them.  Waits for a barrier."""
    stage = pk.pipeline(2, x=pk.shared((B, B), x.dtype))
    part, there = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(2, pk.cdiv(x.rows, B), pk.cdiv(x.cols, B))
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            with stage.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with stage.drain() as s:
                pk.store_async(part[pk.rank()], s.x, (m, n))
            pk.signal_all(there, (0, m, n))
        with pk.consumer(warpgroups=2):
            pk.wait(there, (0, m, n), pk.world_size())
            pk.reduce(out, (m, n), part, (m, n), shape=(B, B))
            pk.signal(there, (1, m, n), pk.rank())


@pk.kernel
def broadcast(x: pk.Global, out: pk.Parallel, R: pk.constexpr, C: pk.constexpr, ADD: pk.constexpr = False):
    """(rows, cols) -> (world, rows, cols), or added to (rows, cols), on every rank, with a barrier at the end."""
    stage = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    done = pk.signals()
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with stage.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with stage.drain() as s:
                if ADD:
                    pk.store_add_async(out, s.x, (m, n))
                else:
                    pk.store_async(out, s.x, (pk.rank(), m, n))
            pk.signal_all(done, ())
    with pk.storer():
        pk.wait(done, (), pk.world_size() * pk.cdiv(x.rows, R) * pk.cdiv(x.cols, C))


@pk.kernel
def copy(x: pk.Global, out: pk.Parallel, R: pk.constexpr, C: pk.constexpr, TO: pk.constexpr = "next"):
    """(..., rows, cols), 2 to 4 dimensions both: to the next rank: stored, or added."""
    stage = pk.pipeline(1, x=pk.shared((R, C), x.dtype))
    lead = x.shape[:-2]
    first = lead[0] if len(lead) > 0 else 1
    second = lead[1] if len(lead) > 1 else 1
    for i, j, m, n in pk.tasks(first, second, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        at = (i, j, m, n)[2 - len(lead) :] if len(lead) != 1 else (i, m, n)
        with pk.loader():
            with stage.fill() as s:
                pk.load_async(s.x, x, at)
        with pk.storer():
            with stage.drain() as s:
                if TO == "next":
                    pk.store_async(out[(pk.rank() + 1) % pk.world_size()], s.x, at)
                else:
                    pk.store_add_async(out[(pk.rank() + 1) % pk.world_size()], s.x, at)


@pk.kernel
def copy_vector(x: pk.Global, out: pk.Parallel, B: pk.constexpr, ADD: pk.constexpr = False):
    """(n,) both, to the next rank: stored, or added."""
    stage = pk.pipeline(2, x=pk.shared(B, x.dtype))
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        with pk.loader():
            with stage.fill() as s:
                pk.load_async(s.x, x, i)
        with pk.storer():
            with stage.drain() as s:
                if ADD:
                    pk.store_add_async(out[(pk.rank() + 1) % pk.world_size()], s.x, i)
                else:
                    pk.store_async(out[(pk.rank() + 1) % pk.world_size()], s.x, i)


@pk.kernel
def tiles_in_groups(seen: pk.Global, group: int, B: pk.constexpr = 32):
    """(rows, cols) float32: which tasks there were, in an order that a run-time group decides."""
    stage = pk.pipeline(2, x=pk.shared((B, B), seen.dtype))
    for m, n in pk.tasks(pk.cdiv(seen.rows, B), pk.cdiv(seen.cols, B), group=group):
        with pk.loader():
            with stage.fill() as s:
                pk.load_async(s.x, seen, (m, n))
        with pk.storer():
            with stage.drain() as s:
                pk.store_add_async(seen, s.x, (m, n))
