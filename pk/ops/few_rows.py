"""The kernels of the tensor-parallel operators for a few rows, up to 256: a step of decoding.

What takes time is reading b, and a tile that has all rows reads it once.  The transpose is computed,
``c.T = b.T @ a.T``: the tensor core wants 64 rows, of which b.T has many, and takes any multiple of 8 columns, the rows
of a.  A tile has BN columns of b and BM rows of a.  SPLIT: K in so many tasks, the last of which adds up the others, in
order.
"""

import pk
from pk.ops.product import (
    accumulate_part,
    activated,
    feed_part,
    feed_vectors,
    finish,
    product_pipes,
    put_part,
    row_vectors,
)


@pk.function
def push_rows(x, full, ready, PR, PC, SECTION, WARPGROUPS):
    """Own rows to every rank's ``full``, in pieces of PR x PC, which ``ready`` counts by sections of K."""
    pieces = pk.cdiv(x.rows, PR)
    for j, m in pk.tasks(pk.cdiv(x.cols, PC), pieces, group=1):
        with pk.consumer(warpgroups=WARPGROUPS):
            piece = pk.load(x, (m, j), (PR, PC))
            pk.store(full, piece, pk.at(pk.rank() * x.rows + m * PR, j * PC), rows=x.rows - m * PR)
            pk.signal_all(ready, j * PC // SECTION)


@pk.function
def await_section(ready, x, k, first, PR, PC, SECTION, BK):
    """Before tile ``k`` of the rows is read, if it is the first of its section."""
    if k == first or k * BK % SECTION == 0:
        begin = k * BK // SECTION * SECTION
        pieces = pk.cdiv(pk.min(SECTION, x.cols - begin), PC) * pk.cdiv(x.rows, PR)
        pk.wait(ready, k * BK // SECTION, pieces * pk.world_size())


@pk.function
def feed_ahead(weights, rows, b, n, m, x, full, ready, first, stop, BK, B_T, AHEAD, PR, PC, SECTION):
    """Loader's half: AHEAD tiles of b are under way before it waits for rows."""
    lead = pk.min(AHEAD, stop - first)
    for k in pk.range(first, first + lead):
        with weights.fill() as s:
            pk.load_async(s.b, b, (n, k) if B_T else (k, n))
    for k in pk.range(first, stop - lead):
        await_section(ready, x, k, first, PR, PC, SECTION, BK)
        with rows.fill() as s:
            pk.load_async(s.a, full, (m, k))
        with weights.fill() as s:
            pk.load_async(s.b, b, (n, k + lead) if B_T else (k + lead, n))
    for k in pk.range(stop - lead, stop):
        await_section(ready, x, k, first, PR, PC, SECTION, BK)
        with rows.fill() as s:
            pk.load_async(s.a, full, (m, k))


@pk.function
def multiply_ahead(weights, rows, first, stop, BN, BM, B_T):
    """Consumer's half: the float32 sum over tiles ``first`` to ``stop`` of K."""
    acc = pk.zeros((BN, BM), pk.float32)
    for _ in pk.range(first, stop):
        with weights.drain() as w:
            with rows.drain() as s:
                pk.mma(acc, w.b if B_T else w.b.T, s.a.T)
    return acc


@pk.kernel
def few_all_gather_matmul(
    x: pk.Global,  # (M / world, K)  this rank's rows
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (M, N)
    whole: pk.Parallel = None,  # (M, K)  if the caller wants all the rows
    row_scale: pk.Global = None, col_scale: pk.Global = None, row_bias: pk.Global = None,  # (N, 1) (1, M) (N, 1)
    BN: pk.constexpr = 64, BM: pk.constexpr = 64, BK: pk.constexpr = 128, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 6, ROW_STAGES: pk.constexpr = 4, WARPGROUPS: pk.constexpr = 1, SPLIT: pk.constexpr = 1,
    B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
    PR: pk.constexpr = 8, PC: pk.constexpr = 128, SECTION: pk.constexpr = 2048,
):  # fmt: skip
    """c[r] = activation(x of rank r @ b * scales + bias); tiles that share columns of b follow one another.

    Every block first pushes a piece of the rows to all ranks; meanwhile its loader fetches b.  Scales and bias lie as
    the transpose wants them: ``row_scale`` is that of b's columns.
    """
    weights = pk.pipeline(STAGES, b=pk.shared((BN, BK) if B_T else (BK, BN), b.dtype))
    rows = pk.pipeline(ROW_STAGES, a=pk.shared((BM, BK), x.dtype))
    output = pk.pipeline(2, c=pk.shared((P, BN), c.dtype))
    vectors = None if col_scale is None else pk.pipeline(1, scale=pk.shared((1, BM), col_scale.dtype))
    me, cols, steps = pk.rank(), pk.cdiv(c.cols, BN), pk.cdiv(x.cols, BK)
    full = pk.scratch((x.rows * pk.world_size(), x.cols), x.dtype) if whole is None else whole
    parts = pk.scratch((SPLIT - 1, c.cols, c.rows), pk.float32) if SPLIT > 1 else None
    ready = pk.signals(pk.cdiv(x.cols, SECTION))
    tiles = pk.cdiv(c.rows, BM)
    done = pk.signals(cols, tiles) if SPLIT > 1 else None
    push_rows(x, full, ready, PR, PC, SECTION, WARPGROUPS)
    for part, n, m in pk.tasks(SPLIT, cols, tiles, group=1):
        first, stop = part * steps // SPLIT, (part + 1) * steps // SPLIT
        with pk.loader():
            feed_ahead(weights, rows, b, n, m, x, full[me], ready, first, stop, BK, B_T, STAGES, PR, PC, SECTION)
            if vectors is not None and (SPLIT == 1 or part == SPLIT - 1):
                with vectors.fill() as s:
                    pk.load_async(s.scale, col_scale, (0, m))
        with pk.consumer(warpgroups=WARPGROUPS):
            factor, offset = row_vectors(row_scale, None, row_bias, n, BN)
            acc = multiply_ahead(weights, rows, first, stop, BN, BM, B_T)
            if SPLIT == 1 or part == SPLIT - 1:
                if SPLIT > 1:
                    pk.wait(done, (n, m), SPLIT - 1)
                v = vectors, col_scale, None, factor, offset
                finish(output, acc, v, None if parts is None else parts[me], n, m, BN, BM, P, True, ACTIVATION)
            else:
                pk.store(parts[me], acc, (part, n, m))
                pk.signal(done, (n, m), me)
        with pk.storer():
            if SPLIT == 1 or part == SPLIT - 1:
                put_part(output, c, n, m, BM, P, True)


@pk.function
def send(output, part, c, n, m, BM, P, SCATTER, WORLD):
    """Storer's half: this rank's term of column tile ``n``, whole to every rank, or to each the rows that it owns."""
    me = pk.rank()
    for j in pk.static_range(BM // P):
        with output.drain() as s:
            if SCATTER:
                row = m * BM + j * P + pk.iota((P,))
                own = me * c.rows + row % c.rows
                pk.scatter_async(part, s.c, pk.where(row < c.rows * WORLD, own, -1), n, rank=row // c.rows % WORLD)
            else:
                for r in pk.ranks_from(me + 1):
                    pk.store_async(part[r], s.c, (me, m * (BM // P) + j, n))


@pk.kernel
def few_matmul_reduce(
    a: pk.Global,  # (M, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (M, N), with SCATTER (M / world, N)
    row_scale: pk.Global = None, col_scale: pk.Global = None, col_bias: pk.Global = None,  # (N, 1) (1, M) (1, N)
    BN: pk.constexpr = 64, BM: pk.constexpr = 64, BK: pk.constexpr = 128, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 1, SPLIT: pk.constexpr = 1,
    B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
    SCATTER: pk.constexpr = False, WORLD: pk.constexpr = 2, PR: pk.constexpr = 32,
):  # fmt: skip
    """c = activation(sum over ranks of a @ b * scales + bias), or with SCATTER this rank's rows of it.

    One hop: every rank sends its term to all who need it, rounded to c's dtype, and every rank adds up what it needs
    itself, in float32 in the order of the ranks, in pieces of PR rows.
    """
    inputs, output, vectors = product_pipes(b, a, c, col_scale, None, BN, BM, BK, P, STAGES, OUTS, not B_T, True, True)
    me, cols, steps = pk.rank(), pk.cdiv(c.cols, BN), pk.cdiv(a.cols, BK)
    parts = pk.scratch((SPLIT - 1, c.cols, a.rows), pk.float32) if SPLIT > 1 else None
    part = pk.scratch((WORLD * c.rows, c.cols) if SCATTER else (WORLD, c.rows, c.cols), c.dtype)
    tiles = pk.cdiv(a.rows, BM)
    done = pk.signals(cols, tiles) if SPLIT > 1 else None
    arrived = pk.signals(cols)
    for z, n, m in pk.tasks(SPLIT, cols, tiles, group=1):
        first, stop = z * steps // SPLIT, (z + 1) * steps // SPLIT
        with pk.loader():
            feed_part(inputs, b, n, a, m, first, stop, not B_T, True)
            if vectors is not None and (SPLIT == 1 or z == SPLIT - 1):
                feed_vectors(vectors, col_scale, None, (0, m))
        with pk.consumer(warpgroups=WARPGROUPS):
            factor, _ = row_vectors(row_scale, None, None, n, BN)
            acc = accumulate_part(inputs, first, stop, BN, BM, not B_T, True)
            if SPLIT == 1 or z == SPLIT - 1:
                if SPLIT > 1:
                    pk.wait(done, (n, m), SPLIT - 1)
                v = vectors, col_scale, None, factor, None
                finish(output, acc, v, None if parts is None else parts[me], n, m, BN, BM, P, True, "none")
            else:
                pk.store(parts[me], acc, (z, n, m))
                pk.signal(done, (n, m), me)
        with pk.storer():
            if SPLIT == 1 or z == SPLIT - 1:
                send(output, part, c, n, m, BM, P, SCATTER, WORLD)
                pk.signal_all(arrived, n)
    for n, m in pk.tasks(cols, pk.cdiv(c.rows, PR), group=1):
        with pk.consumer(warpgroups=WARPGROUPS):
            pk.wait(arrived, n, WORLD * tiles)
            add_up(part[me], c, col_bias, m, n, BN, PR, SCATTER, WORLD, ACTIVATION)


@pk.function
def add_up(part, c, col_bias, m, n, BN, PR, SCATTER, WORLD, ACTIVATION):
    """Consumer's second half: the terms of all ranks for piece ``m`` of the rows."""
    r = pk.load(part, pk.at(m * PR, n * BN) if SCATTER else (0, m, n), (PR, BN))
    for q in pk.static_range(1, WORLD):
        r = r + pk.load(part, pk.at(q * c.rows + m * PR, n * BN) if SCATTER else (q, m, n), (PR, BN))
    if col_bias is not None:
        r = r + pk.load(col_bias, (0, n), (1, BN))
    pk.store(c, activated(r, ACTIVATION), (m, n))
