"""Kernels that compute on register tiles in a consumer."""
# mypy: ignore-errors

import pk

ARITHMETIC = 20
"""Results that ``arithmetic`` stores."""


@pk.kernel
def convert(
    x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64,
    G: pk.constexpr = 1, CAST: pk.constexpr = False,
):  # fmt: skip
    """y = x in another dtype: through ``cast``, or by ``load`` and ``store`` alone."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    output = pk.pipeline(2, y=pk.shared((R, C), y.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.consumer(warpgroups=G):
            with ring.drain() as s:
                r = pk.load(s.x)
            with output.fill() as t:
                if CAST:
                    pk.store(t.y, pk.cast(r, y.dtype))
                else:
                    pk.store(t.y, r)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(y, t.y, (m, n))


@pk.kernel
def arithmetic(
    x: pk.Global, y: pk.Global, out: pk.Global, scale: float, shift: int,
    R: pk.constexpr = 64, C: pk.constexpr = 16, G: pk.constexpr = 1,
):  # fmt: skip
    """out (ARITHMETIC, rows, cols) float32: one slab for each way to combine x and y."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype), y=pk.shared((R, C), y.dtype))
    output = pk.pipeline(2, r=pk.shared((R, C), pk.float32))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
                pk.load_async(s.y, y, (m, n))
        with pk.consumer(warpgroups=G):
            with ring.drain() as s:
                a, b = pk.load(s.x), pk.load(s.y)
            half = pk.full((R, C), 0.5)
            none = pk.zeros((R, C), pk.float32)
            results = (
                a + b, a - b, a * b, a / b, pk.min(a, b), pk.max(a, b), -a, abs(a),
                a + 2.5, 1.0 - a, a * scale, 3.0 / b, pk.min(a, scale), pk.max(0.25, a),
                half * a, none - b, a + shift, (a + b) * a - b, a * b + b, a / (abs(b) + 1.0) - scale * a,
            )  # fmt: skip
            for j in pk.static_range(20):
                with output.fill() as t:
                    pk.store(t.r, results[j])
        with pk.storer():
            for j in pk.static_range(20):
                with output.drain() as t:
                    pk.store_async(out, t.r, (j, m, n))


@pk.kernel
def loop_state(x: pk.Global, out: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 32):
    """Tiles carried through a loop, swapped and conditionally replaced.  x (n, rows, cols), out (2, rows, cols)."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    output = pk.pipeline(1, r=pk.shared((R, C), pk.float32))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            for i in pk.range(x.depth):
                with ring.fill() as s:
                    pk.load_async(s.x, x, (i, m, n))
        with pk.consumer(warpgroups=1):
            a, b = pk.zeros((R, C)), pk.full((R, C), 1.0)
            for i in pk.range(x.depth):
                with ring.drain() as s:
                    piece = pk.load(s.x)
                a, b = b, a + piece
                if i % 3 == 2:
                    a = pk.max(a, b)
                else:
                    b = b * 0.5
            with output.fill() as t:
                pk.store(t.r, a)
            with output.fill() as t:
                pk.store(t.r, b)
        with pk.storer():
            for j in pk.static_range(2):
                with output.drain() as t:
                    pk.store_async(out, t.r, (j, m, n))


@pk.kernel
def pieces(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64, P: pk.constexpr = 16):
    """y = x with the column pieces of every tile in reverse order; each is a slice of a slice."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    output = pk.pipeline(2, y=pk.shared((R, P), y.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                r = pk.load(s.x)
            for j in pk.static_range(C // P):
                with output.fill() as t:
                    pk.store(t.y, r[:, C - (j + 1) * P : C][:, :P])
        with pk.storer():
            for j in pk.static_range(C // P):
                with output.drain() as t:
                    pk.store_async(y, t.y, (m, n * (C // P) + j))


@pk.kernel
def multiply(
    a: pk.Global, b: pk.Global, c: pk.Global,
    BM: pk.constexpr = 64, BN: pk.constexpr = 64, BK: pk.constexpr = 32, G: pk.constexpr = 1,
    TA: pk.constexpr = False, TB: pk.constexpr = False, STAGES: pk.constexpr = 2, P: pk.constexpr = 0,
):  # fmt: skip
    """c = a @ b; a (M, K), or (K, M) with TA; b (K, N), or (N, K) with TB."""
    A = (BK, BM) if TA else (BM, BK)
    B = (BN, BK) if TB else (BK, BN)
    W = P or BN
    inputs = pk.pipeline(STAGES, a=pk.shared(A, a.dtype), b=pk.shared(B, b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, W), c.dtype))
    depth = a.rows if TA else a.cols
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(depth, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (k, m) if TA else (m, k))
                    pk.load_async(s.b, b, (n, k) if TB else (k, n))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(depth, BK)):
                with inputs.drain() as s:
                    if TA and TB:
                        pk.mma(acc, s.a.T, s.b.T)
                    elif TA:
                        pk.mma(acc, s.a.T, s.b)
                    elif TB:
                        pk.mma(acc, s.a, s.b.T)
                    else:
                        pk.mma(acc, s.a, s.b)
            for j in pk.static_range(BN // W):
                with output.fill() as t:
                    pk.store(t.c, acc[:, j * W : (j + 1) * W])
        with pk.storer():
            for j in pk.static_range(BN // W):
                with output.drain() as t:
                    pk.store_async(c, t.c, (m, n * (BN // W) + j))
