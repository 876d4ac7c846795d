"""The parts of flash attention, expanded in place by the kernels of the examples: pipelines, loader, online softmax.

Rows of scores are kept in base 2: ``scale`` is 1 / sqrt(head size) times log2(e).
"""

import pk


@pk.function
def attention_pipes(q, k, v, o, BQ, KV, D, QSTAGES=1):
    """Pipelines of query tiles, key tiles, value tiles and output tiles."""
    qs = pk.pipeline(QSTAGES, q=pk.shared((BQ, D), q.dtype))
    ks = pk.pipeline(2, k=pk.shared((KV, D), k.dtype))
    vs = pk.pipeline(2, v=pk.shared((KV, D), v.dtype))  # of its own: scores begin before the values have landed
    output = pk.pipeline(1, o=pk.shared((BQ, D), o.dtype))
    return qs, ks, vs, output


@pk.function
def fresh(BQ, D):
    """Softmax state before the first key: running maximum, sum, output."""
    m = pk.full((BQ, 1), -1e30, pk.float32)  # finite, so that a masked row never makes NaN
    z = pk.zeros((BQ, 1), pk.float32)
    acc = pk.zeros((BQ, D), pk.float32)
    return m, z, acc


@pk.function
def feed_kv(ks, vs, k, v, lead, n):
    """Loader's half: the first ``n`` key and value tiles of the head at ``lead``."""
    for j in pk.range(n):
        with ks.fill() as s:
            pk.load_async(s.k, k, (*lead, j, 0))
        with vs.fill() as s:
            pk.load_async(s.v, v, (*lead, j, 0))


@pk.function
def attend(q, ks, vs, m, z, acc, q_pos, k_pos, k_end, scale, KV):
    """One step of online softmax: the query tile ``q`` against the next key and value tiles.

    ``q_pos`` is the last key that the tile's first row sees, ``k_pos`` the tile's first key, ``k_end`` the number of
    keys.  Returns the new state.
    """
    with ks.drain() as t:
        s = pk.zeros((q.rows, KV), pk.float32)
        pk.mma(s, q, t.k.T)
    if k_pos + KV > pk.min(q_pos + 1, k_end):  # only tiles on an edge pay for the mask
        col = k_pos + pk.iota((1, KV))
        s = pk.where((col < k_end) & (col <= q_pos + pk.iota((q.rows, 1))), s, -pk.inf)
    top = pk.max(m, pk.max(s, axis=1))
    p = pk.exp2(s * scale - top * scale)  # one multiply-add and one exponential each
    fade = pk.exp2((m - top) * scale)
    z = z * fade + pk.sum(p, axis=1)  # before the mma: p then shrinks to half its registers
    with vs.drain() as t:
        acc = acc * fade
        pk.mma(acc, pk.cast(p, t.v.dtype), t.v)
    return top, z, acc
