"""The kernels of the collectives.

Ordinary memory cannot be reached by peers.  So a rank pushes what a peer is to have into that peer's work space, with
a signal behind every few tiles, and the peer adds or copies them from there as they come, in the same launch.  One team
of 256 threads an SM does both, a tile at a time: while one block waits for its stores or for a peer, the others send,
so that the link is busy.  Where a block has a few tasks, it sends the next before it waits for the last:
``lag`` tasks lie between, as many as there are blocks.

What a rank sends of ``x`` is read before it writes that part of the result, which may be the same memory: its own
signal is among those that are waited for.

Tiles that are only moved keep their bits.  Sums are made in float32 in rank order, by one rank for each element.
"""

import pk


@pk.function
def spot(j, rows, cols):
    """Matrix, row and column of tile number ``j``, ``rows`` by ``cols`` to a matrix."""
    return j // (rows * cols), j // cols % rows, j % cols


@pk.function
def slot(source, owner):
    """Where ``owner`` has what ``source`` sends it: the ranks behind it in order, itself left out."""
    return (source - owner - 1) % pk.world_size()


@pk.function
def total(own, slots, at, SHAPE):
    """The sum over ranks of a tile, in rank order: this rank's term is ``own``, the others' are ``at`` in its slots."""
    me, acc = pk.rank(), pk.zeros(SHAPE, pk.float32)
    for r in pk.range(pk.world_size()):
        if r == me:
            acc = acc + own
        else:
            acc = acc + pk.load(slots[me], (slot(r, me), *at), SHAPE)
    return acc


@pk.kernel
def exchange(
    x: pk.Global,  # (world, P, R, C)  part r is for rank r
    lag: int,
    out: pk.Global = None,  # (world, P, R, C)  part r comes from rank r; ordinary memory
    whole: pk.Parallel = None,  # the same on every rank, in place of out
    BM: pk.constexpr = 1, BN: pk.constexpr = 8192, PER: pk.constexpr = 1,
):  # fmt: skip
    """out[r] = x[me] of rank r: all-to-all, and all-gather where all parts of x are one (stride 0)."""
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)
    tiles, behind = x.depth * rows * cols, 0 if out is None else lag
    tasks = pk.cdiv(tiles, PER)
    slots = None if out is None else pk.scratch((W - 1, x.depth, x.rows, x.cols), x.dtype)
    come = None if out is None else pk.signals(tasks)
    for s in pk.tasks(tasks + behind):
        if s < tasks:
            for dst in pk.ranks_from(me + 1, W if out is None else W - 1):
                for j in pk.range(s * PER, pk.min((s + 1) * PER, tiles)):
                    p, m, n = spot(j, rows, cols)
                    tile = pk.load(x, (dst, p, m, n), (BM, BN))
                    if out is None:
                        pk.store(whole[dst], tile, (me, p, m, n))
                    else:
                        pk.store(slots[dst], tile, (slot(me, dst), p, m, n))
            if out is not None:
                pk.signal_all(come, s)
        if out is not None:
            if s >= lag:
                i = s - lag
                stop = pk.min((i + 1) * PER, tiles)
                for j in pk.range(i * PER, stop):
                    p, m, n = spot(j, rows, cols)
                    pk.store(out, pk.load(x, (me, p, m, n), (BM, BN)), (me, p, m, n))
                pk.wait(come, i, W)
                for src in pk.ranks_from(me + 1, W - 1):
                    for j in pk.range(i * PER, stop):
                        p, m, n = spot(j, rows, cols)
                        pk.store(out, pk.load(slots[me], (slot(src, me), p, m, n), (BM, BN)), (src, p, m, n))


@pk.function
def send_parts(x, slots, come, i, tiles, cols, BM, BN, PER):
    """Task ``i`` of ``sum_parts``, first half: every other rank gets its part."""
    me = pk.rank()
    for dst in pk.ranks_from(me + 1, pk.world_size() - 1):
        for j in pk.range(i * PER, pk.min((i + 1) * PER, tiles)):
            m, n = j // cols, j % cols
            pk.store(slots[dst], pk.load(x, (dst, m, n), (BM, BN)), (slot(me, dst), m, n))
    pk.signal_all(come, i)


@pk.function
def add_parts(x, slots, come, out, i, tiles, cols, BM, BN, PER):
    """Second half: when all have sent theirs, the sum."""
    me = pk.rank()
    for j in pk.range(i * PER, pk.min((i + 1) * PER, tiles)):
        m, n = j // cols, j % cols
        own = pk.load(x, (me, m, n), (BM, BN))
        pk.wait(come, i, pk.world_size())  # while it loads
        pk.store(out, total(own, slots, (m, n), (BM, BN)), (m, n))


@pk.kernel
def sum_parts(
    x: pk.Global,  # (world, P, C)  part r is for rank r
    out: pk.Global,  # (P, C)
    lag: int,
    BM: pk.constexpr = 1, BN: pk.constexpr = 8192, PER: pk.constexpr = 1, COMM: pk.constexpr = 0,
):  # fmt: skip
    """out = the sum over ranks of x[me]: reduce-scatter, and all-reduce in one hop where all parts of x are one.

    With COMM so many SMs send, and the others add: blocks that do both fall into step, and the link idles while they
    add.
    """
    W, rows, cols = pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)
    tiles = rows * cols
    tasks = pk.cdiv(tiles, PER)
    slots, come = pk.scratch((W - 1, x.rows, x.cols), x.dtype), pk.signals(tasks)
    if COMM:
        with pk.communicator(sms=COMM):
            for i in pk.tasks(tasks):
                send_parts(x, slots, come, i, tiles, cols, BM, BN, PER)
        for i in pk.tasks(tasks):
            add_parts(x, slots, come, out, i, tiles, cols, BM, BN, PER)
    else:
        for s in pk.tasks(tasks + lag):
            if s < tasks:
                send_parts(x, slots, come, s, tiles, cols, BM, BN, PER)
            if s >= lag:
                add_parts(x, slots, come, out, s - lag, tiles, cols, BM, BN, PER)


@pk.function
def share_sum(x, parts, come, sums, done, out, i, BN):
    """Task ``i`` of ``sum_and_share``, this rank's tile: its sum, to every rank."""
    me, W = pk.rank(), pk.world_size()
    own = pk.load(x, (0, i * W + me), (1, BN))
    pk.wait(come, i, W)  # while it loads
    summed = total(own, parts, (i,), (1, BN))
    for r in pk.ranks_from(me + 1, W if out is None else W - 1):
        pk.store(sums[r], summed, (0, i * W + me))
    if out is not None:
        pk.signal_all(done, i)
        pk.store(out, summed, (0, i * W + me))


@pk.function
def take_sums(sums, done, out, i, BN):
    """The other ranks' tiles, when they are there."""
    me, W = pk.rank(), pk.world_size()
    pk.wait(done, i, W)
    for r in pk.ranks_from(me + 1, W - 1):
        pk.store(out, pk.load(sums[me], (0, i * W + r), (1, BN)), (0, i * W + r))


@pk.function
def send_tiles(x, parts, come, i, BN):
    """Task ``i``, to begin with: every other rank gets the term of its tile."""
    me, W = pk.rank(), pk.world_size()
    for dst in pk.ranks_from(me + 1, W - 1):
        pk.store(parts[dst], pk.load(x, (0, i * W + dst), (1, BN)), (slot(me, dst), i))
    pk.signal_all(come, i)


@pk.kernel
def sum_and_share(
    x: pk.Global,  # (1, n)
    lag: int,
    out: pk.Global = None,  # (1, n)  ordinary memory
    whole: pk.Parallel = None,  # the same on every rank, in place of out
    BN: pk.constexpr = 8192, COMM: pk.constexpr = 0,
):  # fmt: skip
    """out = the sum over ranks of x: all-reduce in two hops, tile by tile; COMM as in ``sum_parts``.

    Tile ``i * world + r`` is rank r's: it gets the others' terms, and sends the sum to them.
    """
    W = pk.world_size()
    steps = pk.cdiv(pk.cdiv(x.cols, BN), W)
    parts, come = pk.scratch((W - 1, steps * BN), x.dtype), pk.signals(steps)
    sums = whole if out is None else pk.scratch((1, x.cols), x.dtype)
    done = None if out is None else pk.signals(steps)
    first = 0 if COMM else lag
    if COMM:
        with pk.communicator(sms=COMM):
            for i in pk.tasks(steps):
                send_tiles(x, parts, come, i, BN)
    for s in pk.tasks(steps + first + (0 if out is None else lag)):
        if COMM == 0:
            if s < steps:
                send_tiles(x, parts, come, s, BN)
        if s >= first and s - first < steps:
            share_sum(x, parts, come, sums, done, out, s - first, BN)
        if out is not None:
            if s >= first + lag:
                take_sums(sums, done, out, s - first - lag, BN)
