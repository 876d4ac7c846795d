"""Kernels on index vectors that many tests share."""
# mypy: ignore-errors

from __future__ import annotations

import pk


@pk.kernel
def gather_rows(
    x: pk.Global, rows: pk.Global, y: pk.Global,  # (M, N) (n,) (n, N)
    R: pk.constexpr = 32, C: pk.constexpr = 64,
):  # fmt: skip
    """y[i] = x[rows[i]], zero where there is no such row; y is left alone where rows[i] is -1."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for t, j in pk.tasks(pk.cdiv(rows.shape[0], R), pk.cdiv(x.cols, C)):
        entry = pk.load(rows, t, (R,), other=-1)
        with pk.loader():
            with ring.fill() as s:
                pk.gather_async(s.x, x, entry, j)
        with pk.storer():
            row = pk.where(entry == -1, -1, t * R + pk.iota((R,)))
            with ring.drain() as s:
                pk.scatter_async(y, s.x, row, j)


@pk.kernel
def exchange_rows(
    x: pk.Global,  # (n, N)
    to: pk.Global,  # (n,)  row i goes to rank to[i] % world, row to[i] // world
    y: pk.Parallel,  # (n, N)
    source: pk.Parallel,  # (n,)  where each row came from: rank * n + row
    seen: pk.Global,  # (n,)  source, as this rank found it
    tickets: pk.Global,  # (1,)  what fetch_add made of the number of tasks
    R: pk.constexpr = 40, C: pk.constexpr = 128,
):  # fmt: skip
    """All-to-all of single rows with a signal for each row, read back by a vector wait."""
    ring = pk.pipeline(3, x=pk.shared((R, C), x.dtype))
    me, W, chunks, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, C), to.shape[0]
    arrived, done = pk.signals(2, pk.cdiv(n, 2)), pk.signals()
    for t, j in pk.tasks(pk.cdiv(n, R), chunks):
        entry = pk.load(to, t, (R,), other=-1)
        i = t * R + pk.iota((R,))
        with pk.loader():
            with ring.fill() as s:
                pk.gather_async(s.x, x, pk.where(entry < 0, -1, i), j)
        with pk.storer():
            rank, row = entry % W, pk.where(entry < 0, -1, entry // W)
            with ring.drain() as s:
                pk.scatter_async(y, s.x, row, j, rank=rank)
            if j == 0:
                pk.store(source, me * n + i, row, rank=rank)
            pk.signal(arrived, (row % 2, row // 2), rank)
            ticket = pk.fetch_add(done, (), 1)
            if ticket == pk.cdiv(n, R) * chunks - 1:
                pk.store(tickets, ticket, 0)
    for t in pk.tasks(pk.cdiv(n, R)):
        with pk.storer():
            i = t * R + pk.iota((R,))
            i = pk.where(i < n, i, -1)
            pk.wait(arrived, (i % 2, i // 2), chunks)
            origin = pk.load(source[me], t, (R,), other=-1)
            pk.store(seen, origin, t)


@pk.kernel
def double_rows(
    x: pk.Global, rows: pk.Global, y: pk.Global,  # (M, N) (n,) (n, N)
    R: pk.constexpr = 128, C: pk.constexpr = 64,
):  # fmt: skip
    """y[i] = 2 x[rows[i]]: gathered tiles go through registers."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    output = pk.pipeline(2, y=pk.shared((R, C), y.dtype))
    for t, j in pk.tasks(pk.cdiv(rows.shape[0], R), pk.cdiv(x.cols, C)):
        entry = pk.load(rows, t, (R,), other=-1)
        with pk.loader():
            with ring.fill() as s:
                pk.gather_async(s.x, x, entry, j)
        with pk.consumer(warpgroups=2):
            with ring.drain() as s, output.fill() as o:
                v = pk.load(s.x)
                pk.store(o.y, v + v)
        with pk.storer():
            with output.drain() as o:
                pk.scatter_async(y, o.y, pk.where(entry < 0, -1, t * R + pk.iota((R,))), j)


@pk.kernel
def segments(
    x: pk.Global, first: pk.Global, count: pk.Global, y: pk.Global,  # (M, N) (S,) (S,) (S * M, N)
    BM: pk.constexpr = 16, BN: pk.constexpr = 32,
):  # fmt: skip
    """y[s * M + i] = x[first[s] + i] for i < count[s]: task loops whose extents are read from memory."""
    ring = pk.pipeline(2, x=pk.shared((BM, BN), x.dtype))
    for s in pk.range(first.shape[0]):
        n, at = pk.load(count, s), pk.load(first, s)
        assert at + n <= x.rows, "a segment leaves x"
        if n == 0:
            continue
        for m, j in pk.tasks(pk.cdiv(n, BM), pk.cdiv(x.cols, BN)):
            i = m * BM + pk.iota((BM,))
            with pk.loader():
                with ring.fill() as t:
                    pk.gather_async(t.x, x, at + i, j)
            with pk.storer():
                with ring.drain() as t:
                    pk.scatter_async(y, t.x, pk.where(i < n, s * x.rows + i, -1), j)


@pk.kernel
def last_adds(x: pk.Global, total: pk.Global):  # (S, n) (n,)
    """The block that finishes last adds what all have stored (a ticket from fetch_add), in a team."""
    part, done = pk.scratch((x.rows, x.cols), pk.int32), pk.signals()
    for s in pk.tasks(x.rows):
        pk.store(part[pk.rank()], pk.load(x, (s, 0), (1, 64)) * 2, (s, 0))
        if pk.fetch_add(done, (), 1) == x.rows - 1:
            acc = pk.zeros((1, 64), pk.int32)
            for r in pk.range(x.rows):
                acc = acc + pk.load(part[pk.rank()], (r, 0), (1, 64))
            pk.store(total, acc, 0)
