"""The kernels of the tensor-parallel operators.  ``examples/`` shows them in plain form.

A row block of the operand or of the result belongs to a rank.  What crosses between ranks is rounded to the result's
dtype once for each rank's partial sum; sums are made in float32 and in one order, so results have the same bits on
every run.  Scales and bias are float32 vectors that may be missing.
"""

import pk
from pk.ops.product import accumulate_part, activated, feed_vectors, product_pipes


@pk.function
def pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T):
    """Pipelines of A and B tiles, of output pieces, and of the epilogue's vectors: None without."""
    return product_pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, False, B_T, False)


@pk.function
def feed_rows(inputs, a, row, b, n, K, BK, B_T):
    """Loader's half: the tiles of A at ``row`` and of B at column tile ``n``, along K."""
    for k in pk.range(pk.cdiv(K, BK)):
        with inputs.fill() as s:
            pk.load_async(s.a, a, (*row, k))
            pk.load_async(s.b, b, (n, k) if B_T else (k, n))


@pk.function
def feed_parts(parts, part, m, n, BN, P):
    """Loader's half of a sum: the other ranks' partial sums of a tile, piece by piece, in the order of the ranks."""
    for j in pk.static_range(BN // P):
        for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
            with parts.fill() as s:
                pk.load_async(s.c, part, (r, m, n * (BN // P) + j))


@pk.function
def epilogue(output, acc, parts, factor, scale, bias, last, BN, P, ACTIVATION):
    """Consumer's epilogue in pieces of P columns: scales, then, if this rank is the ``last`` to touch the tile, the
    others' partial sums, bias and activation.  ``scale``, ``bias``: shared tiles (1, BN) or None.
    """
    for j in pk.static_range(BN // P):
        start, stop = j * P, (j + 1) * P
        r = acc[:, start:stop]
        if factor is not None:
            r = r * factor
        if scale is not None:
            r = r * pk.load(scale)[:, start:stop]
        if last:
            if parts is not None:
                for _ in pk.range(pk.world_size() - 1):
                    with parts.drain() as s:
                        r = r + pk.load(s.c)
            if bias is not None:
                r = r + pk.load(bias)[:, start:stop]
            r = activated(r, ACTIVATION)
        with output.fill() as s:
            pk.store(s.c, r)


@pk.function
def finish_rows(output, acc, parts, vectors, factor, scale, bias, last, BN, P, ACTIVATION):
    """The epilogue, with the vectors of this column tile in shared memory if there are any."""
    if vectors is None:
        epilogue(output, acc, parts, factor, None, None, last, BN, P, ACTIVATION)
    else:
        with vectors.drain() as v:
            cols, added = None if scale is None else v.scale, None if bias is None else v.bias
            epilogue(output, acc, parts, factor, cols, added, last, BN, P, ACTIVATION)


@pk.function
def place(t, rows, cols, G):
    """Row and column of tile number ``t``: groups of G rows, column by column in a group, so that L2 serves both."""
    group = t // (G * cols)
    height, i = pk.min(G, rows - group * G), t - group * (G * cols)
    return group * G + i % height, i // height


@pk.function
def put_rows(output, dst, row, n, BN, P):
    """Storer's half: write the pieces of column tile ``n`` at ``row``."""
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            pk.store_async(dst, s.c, (*row, n * (BN // P) + j))


@pk.function
def summed_tile(
    inputs, output, vectors, parts, a, row, b, c, m, n, owner, part, arrived, row_scale, scale, bias,
    BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION,
):  # fmt: skip
    """All roles' halves of one tile of a sum over ranks: A at ``row``, C at row tile ``m``.  Its owner adds the partial
    sums that the others sent to its ``part`` and writes ``c``; the others send theirs.
    """
    me, W = pk.rank(), pk.world_size()
    last = owner == me
    with pk.loader():
        feed_rows(inputs, a, row, b, n, a.cols, BK, B_T)
        feed_vectors(vectors, scale, bias, n)
        if last:
            pk.wait(arrived, (m, n), W - 1)
            feed_parts(parts, part[me], m, n, BN, P)
    with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
        factor = None if row_scale is None else pk.load(row_scale, (*row, 0), (BM, 1))
        acc = accumulate_part(inputs, 0, pk.cdiv(a.cols, BK), BM, BN, False, B_T)
        finish_rows(output, acc, parts, vectors, factor, scale, bias, last, BN, P, ACTIVATION)
    with pk.storer():
        if last:
            put_rows(output, c, (m,), n, BN, P)
        else:
            put_rows(output, part[owner], (me, m), n, BN, P)
            pk.signal(arrived, (m, n), owner)


@pk.kernel
def all_gather_matmul(
    x: pk.Global,  # (M / world, K)  this rank's rows
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (world, M / world, N)
    whole: pk.Parallel = None,  # (world, M / world, K)  if the caller wants all the rows
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (W, M/W, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
    COMM: pk.constexpr = 8, BC: pk.constexpr = 128, PARTS: pk.constexpr = 4,
):  # fmt: skip
    """c[r] = activation(x of rank r @ b * scales + bias).

    SMs of the communicator push own rows to the peers in the order in which these need them, a row block in PARTS along
    K, each with one signal: a signal waits for its stores, so one for every message would halve the rate.  Compute
    starts with its own rows, read where they are, then takes row block 0 of every peer, and so on: all links bring
    data at once (ParallelKittens, arXiv 2511.13940, section 4).
    """
    inputs, output, vectors = pipes(x, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    ring = pk.pipeline(3, x=pk.shared((BM, BC), x.dtype))
    me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    full = pk.scratch((W, x.rows, x.cols), x.dtype) if whole is None else whole
    ready = pk.signals(W, rows)  # parts of row block m of rank w that landed here
    with pk.communicator(sms=COMM):
        for m, part in pk.tasks(rows, PARTS, group=1):
            first, stop = part * chunks // PARTS, (part + 1) * chunks // PARTS
            with pk.loader():
                for j in pk.range(first, stop):
                    with ring.fill() as s:
                        pk.load_async(s.x, x, (m, j))
            with pk.storer():
                for j in pk.range(first, stop):
                    with ring.drain() as s:
                        for r in pk.ranks_from(me + 1, W - 1 if whole is None else W):
                            pk.store_async(full[r], s.x, (me, m, j))
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(ready, (me, m), r)
    for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN), group=GROUP):
        own = i < rows
        m = i if own else (i - rows) // (W - 1)
        owner = me if own else (me + 1 + (i - rows) % (W - 1)) % W
        with pk.loader():
            if own:
                feed_rows(inputs, x, (m,), b, n, x.cols, BK, B_T)
            else:
                pk.wait(ready, (owner, m), PARTS)
                feed_rows(inputs, full[me], (owner, m), b, n, x.cols, BK, B_T)
            feed_vectors(vectors, scale, bias, n)
        with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
            factor = None if row_scale is None else pk.load(row_scale, (owner, m, 0), (BM, 1))
            acc = accumulate_part(inputs, 0, pk.cdiv(x.cols, BK), BM, BN, False, B_T)
            finish_rows(output, acc, None, vectors, factor, scale, bias, True, BN, P, ACTIVATION)
        with pk.storer():
            put_rows(output, c, (owner, m), n, BN, P)


@pk.kernel
def matmul_reduce_scatter_ordered(
    a: pk.Global,  # (world, M / world, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (M / world, N)  ordinary memory
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (W, M/W, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 3, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, LAG: pk.constexpr = 80, B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a[me] @ b * scales + bias).

    Partial sums go to the owner's scratch, and the owner adds them to its accumulator: nothing needs zeroing, and the
    output is ordinary memory.  A step computes one tile of every other owner, and of the own ones that of LAG steps
    ago, whose partial sums have come by then: so the links are busy all the time, not in the first steps only.
    """
    inputs, output, vectors = pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    parts = pk.pipeline(2, c=pk.shared((BM, P), c.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    lag = pk.min(LAG, rows * cols)
    part = pk.scratch((W, c.rows, c.cols), c.dtype)  # [source rank, row, col]
    arrived = pk.signals(rows, cols)
    for step, owner in pk.tasks(rows * cols + lag, pk.ranks_from(me + 1), group=1):
        t = step - lag if owner == me else step
        if t >= 0 and t < rows * cols:
            m, n = place(t, rows, cols, GROUP)
            summed_tile(
                inputs, output, vectors, parts, a, (owner, m), b, c, m, n, owner, part, arrived, row_scale, scale, bias,
                BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION,
            )  # fmt: skip


@pk.kernel
def matmul_all_reduce_ordered(
    a: pk.Global,  # (M, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Parallel,  # (M, N)  on every rank; receives the sum
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (M, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 3, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, LAG: pk.constexpr = 80, BY_COLS: pk.constexpr = False,
    B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a @ b * scales + bias), on every rank.

    Row tiles (with BY_COLS: column tiles) belong to ranks in turn.  As in the reduce-scatter, but the owner's epilogue
    stores the finished tile to every rank, so that no SM is set aside for communication.
    """
    inputs, output, vectors = pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    parts = pk.pipeline(2, c=pk.shared((BM, P), c.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    owned_rows, owned_cols = (rows, pk.cdiv(cols, W)) if BY_COLS else (pk.cdiv(rows, W), cols)
    lag = pk.min(LAG, owned_rows * owned_cols)
    part = pk.scratch((W, c.rows, c.cols), c.dtype)
    arrived = pk.signals(rows, cols)
    for step, owner in pk.tasks(owned_rows * owned_cols + lag, pk.ranks_from(me + 1), group=1):
        t = step - lag if owner == me else step
        if t >= 0 and t < owned_rows * owned_cols:
            x, y = place(t, owned_rows, owned_cols, GROUP)
            m, n = (x, y * W + owner) if BY_COLS else (x * W + owner, y)
            if m < rows and n < cols:
                summed_tile(
                    inputs, output, vectors, parts, a, (m,), b, c, m, n, owner, part, arrived, row_scale, scale, bias,
                    BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION,
                )  # fmt: skip


@pk.kernel
def all_gather_vector(
    x: pk.Global,  # (count,)  this rank's elements
    whole: pk.Parallel,  # (world, at least count)
    BLOCK: pk.constexpr = 1024,
):
    """whole[r, :count] = x of rank r, on every rank."""
    me = pk.rank()
    for r, i in pk.tasks(pk.ranks_from(me), pk.cdiv(x.cols, BLOCK)):
        pk.store(whole[r], pk.load(x, (i,), (1, BLOCK)), (me, i))


@pk.kernel
def all_gather_rows(
    x: pk.Global,  # (rows, cols)  this rank's
    whole: pk.Parallel,  # (world, rows, cols)
    BM: pk.constexpr = 128, BC: pk.constexpr = 128,
):  # fmt: skip
    """whole[r] = x of rank r, on every rank; rank r's peers receive it in the order r + 1, r + 2, ..."""
    ring = pk.pipeline(4, x=pk.shared((BM, BC), x.dtype))
    me, W = pk.rank(), pk.world_size()
    for m, j in pk.tasks(pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, j))
        with pk.storer():
            with ring.drain() as s:
                for r in pk.ranks_from(me + 1, W):
                    pk.store_async(whole[r], s.x, (me, m, j))
