"""Kernels of ``reduce`` and ``all_reduce``."""
# mypy: ignore-errors

import pk


@pk.kernel
def reduce_2d(x: pk.Parallel, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64, OP: pk.constexpr = "sum"):
    """Every rank: out (rows, cols) = all ranks' x, in a team."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.reduce(out, (m, n), x, (m, n), shape=(R, C), op=OP)


@pk.kernel
def reduce_1d(x: pk.Parallel, out: pk.Global, C: pk.constexpr = 256, OP: pk.constexpr = "sum"):
    for i in pk.tasks(pk.cdiv(x.cols, C)):
        pk.reduce(out, (i,), x, (i,), shape=(C,), op=OP)


@pk.kernel
def reduce_scatter(x: pk.Parallel, out: pk.Global, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """x (world, rows, cols): out (rows, cols) = slab ``me`` of all ranks, in a consumer."""
    for m, n in pk.tasks(pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        with pk.consumer(warpgroups=1):
            pk.reduce(out, (m, n), x, (pk.rank(), m, n), shape=(R, C))


@pk.kernel
def reduce_to_peer(x: pk.Parallel, out: pk.Parallel, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """x (b, d, rows, cols); out of the right neighbour = the maximum over ranks."""
    right = (pk.rank() + 1) % pk.world_size()
    for b, d, m, n in pk.tasks(x.batch, x.depth, pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.reduce(out[right], (b, d, m, n), x, (b, d, m, n), shape=(R, C), op="max")


@pk.kernel
def all_reduce_2d(
    x: pk.Parallel, R: pk.constexpr = 16, C: pk.constexpr = 64, OP: pk.constexpr = "sum", CONSUMER: pk.constexpr = False
):
    """In place; rank r combines every world-th window."""
    me, W, cols = pk.rank(), pk.world_size(), pk.cdiv(x.cols, C)
    windows = pk.cdiv(x.rows, R) * cols
    for i in pk.tasks(pk.cdiv(windows, W)):
        w = i * W + me
        if w < windows:
            if CONSUMER:
                with pk.consumer(warpgroups=1):
                    pk.all_reduce(x, (w // cols, w % cols), shape=(R, C), op=OP)
            else:
                pk.all_reduce(x, (w // cols, w % cols), shape=(R, C), op=OP)


@pk.kernel
def all_reduce_1d(x: pk.Parallel, C: pk.constexpr = 256):
    me, W = pk.rank(), pk.world_size()
    for i in pk.tasks(pk.cdiv(pk.cdiv(x.cols, C), W)):
        pk.all_reduce(x, (i * W + me,), shape=(C,))


@pk.kernel
def all_reduce_3d(x: pk.Parallel, R: pk.constexpr = 16, C: pk.constexpr = 64):
    """Slab d belongs to rank d % world."""
    me, W = pk.rank(), pk.world_size()
    for i, m, n in pk.tasks(pk.cdiv(x.depth, W), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)):
        pk.all_reduce(x, (i * W + me, m, n), shape=(R, C), op="min")


@pk.kernel
def all_reduce_4d(x: pk.Parallel, C: pk.constexpr = 64):
    """Batch b belongs to rank b % world; windows of one row."""
    me, W = pk.rank(), pk.world_size()
    for i, d, m, n in pk.tasks(pk.cdiv(x.batch, W), x.depth, x.rows, pk.cdiv(x.cols, C)):
        pk.all_reduce(x, (i * W + me, d, m, n), shape=(1, C))
