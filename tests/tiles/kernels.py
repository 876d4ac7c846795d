"""Kernels on register tiles that several tests share."""

from __future__ import annotations

import pk


@pk.kernel
def softmax(x: pk.Global, y: pk.Global, BR: pk.constexpr = 16, C: pk.constexpr = 256):
    """Along rows of at most C columns: columns outside ``x`` are masked."""
    for i in pk.tasks(pk.cdiv(x.rows, BR)):
        tile = pk.load(x, (i, 0), (BR, C))
        if x.cols < C:
            tile = pk.where(pk.iota((1, C)) < x.cols, tile, -pk.inf)
        e = pk.exp2((tile - pk.max(tile, axis=1)) * 1.4426950408889634)
        pk.store(y, e / pk.sum(e, axis=1), (i, 0))


@pk.kernel
def moved(x: pk.Global, y: pk.Global, R: pk.constexpr = 8, C: pk.constexpr = 128):
    """y = x."""
    for i, j in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.store(y, pk.load(x, (i, j), (R, C)), (i, j))


@pk.kernel
def layernorm(x: pk.Global, weight: pk.Global, bias: pk.Global, y: pk.Global, eps: float,
              BR: pk.constexpr = 4, C: pk.constexpr = 1024):  # fmt: skip
    """Along rows of at most C columns; weight and bias have one dimension."""
    for i in pk.tasks(pk.cdiv(x.rows, BR)):
        tile, inside = pk.load(x, (i, 0), (BR, C)), pk.iota((1, C)) < x.cols
        tile = tile - pk.sum(tile, axis=1) / x.cols
        centred = pk.where(inside, tile, 0)
        scale = pk.rsqrt(pk.sum(centred * centred, axis=1) / x.cols + eps)
        pk.store(y, pk.fma(centred * scale, pk.load(weight, 0, (1, C)), pk.load(bias, 0, (1, C))), (i, 0))


@pk.kernel
def moe_weighted_sum(back: pk.Global, weight: pk.Global, out: pk.Global,
                     R: pk.constexpr = 8, BH: pk.constexpr = 1024):  # fmt: skip
    """back (K, T, H) view, weight (T, K), out (T, H)."""
    for t, j in pk.tasks(pk.cdiv(out.rows, R), pk.cdiv(out.cols, BH)):
        acc = pk.zeros((R, BH), pk.float32)
        for k in pk.range(back.depth):
            acc = acc + pk.load(weight, (t, k), (R, 1)) * pk.load(back, (k, t, j), (R, BH))
        pk.store(out, acc, (t, j))


@pk.kernel
def reductions(x: pk.Global, rows: pk.Global, cols: pk.Global, R: pk.constexpr, C: pk.constexpr):
    """x (R, C): sum, greatest and least of every row (R, 3) and column (3, C)."""
    for _ in pk.tasks(1):
        tile = pk.load(x, (0, 0), (R, C))
        pk.store(rows, pk.sum(tile, axis=1), (0, 0))
        pk.store(rows, pk.max(tile, axis=1), (0, 1))
        pk.store(rows, pk.min(tile, axis=1), (0, 2))
        pk.store(cols, pk.sum(tile, axis=0), (0, 0))
        pk.store(cols, pk.max(tile, axis=0), (1, 0))
        pk.store(cols, pk.min(tile, axis=0), (2, 0))


@pk.kernel
def prefix_sum(x: pk.Global, y: pk.Global, E: pk.constexpr = 256):
    """y (E, 1) = sums of x (1, E) before each element, int32: a reduction that needs no E x E tile."""
    for _ in pk.tasks(1):
        i, j = pk.iota((E, 1)), pk.iota((1, E))
        pk.store(y, pk.sum(pk.where(j < i, pk.load(x, (0, 0), (1, E)), 0), axis=1), (0, 0))


@pk.kernel
def fragment_softmax(a: pk.Global, b: pk.Global, y: pk.Global, rows: pk.Global, cols: pk.Global,
                     G: pk.constexpr = 2, N: pk.constexpr = 64):  # fmt: skip
    """y = softmax of rows of a @ b (64 G rows, N columns), and the sums of a @ b along both axes, from an mma."""
    inputs = pk.pipeline(2, a=pk.shared((64 * G, 64), a.dtype), b=pk.shared((64, N), b.dtype))
    for m in pk.tasks(pk.cdiv(a.rows, 64 * G)):
        with pk.loader():
            with inputs.fill() as s:
                pk.load_async(s.a, a, (m, 0))
                pk.load_async(s.b, b, (0, 0))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((64 * G, N), pk.float32)
            with inputs.drain() as s:
                pk.mma(acc, s.a, s.b)
            row, col = m * 64 * G + pk.iota((64 * G, 1)), pk.iota((1, N))
            acc = pk.where((row < a.rows) & (col < b.cols), acc, 0)
            pk.store(rows, pk.sum(acc, axis=1), (m, 0))
            pk.store(cols, pk.sum(acc, axis=0), (m, 0))
            e = pk.exp(pk.where(col < b.cols, acc, -pk.inf) - pk.max(acc, axis=1))
            pk.store(y, e / pk.sum(e, axis=1), (m, 0))


@pk.kernel
def scalars(x: pk.Global, table: pk.Global, y: pk.Parallel, n: int):
    """Scalar loads in shared code and in roles, stores by three kinds of role, a task count from memory."""
    ring = pk.pipeline(2, x=pk.shared((16, 64), x.dtype))
    done = pk.signals()
    me = pk.rank()
    count = pk.load(table, 0)
    for m in pk.tasks(count):
        at = pk.load(table, 1 + m)
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (pk.load(table, 1 + m), 0))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                tile = pk.load(s.x)
            pk.store(y[(me + 1) % pk.world_size()], tile * 2, (at, 0), rows=n)
            pk.store(y[me], pk.load(x, pk.at(at, 3)) + pk.exp2(1.0), (at * 16 + 15, 0))
            pk.signal_all(done, ())
        with pk.storer():
            pk.wait(done, (), pk.world_size() * (m + 1))
            pk.store(y, pk.load(y[me], (0, 0)), (at * 16 + 15, 1 + me))
