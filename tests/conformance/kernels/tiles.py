"""Kernels on register tiles that come from tensors and go there: functions, masks, reductions, windows, scalars."""
# mypy: ignore-errors

import pk

FUNCTIONS = 11
MASKS = 13
REDUCTIONS = 8


@pk.function
def functions_of(a):
    p = abs(a) + 0.001
    return (
        pk.exp2(a), pk.exp(a), pk.log2(p), pk.log(p), pk.sqrt(p), pk.rsqrt(p), pk.tanh(a), pk.sigmoid(a), pk.silu(a),
        pk.gelu(a), pk.gelu(a, approximate="tanh"),
    )  # fmt: skip


@pk.kernel
def functions(x: pk.Global, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """out (FUNCTIONS, rows, cols) float32, in a team."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        results = functions_of(pk.load(x, (m, n), (R, C)))
        for j in pk.static_range(11):
            pk.store(out, results[j], (j, m, n))


@pk.kernel
def functions_in_consumer(x: pk.Global, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """The same from a shared tile, in a consumer."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                a = pk.load(s.x)
            results = functions_of(a)
            for j in pk.static_range(11):
                pk.store(out, results[j], (j, m, n))


@pk.kernel
def scalar_functions(x: pk.Global, out: pk.Global):
    """The same of scalars: x (n,), out (FUNCTIONS, n)."""
    for i in pk.tasks(x.cols):
        with pk.storer():
            results = functions_of(pk.load(x, i))
            for j in pk.static_range(11):
                pk.store(out, results[j], (j, i))


@pk.kernel
def scalar_choices(x: pk.Global, rows: pk.Global, y: pk.Global, bound: float, WHERE: pk.constexpr = "loader"):
    """y (n * FUNCTIONS, C): row 1 of ``rows`` (2, C) where a function of a scalar is above ``bound``, else row 0."""
    ring = pk.pipeline(2, x=pk.shared((1, 64), rows.dtype))
    for i in pk.tasks(x.cols):
        if WHERE == "shared":
            results = functions_of(pk.load(x, i))
            for j in pk.static_range(11):
                pick = 1 if results[j] > bound else 0
                with pk.loader():
                    with ring.fill() as s:
                        pk.load_async(s.x, rows, (pick, 0))
        else:
            with pk.loader():
                results = functions_of(pk.load(x, i))
                for j in pk.static_range(11):
                    with ring.fill() as s:
                        pk.load_async(s.x, rows, (1 if results[j] > bound else 0, 0))
        with pk.storer():
            for j in pk.static_range(11):
                with ring.drain() as s:
                    pk.store_async(y, s.x, (i * 11 + j, 0))


@pk.kernel
def masks(x: pk.Global, y: pk.Global, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """out (MASKS, rows, cols) float32: comparisons, logic, iota, where, broadcast."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        a, b = pk.load(x, (m, n), (R, C)), pk.load(y, (m, n), (R, C))
        row, col = m * R + pk.iota((R, 1)), n * C + pk.iota((1, C))
        results = (
            pk.where(a < b, a, b), pk.where(a <= b, 1.0, 0.0), pk.where(a > b, a, 2.0), pk.where(a >= b, 1.0, b),
            pk.where((a == b) | (a > 1.0), a, 0.0), pk.where((a != b) & (b < 0.5), a, b), pk.where(~(a < b), a, -b),
            pk.where(col <= row, a, -pk.inf), pk.where((col % 3 == 1) | (row // 2 == 4), a, 0.0),
            a + pk.cast(row, pk.float32) * 0.5, a * pk.cast(col - row, pk.float32),
            pk.cast(pk.max(row, col) + pk.min(row, 3) * 2 - abs(row - col), pk.float32), pk.fma(a + 0.1, b - 0.7, 0.1),
        )  # fmt: skip
        for j in pk.static_range(13):
            pk.store(out, results[j], (j, m, n))


@pk.kernel
def reductions(x: pk.Global, rows: pk.Global, cols: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """rows (3, n, 1), cols (3, 1, n): sum, max and min of one tile along each axis; and what is left after them."""
    for m in pk.tasks(pk.cdiv(x.rows, R)):
        a = pk.load(x, (m, 0), (R, C))
        pk.store(rows, pk.sum(a, axis=1), (0, m, 0))
        pk.store(rows, pk.max(a, axis=1), (1, m, 0))
        pk.store(rows, pk.min(a, axis=1), (2, m, 0))
        pk.store(cols, pk.sum(a, axis=0), (0, m, 0))
        pk.store(cols, pk.max(a, axis=0), (1, m, 0))
        pk.store(cols, pk.min(a, axis=0), (2, m, 0))


@pk.kernel
def softmax(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 128):
    """Rows of at most C columns, in a consumer, tails masked; stored from the fragment or linear layout."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for m in pk.tasks(pk.cdiv(x.rows, R)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, 0))
        with pk.consumer(warpgroups=1):
            with ring.drain() as s:
                a = pk.load(s.x)
            a = pk.where(pk.iota((1, C)) < x.cols, a, -pk.inf)
            e = pk.exp(a - pk.max(a, axis=1))
            least = pk.min(e, axis=1)  # not above 1
            pk.store(y, pk.fma(e, 1.0 / pk.sum(e, axis=1), pk.max(least, 1.0) - 1.0), (m, 0))


@pk.kernel
def windows(x: pk.Global, y: pk.Global, keep: int, R: pk.constexpr = 16, C: pk.constexpr = 32, OTHER: pk.constexpr = 7):
    """y = x a row up and a column left, ``OTHER`` beyond the edge, the first ``keep`` rows of every tile only."""
    for m, n in pk.tasks(pk.cdiv(y.rows, R), pk.cdiv(y.cols, C)):
        a = pk.load(x, pk.at(m * R + 1, n * C + 1), (R, C), other=OTHER)
        pk.store(y, a, (m, n), rows=keep)


@pk.kernel
def windows_nd(x: pk.Global, y: pk.Parallel, C: pk.constexpr = 32):
    """x of 3 dimensions -> slot ``me`` of everyone's y."""
    for d, m, n in pk.tasks(x.depth, x.rows, pk.cdiv(x.cols, C)):
        pk.store(y, pk.load(x, (d, m, n), (1, C)), (pk.rank(), d, m, n))


@pk.kernel
def windows_4d(x: pk.Global, y: pk.Global, R: pk.constexpr = 8, C: pk.constexpr = 32):
    """y = x with the batch reversed."""
    for b, d, m, n in pk.tasks(x.batch, x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.store(y, pk.load(x, (b, d, m, n), (R, C)), (x.batch - 1 - b, d, m, n))


@pk.kernel
def elements_nd(x: pk.Global, y: pk.Parallel):
    """x (rows, cols) or (depth, rows, cols) -> slot ``me`` of y: of the right neighbour (2-D), of everyone (3-D)."""
    me, right = pk.rank(), (pk.rank() + 1) % pk.world_size()
    if len(x.shape) == 2:
        for m, n in pk.tasks(x.rows, x.cols):
            pk.store(y[right], pk.load(x, (m, n)), (me, m, n))
    else:
        for d, m, n in pk.tasks(x.depth, x.rows, x.cols):
            pk.store(y, pk.load(x, (d, m, n)), (me, d, m, n))


@pk.kernel
def elements_4d(x: pk.Global, y: pk.Global):
    for b, d, m, n in pk.tasks(x.batch, x.depth, x.rows, x.cols):
        pk.store(y, pk.load(x, (b, d, m, n)), (b, d, m, n))


WHOLE = 20


@pk.kernel
def whole(x: pk.Global, y: pk.Global, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """out (WHOLE, rows, cols) int32: arithmetic and comparisons of int32 tiles."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        a, b = pk.load(x, (m, n), (R, C)), pk.load(y, (m, n), (R, C))
        five = pk.full((R, C), 5, pk.int32)
        results = (
            a + b, a - b, a * b, pk.min(a, b), pk.max(a, b), -a, pk.abs(b), a // 3, a % 3, a // -4, a % -4,
            pk.where(a < b, 1, 0), pk.where(a <= b, a, 0), pk.where(a > b, a, five), pk.where(a >= b, five, 1),
            pk.where(a == b, a, b), pk.where(a != b, 1, a), five - a, pk.cast(pk.cast(a, pk.float32) * 0.5, pk.int32),
            pk.where((a > 0) | ~(b > 0), a, b),
        )  # fmt: skip
        for j in pk.static_range(20):
            pk.store(out, results[j], (j, m, n))


@pk.kernel
def halves(x: pk.Global, y: pk.Global, R: pk.constexpr = 8, C: pk.constexpr = 512):
    """y = x with the halves of every tile swapped and one added, in a team."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        a = pk.load(x, (m, n), (R, C)) + pk.full((R, C), 1.0)
        pk.store(y, a[:, C // 2 :], (m, n * 2))
        pk.store(y, a[:, : C // 2], (m, n * 2 + 1))


@pk.kernel
def peers(x: pk.Parallel, y: pk.Parallel, R: pk.constexpr = 16, C: pk.constexpr = 32, TO: pk.constexpr = "all"):
    """Registers: read from the right neighbour, written to the left one or to everyone's slot."""
    me, W = pk.rank(), pk.world_size()
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        a = pk.load(x[(me + 1) % W], (m, n), (R, C))
        if TO == "all":
            pk.store(y, a, (me, m, n))
        else:
            pk.store(y[(me - 1) % W], a, (me, m, n))


@pk.kernel
def consumer_windows(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 32):
    """The same operations in a consumer."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.consumer(warpgroups=1):
            pk.store(y, pk.load(x, (m, n), (R, C)), (m, n))


@pk.kernel
def elements(x: pk.Parallel, y: pk.Parallel, WHERE: pk.constexpr = "storer"):
    """x (n,), y (world, n): single elements, read from the right neighbour and stored to everyone, in ``WHERE``."""
    me, W = pk.rank(), pk.world_size()
    right = (me + 1) % W
    for i in pk.tasks(x.cols):
        if WHERE == "shared":
            v = pk.load(x[right], i)
            with pk.storer():
                pk.store(y, v, (me, i))
        if WHERE == "storer":
            with pk.storer():
                pk.store(y, pk.load(x[right], i), (me, i))
        if WHERE == "consumer":
            with pk.consumer(warpgroups=1):
                v = pk.load(x[right], i)
                pk.store(y, v, (me, i))
        if WHERE == "team":
            v = pk.load(x[right], i)
            pk.store(y, v, (me, i))


@pk.kernel
def addressed(index: pk.Global, x: pk.Global, y: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 32):
    """The loader reads which tile to load: y tile i = x tile index[i]; x (tiles * R, C)."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for i in pk.tasks(index.cols):
        with pk.loader():
            j = pk.load(index, i)
            with ring.fill() as s:
                pk.load_async(s.x, x, (j, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (i, 0))
