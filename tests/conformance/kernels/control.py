"""Kernels that show scalars, loops, branches, helpers and task orders through what they store."""
# mypy: ignore-errors

import pk

SCALARS = 30
TILE = 16


@pk.function
def clamp(x, low, high=7):
    if x < low:
        x = low
    return pk.min(x, high)


@pk.function
def halves(n):
    return n // 2, n - n // 2


@pk.kernel
def scalars(out: pk.Global, i: int, j: int, f: float, N: pk.constexpr = 3):
    """out (SCALARS, 64, 16) float32, all of slab k equal to the k-th scalar."""
    output = pk.pipeline(2, r=pk.shared((64, 16), pk.float32))
    me, W = pk.rank(), pk.world_size()
    first, second = halves(i)
    for once in pk.tasks(1):
        assert N == 3 and W >= 1, "never fails"
        with pk.consumer(warpgroups=1):
            values = (
                i + j, i - j, i * j, i // j, i % j, i // 3, i % -3, -i, abs(i), pk.cdiv(i, 5),
                pk.min(i, j, 2), pk.max(i, j, 2), min(j, i), first, second, clamp(i, 2), clamp(j, 0, 3),
                (i < j) + (i <= j) + (i == j) * 4, (i > j) * 2 + (i >= j) + (i != j) * 8, me, W, (me + 1) % W,
                1 if i < 0 and j > 0 else 2, 1 if i < 0 or not j > 5 else 2, N * i + 1, out.rows, out.cols * out.depth,
                f * 2.0, f - i, (i + 7) // j * j + i % j,
            )  # fmt: skip
            for n in pk.static_range(30):
                tile = pk.zeros((64, 16)) + values[n]
                with output.fill() as s:
                    pk.store(s.r, tile)
        with pk.storer():
            for n in pk.range(30):
                with output.drain() as s:
                    pk.store_async(out, s.r, (n, 0, 0))


@pk.kernel
def loops(out: pk.Global, n: int, B: pk.constexpr = 4):
    """out (64, 16) float32 += a number for each turn of loops and branches of every kind."""
    output = pk.pipeline(1, r=pk.shared((64, 16), pk.float32))
    for a in pk.tasks(1):
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((64, 16))
            total = 0
            for x in pk.range(n):
                for y in pk.range(x, n + 1):
                    if (x + y) % 3 == 0:
                        total += x * 10 + y
                    elif y > x:
                        total -= 1
                    else:
                        acc = acc + 0.5
            for x in pk.static_range(1, 10, 4):
                total += x
            for x in (5, 6):
                total += x * n
            for r in pk.ranks_from(1, 2):
                total += r * 1000
            for x in pk.range(3, 1):
                total += 1000000
            if B > 3:
                total += B
            with output.fill() as s:
                pk.store(s.r, acc + total)
        with pk.storer():
            with output.drain() as s:
                pk.store_async(out, s.r, (0, 0))


@pk.kernel
def visits(ones: pk.Global, out: pk.Global, GROUP: pk.constexpr = 8):
    """Every task of two consecutive loops adds one to its own tile.  out (depth, rows, cols) float32."""
    ring = pk.pipeline(2, x=pk.shared((16, 16), pk.float32))
    rows, cols = pk.cdiv(out.rows, 16), pk.cdiv(out.cols, 16)
    for d, m, n in pk.tasks(out.depth, rows, cols, group=GROUP):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, ones, (0, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_add_async(out, s.x, (d, m, n))
    for d, m in pk.tasks(pk.ranks_from(0, out.depth), rows, group=GROUP):
        if m % 2 == 0:
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.x, ones, (0, 0))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_add_async(out, s.x, (0, m, 0))


@pk.kernel
def optional(x: pk.Global, y: pk.Global, bias: pk.Global = None, R: pk.constexpr = 64, C: pk.constexpr = 32):
    """y = x, or x + bias where a bias is given."""
    ring, output = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(1, y=pk.shared((R, C), y.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
            if bias is not None:
                with ring.fill() as s:
                    pk.load_async(s.x, bias, (m, n))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                r = pk.load(s.x)
            if bias is not None:
                with ring.drain() as s:
                    r = r + pk.load(s.x)
            with output.fill() as t:
                pk.store(t.y, r)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(y, t.y, (m, n))
