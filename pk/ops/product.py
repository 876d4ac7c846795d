"""The parts of the kernel ``matmul``, expanded in place: what ``gemm`` has, with operands that may lie transposed,
parts of K, and an epilogue that scales, adds a bias and applies an activation, in float32, before it rounds.

Vectors along the rows of the tile are loaded before the main loop, which hides them; vectors along its columns come
through shared memory, because whole ones would not fit beside an accumulator of 192 registers.
"""

import pk


@pk.function
def product_pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, A_T, B_T, C_T):
    """Pipelines of A and B tiles, of output pieces, and of what the epilogue reads along columns: None without.

    A vector that is missing repeats the other.
    """
    assert BN % P == 0, "P must divide BN"
    a_shape = (BK, BM) if A_T else (BM, BK)
    b_shape = (BN, BK) if B_T else (BK, BN)
    inputs = pk.pipeline(STAGES, a=pk.shared(a_shape, a.dtype), b=pk.shared(b_shape, b.dtype))
    output = pk.pipeline(OUTS, c=pk.shared((P, BM) if C_T else (BM, P), c.dtype))
    if scale is None and bias is None:
        return inputs, output, None
    x, y = bias if scale is None else scale, scale if bias is None else bias
    vectors = pk.pipeline(1, scale=pk.shared((1, BN), x.dtype), bias=pk.shared((1, BN), y.dtype))
    return inputs, output, vectors


@pk.function
def feed_part(inputs, a, m, b, n, first, stop, A_T, B_T):
    """Loader's half: tiles ``first`` to ``stop`` along K of row tile ``m`` of A and of column tile ``n`` of B."""
    for k in pk.range(first, stop):
        with inputs.fill() as s:
            pk.load_async(s.a, a, (k, m) if A_T else (m, k))
            pk.load_async(s.b, b, (n, k) if B_T else (k, n))


@pk.function
def feed_vectors(vectors, scale, bias, at):
    """Loader's half of the epilogue's vectors, if there are any, (1, BN) at ``at``; behind the tiles, so that it holds
    none of them up.
    """
    if vectors is not None:
        with vectors.fill() as s:
            pk.load_async(s.scale, bias if scale is None else scale, at)
            pk.load_async(s.bias, scale if bias is None else bias, at)


@pk.function
def row_vectors(row_scale, scale, row_bias, m, BM):
    """What the epilogue multiplies and adds along rows: (BM, 1) or None each."""
    factor = None if row_scale is None else pk.load(row_scale, (m, 0), (BM, 1))
    if scale is not None:
        factor = pk.load(scale, (0, 0)) if factor is None else factor * pk.load(scale, (0, 0))
    offset = None if row_bias is None else pk.load(row_bias, (m, 0), (BM, 1))
    return factor, offset


@pk.function
def accumulate_part(inputs, first, stop, BM, BN, A_T, B_T, SOME=False):
    """Consumer's half: the float32 sum over tiles ``first`` to ``stop`` of K.

    SOME: there is at least one.  It then stands before the loop and overwrites the registers, which nobody clears
    while the tensor cores idle.
    """
    acc = pk.zeros((BM, BN), pk.float32)
    if SOME:
        with inputs.drain() as s:
            pk.mma(acc, s.a.T if A_T else s.a, s.b.T if B_T else s.b)
    for k in pk.range(first + 1 if SOME else first, stop):
        with inputs.drain() as s:
            pk.mma(acc, s.a.T if A_T else s.a, s.b.T if B_T else s.b)
    return acc


@pk.function
def finish(output, acc, along, parts, m, n, BM, BN, P, C_T, ACTIVATION):
    """Consumer's epilogue, in pieces of P columns; ``along``: the pipeline of vectors, which of them, row vectors."""
    vectors, col_scale, col_bias, factor, offset = along
    if vectors is None:
        pieces(output, acc, None, None, factor, offset, parts, m, n, BM, BN, P, C_T, ACTIVATION)
    else:
        with vectors.drain() as v:
            scale, bias = None if col_scale is None else v.scale, None if col_bias is None else v.bias
            pieces(output, acc, scale, bias, factor, offset, parts, m, n, BM, BN, P, C_T, ACTIVATION)


@pk.function
def pieces(output, acc, scale, bias, factor, offset, parts, m, n, BM, BN, P, C_T, ACTIVATION):
    """The epilogue itself; ``scale`` and ``bias`` are shared tiles (1, BN) or None."""
    for j in pk.static_range(BN // P):
        start, stop = j * P, (j + 1) * P
        r = acc[:, start:stop]
        if parts is not None:
            for q in pk.range(parts.shape[0]):
                r = r + pk.load(parts, (q, m, n * (BN // P) + j), (BM, P))
        if factor is not None:
            r = r * factor
        if scale is not None:
            r = r * pk.load(scale)[:, start:stop]
        if offset is not None:
            r = r + offset
        if bias is not None:
            r = r + pk.load(bias)[:, start:stop]
        r = activated(r, ACTIVATION)
        with output.fill() as s:
            pk.store(s.c.T if C_T else s.c, r)


@pk.function
def activated(r, ACTIVATION):
    """``r`` after the activation of that name."""
    if ACTIVATION == "relu":
        return pk.max(r, 0.0)
    if ACTIVATION == "silu":
        return pk.silu(r)
    if ACTIVATION == "gelu":
        return pk.gelu(r)
    if ACTIVATION == "gelu_tanh":
        return pk.gelu(r, approximate="tanh")
    assert ACTIVATION == "none", "no such activation"
    return r


@pk.function
def put_part(output, dst, m, n, BN, P, C_T):
    """Storer's half: write the pieces of the tile at ``m``, ``n``."""
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            pk.store_async(dst, s.c, (n * (BN // P) + j, m) if C_T else (m, n * (BN // P) + j))
