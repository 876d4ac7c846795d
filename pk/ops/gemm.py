"""The four halves of a GEMM, expanded in place by the operators' kernels: pipelines, loader, consumer, storer.

The schedule is the Hopper default: two consumer warpgroups share a 128-row tile, 128-byte rows of K, as many stages
as fit, and an epilogue in column pieces (little shared memory, early stores).
"""

import pk


@pk.function
def gemm_pipes(a, b, c, BM, BN, BK, P, STAGES):
    """Pipelines of A and B tiles and of output pieces."""
    assert BN % P == 0, "P must divide BN"
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(2, c=pk.shared((BM, P), c.dtype))
    return inputs, output


@pk.function
def feed(inputs, a, row, b, n, BK, lead=()):
    """Loader's half: the tiles of A at ``row`` and of B at column tile ``n``, along K; ``lead``: B's outer entries."""
    for k in pk.range(pk.cdiv(a.cols, BK)):
        with inputs.fill() as s:
            pk.load_async(s.a, a, (*row, k))
            pk.load_async(s.b, b, (*lead, k, n))


@pk.function
def accumulate(inputs, a, BM, BN, BK):
    """Consumer's half: the float32 sum over K."""
    acc = pk.zeros((BM, BN), pk.float32)
    for k in pk.range(pk.cdiv(a.cols, BK)):
        with inputs.drain() as s:
            pk.mma(acc, s.a, s.b)
    return acc


@pk.function
def emit(output, acc, BN, P):
    """Consumer's epilogue, in pieces of P columns."""
    for j in pk.static_range(BN // P):
        with output.fill() as s:
            pk.store(s.c, acc[:, j * P : (j + 1) * P])


@pk.function
def put(output, dst, row, n, BN, P):
    """Storer's half: write the pieces of column tile ``n``."""
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            pk.store_async(dst, s.c, (*row, n * (BN // P) + j))


@pk.function
def put_add(output, dst, row, n, BN, P):
    """Storer's half: add the pieces of column tile ``n`` to what is there."""
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
