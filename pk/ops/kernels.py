"""The operators' kernels, in the tile language.  ``examples/`` shows them in plain form."""

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put, put_add


@pk.kernel
def matmul(
    a: pk.Global,  # (M, K)
    b: pk.Global,  # (K, N)
    c: pk.Global,  # (M, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4, PINGPONG: pk.constexpr = False, CLUSTER: pk.constexpr = 1,
):  # fmt: skip
    """One rank's GEMM: c = a @ b.

    PINGPONG: each of two warpgroups has a whole tile, and one multiplies while the other stores.  CLUSTER=2: blocks
    with neighbouring rows share the tiles of B.
    """
    inputs, output = gemm_pipes(a, b, c, BM, BN, BK, P, STAGES)
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN), group=8 * CLUSTER, cluster=CLUSTER):
        with pk.loader():
            feed(inputs, a, (m,), b, n, BK)
        with pk.consumer(warpgroups=2, pingpong=PINGPONG):
            emit(output, accumulate(inputs, a, BM, BN, BK), BN, P)
        with pk.storer():
            put(output, c, (m,), n, BN, P)


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


@pk.kernel
def matmul_reduce_scatter_ordered(
    a: pk.Global,  # (world, M / world, K)
    b: pk.Global,  # (K, N)
    c: pk.Global,  # (M / world, N)  ordinary memory
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4,
):  # fmt: skip
    """c = sum over ranks of a[me] @ b, added in float32 in a fixed order: the same bits on every run.

    Partials go to the owner's scratch; the owner computes its own tile last, when they are there, and adds them to its
    accumulator.
    """
    assert BN % P == 0, "P must divide BN"
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output, parts = pk.pipeline(1, c=pk.shared((BM, P), c.dtype)), pk.pipeline(1, c=pk.shared((BM, P), c.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    part = pk.scratch((W, c.rows, c.cols), c.dtype)  # [source rank, row, col]
    arrived = pk.signals(rows, cols)
    for owner, m, n in pk.tasks(pk.ranks_from(me + 1), rows, cols):  # own tiles last
        with pk.loader():
            feed(inputs, a, (owner, m), b, n, BK)
            if owner == me:
                pk.wait(arrived, (m, n), W - 1)
                for j in pk.static_range(BN // P):
                    for r in pk.ranks_from(me + 1, W - 1):
                        with parts.fill() as s:
                            pk.load_async(s.c, part[me], (r, m, n * (BN // P) + j))
        with pk.consumer(warpgroups=2):
            acc = accumulate(inputs, a, BM, BN, BK)
            for j in pk.static_range(BN // P):
                piece = acc[:, j * P : (j + 1) * P]
                if owner == me:
                    for r in pk.ranks_from(me + 1, W - 1):
                        with parts.drain() as s:
                            piece = piece + pk.load(s.c)
                with output.fill() as s:
                    pk.store(s.c, piece)
        with pk.storer():
            if owner == me:
                put(output, c, (m,), n, BN, P)
            else:
                put(output, part[owner], (me, m), n, BN, P)
                pk.signal(arrived, (m, n), owner)
