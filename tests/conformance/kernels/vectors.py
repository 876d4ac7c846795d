"""Kernels on index vectors: rows gathered and scattered, elements, counters, from every role that may."""
# mypy: ignore-errors

import pk


@pk.kernel
def rows(
    x: pk.Global,  # (n, C)
    of: pk.Global,  # (n,)  row i of what is sent: x[of[i]]
    to: pk.Global,  # (n,)  goes to rank to[i] % world, row to[i] // world
    out: pk.Parallel,  # (n, C)
    R: pk.constexpr = 32, C: pk.constexpr = 64,
):  # fmt: skip
    """All-to-all of single rows; ``of`` out of range: zeros."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for t, j in pk.tasks(pk.cdiv(of.shape[0], R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.gather_async(s.x, x, pk.load(of, t, (R,), other=-1), j)
        with pk.storer():
            at = pk.load(to, t, (R,), other=-1)
            with ring.drain() as s:
                pk.scatter_async(out, s.x, pk.where(at < 0, -1, at // pk.world_size()), j, rank=at % pk.world_size())


@pk.kernel
def pull(
    x: pk.Parallel, of: pk.Global, out: pk.Global,  # (n, C) (n,) (n, C)
    R: pk.constexpr = 32, C: pk.constexpr = 64,
):  # fmt: skip
    """out[i] = row of[i] // world of rank of[i] % world."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for t, j in pk.tasks(pk.cdiv(of.shape[0], R), pk.cdiv(x.cols, C)):
        with pk.loader():
            at = pk.load(of, t, (R,), other=-1)
            with ring.fill() as s:
                pk.gather_async(s.x, x, pk.where(at < 0, -1, at // pk.world_size()), j, rank=at % pk.world_size())
        with pk.storer():
            i = t * R + pk.iota((R,))
            with ring.drain() as s:
                pk.scatter_async(out, s.x, i, j)


@pk.function
def send(at, out, arrived, done, n, R: pk.constexpr):
    """Element i of rank me goes to where at[i] says, as me * n + i + 1000 * (number of the vector)."""
    me, W = pk.rank(), pk.world_size()
    for t in pk.range(pk.cdiv(n, R)):
        to = pk.load(at, t, (R,), other=-1)
        place = pk.where(to < 0, -1, to // W)
        ticket = pk.fetch_add(done, (), 2)
        pk.store(out, me * n + t * R + pk.iota((R,)) + 500 * ticket, place, rank=to % W)
        pk.signal(arrived, place, to % W, 3)


@pk.function
def receive(out, arrived, seen, n, R: pk.constexpr):
    """seen = 2 out, when every element has come."""
    for t in pk.range(pk.cdiv(n, R)):
        i = t * R + pk.iota((R,))
        i = pk.where(i < n, i, -1)
        pk.wait(arrived, i, 3)
        pk.store(seen, pk.load(out[pk.rank()], i) * 2, i)


@pk.kernel
def elements(
    at: pk.Global, out: pk.Parallel, seen: pk.Global,  # (n,) (n,) (n,)
    R: pk.constexpr = 32, ROLE: pk.constexpr = "storer",
):  # fmt: skip
    """One task; all of it in ``ROLE``."""
    n, arrived, done = at.shape[0], pk.signals(at.shape[0]), pk.signals()
    for _ in pk.tasks(1):
        if ROLE == "storer":
            with pk.storer():
                send(at, out, arrived, done, n, R)
                receive(out, arrived, seen, n, R)
        elif ROLE == "consumer":
            with pk.consumer(warpgroups=2):
                send(at, out, arrived, done, n, R)
                receive(out, arrived, seen, n, R)
        else:
            send(at, out, arrived, done, n, R)
            receive(out, arrived, seen, n, R)


@pk.kernel
def listen(
    x: pk.Global, at: pk.Global, out: pk.Global,  # (n, C) (n,) (n, C)
    R: pk.constexpr = 32, C: pk.constexpr = 64, WHERE: pk.constexpr = "loader",
):  # fmt: skip
    """out[i] = x[at[i] + i % 2], the indices through scratch of the left neighbour, waited for in ``WHERE``."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, n = pk.rank(), pk.world_size(), at.shape[0]
    told, arrived, turns = pk.scratch((n,), pk.int32), pk.signals(n), pk.signals(4)
    for t in pk.tasks(pk.cdiv(n, R)):
        i = t * R + pk.iota((R,))
        i = pk.where(i < n, i, -1)
        with pk.storer():
            pk.store(told, pk.load(at, t, (R,)), i, rank=(me + 1) % W)
            pk.signal(arrived, i, (me + 1) % W)
    for t in pk.tasks(pk.cdiv(n, R)):
        i = t * R + pk.iota((R,))
        i = pk.where(i < n, i, -1)
        if WHERE == "shared":
            pk.wait(arrived, i, pk.full((R,), 1, pk.int32))
            found = pk.load(told[me], i)  # what was waited for, and no other element
        with pk.loader():
            if WHERE == "loader":
                pk.wait(arrived, i, 1)
                first = pk.fetch_add(turns, t % 4, 0)
                row = pk.load(told[me], i) + first
            else:
                row = found * 1
            with ring.fill() as s:
                pk.gather_async(s.x, x, pk.where(i < 0, -1, row + i % 2))
        with pk.storer():
            with ring.drain() as s:
                pk.scatter_async(out, s.x, i)
