"""The operators' kernels, in the tile language.  ``examples/`` shows them in plain form."""

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put, put_add
from pk.ops.parallel_kernels import matmul_reduce_scatter_ordered  # noqa: F401  the form without adds
from pk.ops.product import (
    accumulate_part,
    feed_part,
    feed_vectors,
    finish,
    product_pipes,
    put_part,
    row_vectors,
)


@pk.kernel
def matmul(
    a: pk.Global,  # (M, K), or (K, M) with A_T
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (M, N), or (N, M) with C_T
    row_scale: pk.Global = None, col_scale: pk.Global = None, scale: pk.Global = None,  # (M, 1), (1, N), (1, 1) float32
    row_bias: pk.Global = None, col_bias: pk.Global = None,  # (M, 1), (1, N)
    parts: pk.Global = None,  # (SPLIT - 1, M, N) float32: what the other parts of K add up to
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    CLUSTER: pk.constexpr = 1, BY_COLS: pk.constexpr = False, GROUP: pk.constexpr = 0, SPLIT: pk.constexpr = 1,
    A_T: pk.constexpr = False, B_T: pk.constexpr = False, C_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """One rank's GEMM: c = activation(a @ b * scales + bias).  `pk.ops.model` chooses among its configurations.

    WARPGROUPS share a tile; PINGPONG: each of two has a whole one, and one multiplies while the other stores.
    CLUSTER=2: pairs of blocks share tiles of B, with BY_COLS those of A.  GROUP: rows (columns) of tiles walked
    together, so that they meet in L2.  SPLIT: K in so many tasks, the last of which adds up the others, in order.
    """
    M, N, K = c.cols if C_T else c.rows, c.rows if C_T else c.cols, a.rows if A_T else a.cols
    rows, cols, steps = pk.cdiv(M, BM), pk.cdiv(N, BN), pk.cdiv(K, BK)
    inputs, output, vectors = product_pipes(a, b, c, col_scale, col_bias, BM, BN, BK, P, STAGES, OUTS, A_T, B_T, C_T)
    done = pk.signals(rows, cols) if SPLIT > 1 else None
    outer, inner = (cols, rows) if BY_COLS else (rows, cols)
    # Ping-pong clears while the other multiplies; beside 192 registers of accumulator NVRTC 13.0 would spill.
    some = SPLIT == 1 and not PINGPONG and BM * BN <= 128 * 128 * WARPGROUPS
    for part, x, y in pk.tasks(SPLIT, outer, inner, group=GROUP or 8 * CLUSTER, cluster=CLUSTER):
        m, n = (y, x) if BY_COLS else (x, y)
        first, stop = part * steps // SPLIT, (part + 1) * steps // SPLIT
        with pk.loader():
            feed_part(inputs, a, m, b, n, first, stop, A_T, B_T)
            if SPLIT == 1 or part == SPLIT - 1:
                feed_vectors(vectors, col_scale, col_bias, (0, n))
        with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
            factor, offset = row_vectors(row_scale, scale, row_bias, m, BM)
            acc = accumulate_part(inputs, first, stop, BM, BN, A_T, B_T, some)
            if SPLIT == 1 or part == SPLIT - 1:
                if SPLIT > 1:
                    pk.wait(done, (m, n), SPLIT - 1)
                v = vectors, col_scale, col_bias, factor, offset
                finish(output, acc, v, parts, m, n, BM, BN, P, C_T, ACTIVATION)
            else:
                pk.store(parts, acc, (part, m, n))
                pk.signal(done, (m, n), pk.rank())
        with pk.storer():
            if SPLIT == 1 or part == SPLIT - 1:
                put_part(output, c, m, n, BN, P, C_T)


@pk.kernel
def matmul_reduce_scatter(
    a: pk.Global,  # (world, M / world, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N)
    c: pk.Parallel,  # (M / world, N)  on every rank; receives the sum
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4,
):  # fmt: skip
    """c[owner] = sum over ranks of a[owner] @ b.

    Own tiles first: a plain store initialises c, so nothing needs zeroing, and ``begun`` lets the others add.  Rank r
    then visits owners r+1, r+2, ...: at any time all ranks add into different owners (ParallelKittens, arXiv
    2511.13940, has the intra-SM form; it needs a zeroed c and a barrier).
    """
    inputs, output = gemm_pipes(a, b, c, BM, BN, BK, P, STAGES)
    me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    begun = pk.signals(pk.world_size(), rows, cols)  # this tile of that owner holds its first term
    for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):
        with pk.loader():
            feed(inputs, a, (owner, m), b, n, BK)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, a, BM, BN, BK), BN, P)
        with pk.storer():
            if owner == me:
                put(output, c[me], (m,), n, BN, P)
                pk.signal_all(begun, (me, m, n))
            else:
                pk.wait(begun, (owner, m, n), 1)
                put_add(output, c[owner], (m,), n, BN, P)
