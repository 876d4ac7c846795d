"""Kernels that move tiles: asynchronous copies, adds, peers, everyone."""
# mypy: ignore-errors

import pk


@pk.kernel
def copy_1d(x: pk.Global, y: pk.Global, C: pk.constexpr = 64, STAGES: pk.constexpr = 2):
    ring = pk.pipeline(STAGES, x=pk.shared((C,), x.dtype))
    for i in pk.tasks(pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, i)
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (i,))


@pk.kernel
def copy_2d(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64, STAGES: pk.constexpr = 2):
    ring = pk.pipeline(STAGES, x=pk.shared((R, C), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C), group=3):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (m, n))


@pk.kernel
def copy_3d(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64):
    ring = pk.pipeline(3, x=pk.shared((R, C), x.dtype))
    for d, m, n in pk.tasks(x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C), group=1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (d, m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (d, m, n))


@pk.kernel
def copy_4d(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64):
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for b, d, m, n in pk.tasks(x.batch, x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (b, d, m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (x.batch - 1 - b, d, m, n))  # the batch comes out reversed


@pk.kernel
def rows_1d(x: pk.Global, y: pk.Global, C: pk.constexpr = 64):
    """1-D tiles in a 2-D tensor: the row counts elements."""
    ring = pk.pipeline(2, x=pk.shared((C,), x.dtype))
    for m, n in pk.tasks(x.rows, pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (x.rows - 1 - m, n))


@pk.kernel
def shifted(x: pk.Global, y: pk.Global, down: int, R: pk.constexpr = 32, C: pk.constexpr = 32, UNIT: pk.constexpr = 8):
    """``pk.at``: windows at any element, negative ones and ones beyond the end too."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for m, n in pk.tasks(pk.cdiv(y.rows, R), pk.cdiv(y.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, pk.at(m * R - down, n * C + UNIT))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (m, n))


@pk.kernel
def push_1d(x: pk.Global, out: pk.Parallel, C: pk.constexpr = 64, TO: pk.constexpr = "all"):
    """out (world, n): row ``me`` of somebody's copy."""
    ring = pk.pipeline(2, x=pk.shared((C,), x.dtype))
    me, W = pk.rank(), pk.world_size()
    for i in pk.tasks(pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, i)
        with pk.storer():
            with ring.drain() as s:
                if TO == "all":
                    pk.store_async(out, s.x, (me, i))
                else:
                    pk.store_async(out[(me + 1) % W], s.x, (me, i))


@pk.kernel
def push_2d(
    x: pk.Global, out: pk.Parallel, R: pk.constexpr = 64, C: pk.constexpr = 64,
    TO: pk.constexpr = "all", STAGES: pk.constexpr = 2,
):  # fmt: skip
    """out (world, rows, cols): slab ``me`` of somebody's copy."""
    ring = pk.pipeline(STAGES, x=pk.shared((R, C), x.dtype))
    me, W = pk.rank(), pk.world_size()
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                if TO == "all":
                    pk.store_async(out, s.x, (me, m, n))
                elif TO == "me":
                    pk.store_async(out[me], s.x, (me, m, n))
                else:
                    for r in pk.ranks_from(me + 1, pk.min(2, W)):
                        pk.store_async(out[r], s.x, (me, m, n))


@pk.kernel
def push_3d(x: pk.Global, out: pk.Parallel, R: pk.constexpr = 64, C: pk.constexpr = 64, TO: pk.constexpr = "all"):
    """out (world, depth, rows, cols)."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W = pk.rank(), pk.world_size()
    for d, m, n in pk.tasks(x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (d, m, n))
        with pk.storer():
            with ring.drain() as s:
                if TO == "all":
                    pk.store_async(out, s.x, (me, d, m, n))
                else:
                    pk.store_async(out[W - 1 - me], s.x, (me, d, m, n))


@pk.kernel
def pull_2d(x: pk.Parallel, out: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64):
    """out (world, rows, cols): everybody's x, read over the launch boundary, which makes it readable."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me = pk.rank()
    for r, m, n in pk.tasks(pk.ranks_from(me + 1), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x[r], (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(out, s.x, (r, m, n))


@pk.kernel
def neighbour_sum(x: pk.Global, out: pk.Global, C: pk.constexpr = 64):
    """out (rows, cols): x and the left neighbour's x.  The storer loads what came, so that the loader runs ahead."""
    mine = pk.pipeline(2, x=pk.shared((64, C), x.dtype))
    theirs = pk.pipeline(2, x=pk.shared((64, C), x.dtype))
    sums = pk.pipeline(2, x=pk.shared((64, C), x.dtype))
    me, right = pk.rank(), (pk.rank() + 1) % pk.world_size()
    rows, cols = pk.cdiv(x.rows, 64), pk.cdiv(x.cols, C)
    sent, came = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows, cols)
    for m, n in pk.tasks(rows, cols):
        with pk.loader():
            with mine.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.consumer():
            with mine.drain() as s:
                r = pk.load(s.x)
            with sums.fill() as s:
                pk.store(s.x, r)
            with theirs.drain() as s:
                r = r + pk.load(s.x)
            with sums.fill() as s:
                pk.store(s.x, r)
        with pk.storer():
            with sums.drain() as s:
                pk.store_async(sent[right], s.x, (m, n))
            pk.signal(came, (m, n), right)
            pk.wait(came, (m, n), 1)
            with theirs.fill() as s:
                pk.load_async(s.x, sent[me], (m, n))
            with sums.drain() as s:
                pk.store_async(out, s.x, (m, n))


@pk.kernel
def pull_1d(x: pk.Parallel, out: pk.Global, C: pk.constexpr = 64):
    """out (n,): the right neighbour's x (n,)."""
    ring = pk.pipeline(2, x=pk.shared((C,), x.dtype))
    for i in pk.tasks(pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x[(pk.rank() + 1) % pk.world_size()], (i,))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(out, s.x, (i,))


@pk.kernel
def add_1d(x: pk.Global, y: pk.Global, C: pk.constexpr = 64):
    """y += 2 x, as two adds of one stage."""
    ring = pk.pipeline(2, x=pk.shared((C,), x.dtype))
    for i in pk.tasks(pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (i,))
        with pk.storer():
            with ring.drain() as s:
                pk.store_add_async(y, s.x, (i,))
                pk.store_add_async(y, s.x, (i,))


@pk.kernel
def add_2d(x: pk.Global, out: pk.Parallel, R: pk.constexpr = 64, C: pk.constexpr = 64, TO: pk.constexpr = "all"):
    """out (rows, cols) of everybody, or of rank 0, += x of every rank."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                if TO == "all":
                    pk.store_add_async(out, s.x, (m, n))
                else:
                    pk.store_add_async(out[0], s.x, (m, n))


@pk.kernel
def add_3d(x: pk.Global, out: pk.Parallel, R: pk.constexpr = 64, C: pk.constexpr = 64):
    """x (world, rows, cols), out (depth, rows, cols): the owner's every layer += my slab for the owner."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for owner, m, n in pk.tasks(pk.ranks_from(pk.rank()), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (owner, m, n))
        with pk.storer():
            with ring.drain() as s:
                for d in pk.range(out.depth):
                    pk.store_add_async(out[owner], s.x, (d, m, n))


@pk.kernel
def add_4d(x: pk.Global, y: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 64):
    """y (b, d, rows, cols) += x."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    for b, d, m, n in pk.tasks(x.batch, x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (b, d, m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_add_async(y, s.x, (b, d, m, n))
