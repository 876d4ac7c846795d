"""Kernels that read what nobody wrote or miss their tensors, next to ones that do neither.  All tiles are 8 x 16."""

from __future__ import annotations

import pk


@pk.kernel
def from_scratch(x: pk.Global, y: pk.Global, WRITE: pk.constexpr = False):
    """y := scratch, to which x was copied first, or not."""
    pipe, back = pk.pipeline(2, t=pk.shared((8, 16), x.dtype)), pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    part, there = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(1)
    for m in pk.tasks(1):
        with pk.loader():
            if WRITE:
                with pipe.fill() as s:
                    pk.load_async(s.t, x, (m, 0))
                pk.wait(there, 0, 1)
            with back.fill() as s:
                pk.load_async(s.t, part[pk.rank()], (m, 0))
        with pk.storer():
            if WRITE:
                with pipe.drain() as s:
                    pk.store_async(part[pk.rank()], s.t, (m, 0))
                pk.signal(there, 0, pk.rank())
            with back.drain() as s:
                pk.store_async(y, s.t, (m, 0))


@pk.kernel
def copy(x: pk.Global, y: pk.Global, DOWN: pk.constexpr = 0, UP: pk.constexpr = 0, EXTRA: pk.constexpr = 0):
    """y := x, tile by tile; loads DOWN tiles further down, stores UP tiles further up, EXTRA tasks too many."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, 8) + EXTRA, pk.cdiv(x.cols, 16)):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, (m + DOWN, n))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (m - UP, n))


@pk.kernel
def pieces(x: pk.Global, y: pk.Global):
    """Tiles of 8 x 64 in four pieces: the edge of x cuts off whole pieces."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, 8), pk.cdiv(x.cols, 64)):
        with pk.loader():
            for j in pk.static_range(4):
                with pipe.fill() as s:
                    pk.load_async(s.t, x, (m, n * 4 + j))
        with pk.storer():
            for j in pk.static_range(4):
                with pipe.drain() as s:
                    pk.store_async(y, s.t, (m, n * 4 + j))


@pk.kernel
def shares(x: pk.Global, y: pk.Global, SHARES: pk.constexpr = 4):
    """Equal shares of the rows: the last ones may be empty."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    each = pk.cdiv(pk.cdiv(x.rows, 8), SHARES)
    for s_, i in pk.tasks(SHARES, each):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, (s_ * each + i, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (s_ * each + i, 0))


@pk.kernel
def halo(x: pk.Global, y: pk.Global):
    """y := x, moved down by 3 rows: zeros come in from outside, on purpose."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m in pk.tasks(pk.cdiv(y.rows, 8)):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, pk.at(m * 8 - 11, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (m, 0))


@pk.kernel
def half_filled(x: pk.Global, y: pk.Global):
    """The stage has two tiles, of which one is filled."""
    pipe = pk.pipeline(2, a=pk.shared((8, 16), x.dtype), b=pk.shared((8, 16), x.dtype))
    for m in pk.tasks(pk.cdiv(x.rows, 8)):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.a, x, (m, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.b, (m, 0))


@pk.kernel
def private(x: pk.Global, y: pk.Global, FIRST: pk.constexpr = False):
    """A tile of the consumer, read before it is stored to."""
    pipe, out = pk.pipeline(2, t=pk.shared((64, 16), x.dtype)), pk.pipeline(2, t=pk.shared((64, 16), x.dtype))
    own = pk.shared((64, 16), x.dtype)
    for m in pk.tasks(1):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, (m, 0))
        with pk.consumer(warpgroups=1):
            with pipe.drain() as s:
                r = pk.load(s.t)
            if FIRST:
                pk.store(own, r)
            r = r + pk.load(own)
            pk.store(own, r)
            with out.fill() as s:
                pk.store(s.t, r)
        with pk.storer():
            with out.drain() as s:
                pk.store_async(y, s.t, (m, 0))


@pk.kernel
def accumulate(x: pk.Global, y: pk.Parallel):
    """y += x on every rank: y must hold something."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m in pk.tasks(pk.cdiv(x.rows, 8)):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, (m, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_add_async(y, s.t, (m, 0))


@pk.kernel
def looked_up(x: pk.Global, at: pk.Global, y: pk.Global):
    """y[i] := tile at[i] of x, which may be none: rows outside read as 0."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m in pk.tasks(pk.cdiv(y.rows, 8)):
        with pk.loader():
            j = pk.load(at, (0, m))
            with pipe.fill() as s:
                pk.load_async(s.t, x, (j, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (m, 0))


@pk.kernel
def two_halves(x: pk.Global, y: pk.Global, BOTH: pk.constexpr = False):
    """Scratch is written in halves of 8 columns, or only the left one, and read as a whole."""
    pipe, back = pk.pipeline(2, t=pk.shared((8, 8), x.dtype)), pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    part, there = pk.scratch((8, 16), x.dtype), pk.signals(1)
    for m in pk.tasks(1):
        with pk.loader():
            for j in pk.static_range(1 + BOTH):
                with pipe.fill() as s:
                    pk.load_async(s.t, x, (m, j))
            pk.wait(there, 0, 1)
            with back.fill() as s:
                pk.load_async(s.t, part[pk.rank()], (m, 0))
        with pk.storer():
            for j in pk.static_range(1 + BOTH):
                with pipe.drain() as s:
                    pk.store_async(part[pk.rank()], s.t, (m, j))
            pk.signal(there, 0, pk.rank())
            with back.drain() as s:
                pk.store_async(y, s.t, (m, 0))


@pk.kernel
def own_share(x: pk.Global, y: pk.Global):
    """Rank r copies its share of the tiles; there may be fewer tiles than ranks."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    each = pk.cdiv(pk.cdiv(x.rows, 8), pk.world_size())
    for i in pk.tasks(each):
        with pk.loader():
            with pipe.fill() as s:
                pk.load_async(s.t, x, (pk.rank() * each + i, 0))
        with pk.storer():
            with pipe.drain() as s:
                pk.store_async(y, s.t, (pk.rank() * each + i, 0))


@pk.kernel
def chosen_rows(x: pk.Global, at: pk.Global, y: pk.Global, n: int, MASK: pk.constexpr = True):
    """y[i] := x[at[i]] for i < n; eight indices are loaded at a time, those behind n are masked out, or not."""
    pipe = pk.pipeline(2, t=pk.shared((8, 16), x.dtype))
    for m in pk.tasks(pk.cdiv(n, 8)):
        with pk.loader():
            row = pk.load(at, m, (8,))
            with pipe.fill() as s:
                pk.gather_async(s.t, x, pk.where(m * 8 + pk.iota((8,)) < n, row, -1) if MASK else row, 0)
        with pk.storer():
            with pipe.drain() as s:
                pk.scatter_async(y, s.t, m * 8 + pk.iota((8,)), 0)
