"""Kernels of the other forms of ``mma``: 8 bits, tf32, a from registers, overwriting, private shared tiles, ``t.T``."""
# mypy: ignore-errors

import pk


@pk.kernel
def multiply_nt(
    a: pk.Global, b: pk.Global, c: pk.Global,
    BM: pk.constexpr = 64, BN: pk.constexpr = 64, BK: pk.constexpr = 64, G: pk.constexpr = 1,
):  # fmt: skip
    """c (M, N) = a (M, K) @ b (N, K).T, the one form for operands of 8 and 32 bits."""
    inputs = pk.pipeline(2, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BN, BK), b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (n, k))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b.T)
            with output.fill() as t:
                pk.store(t.c, acc)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(c, t.c, (m, n))


@pk.kernel
def from_registers(
    a: pk.Global, b: pk.Global, c: pk.Global,
    BM: pk.constexpr = 64, BN: pk.constexpr = 64, BK: pk.constexpr = 64, G: pk.constexpr = 1,
):  # fmt: skip
    """c = (2 a + 1) @ b, with the left operand made in registers; every step also overwrites a second accumulator."""
    inputs = pk.pipeline(2, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, pk.cast(pk.load(s.a) * 2.0 + 1.0, a.dtype), s.b)
            with output.fill() as t:
                pk.store(t.c, acc)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(c, t.c, (m, n))


@pk.kernel
def overwrite(
    a: pk.Global, b: pk.Global, c: pk.Global, BM: pk.constexpr = 64, BN: pk.constexpr = 64, BK: pk.constexpr = 64
):
    """c = the sum over k of max(a_k @ b_k, 0): each product overwrites the one before."""
    inputs = pk.pipeline(2, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=1):
            acc, total = pk.full((BM, BN), 5.0), pk.zeros((BM, BN))
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b, accumulate=False)
                total = total + pk.max(acc, 0.0)
            with output.fill() as t:
                pk.store(t.c, total)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(c, t.c, (m, n))


@pk.kernel
def private(a: pk.Global, b: pk.Global, c: pk.Global, B: pk.constexpr = 64, G: pk.constexpr = 1):
    """c (M, B) = (a @ b + a) @ b, the inner result through a private shared tile; a (M, B), b (B, B)."""
    inputs = pk.pipeline(2, a=pk.shared((B * G, B), a.dtype), b=pk.shared((B, B), b.dtype))
    output = pk.pipeline(1, c=pk.shared((B * G, B), c.dtype))
    inner = pk.shared((B * G, B), a.dtype)
    for m in pk.tasks(pk.cdiv(a.rows, B * G)):
        with pk.loader():
            with inputs.fill() as s:
                pk.load_async(s.a, a, (m, 0))
                pk.load_async(s.b, b, (0, 0))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((B * G, B))
            with inputs.drain() as s:
                pk.mma(acc, s.a, s.b)
                pk.store(inner, acc + pk.load(s.a))
                pk.mma(acc, inner, s.b, accumulate=False)
            with output.fill() as t:
                pk.store(t.c, acc + pk.load(inner) * 0.0)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(c, t.c, (m, 0))


@pk.kernel
def transposed(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64, LOADS: pk.constexpr = False):
    """y (cols, rows) = x.T, by a transposed store into the stage, or with LOADS by a transposed load from it."""
    ring, output = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(1, y=pk.shared((C, R), y.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                r = pk.load(s.x.T if LOADS else s.x)
            with output.fill() as t:
                pk.store(t.y if LOADS else t.y.T, r)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(y, t.y, (n, m))
