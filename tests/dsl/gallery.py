"""Kernels as users write them: the language's reference examples, whole.  They are read, never run."""

import pk

BM, BN, BK, P, STAGES = 128, 256, 64, 64, 4  # GEMM tiles


@pk.function
def gemm_pipes(a, b, c):
    return (
        pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype)),
        pk.pipeline(2, c=pk.shared((BM, P), c.dtype)),
    )


@pk.function
def feed(inputs, a, row, b, n, lead=()):  # loader's half of a GEMM; row, lead: leading coordinates of A, B
    for k in pk.range(pk.cdiv(a.cols, BK)):
        with inputs.fill() as s:
            pk.load_async(s.a, a, (*row, k))
            pk.load_async(s.b, b, (*lead, k, n))


@pk.function
def accumulate(inputs, a):  # consumer's half
    acc = pk.zeros((BM, BN), pk.float32)
    for k in pk.range(pk.cdiv(a.cols, BK)):
        with inputs.drain() as s:
            pk.mma(acc, s.a, s.b)
    return acc


@pk.function
def emit(output, acc):  # consumer's epilogue, in column pieces: little shared memory, early stores
    for j in pk.static_range(BN // P):
        with output.fill() as s:
            pk.store(s.c, acc[:, j * P : (j + 1) * P])


@pk.function
def put(output, dst, row, n, add=False):  # storer's half
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            if add:
                pk.store_add_async(dst, s.c, (*row, n * (BN // P) + j))
            else:
                pk.store_async(dst, s.c, (*row, n * (BN // P) + j))


@pk.kernel
def matmul(
    a: pk.Global,
    b: pk.Global,
    c: pk.Global,  # (M, K) (K, N) (M, N)
    BM: pk.constexpr = 128,
    BN: pk.constexpr = 256,
    BK: pk.constexpr = 64,
    P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4,
    PINGPONG: pk.constexpr = False,
    CLUSTER: pk.constexpr = 1,
):
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(2, c=pk.shared((BM, P), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN), cluster=CLUSTER):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=2, pingpong=PINGPONG):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
            for j in pk.static_range(BN // P):
                with output.fill() as s:
                    pk.store(s.c, acc[:, j * P : (j + 1) * P])
        with pk.storer():
            for j in pk.static_range(BN // P):
                with output.drain() as s:
                    pk.store_async(c, s.c, (m, n * (BN // P) + j))


@pk.kernel
def matmul_reduce_scatter_det(a: pk.Global, b: pk.Global, c: pk.Global):  # c: ordinary local memory
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output, parts = pk.pipeline(1, c=pk.shared((BM, P), c.dtype)), pk.pipeline(1, c=pk.shared((BM, P), c.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    part = pk.scratch((W, c.rows, c.cols), c.dtype)  # [source rank, row, col]
    arrived = pk.signals(rows, cols)
    for owner, m, n in pk.tasks(pk.ranks_from(me + 1), rows, cols):  # own tiles last: the partials are there by then
        with pk.loader():
            feed(inputs, a, (owner, m), b, n)
            if owner == me:
                pk.wait(arrived, (m, n), W - 1)
                for j in pk.static_range(BN // P):
                    for r in pk.ranks_from(me + 1, W - 1):
                        with parts.fill() as s:
                            pk.load_async(s.c, part[me], (r, m, n * (BN // P) + j))
        with pk.consumer(warpgroups=2):
            acc = accumulate(inputs, a)
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
                put(output, c, (m,), n)
            else:
                put(output, part[owner], (me, m), n)
                pk.signal(arrived, (m, n), owner)


@pk.kernel
def all_gather_matmul(
    x: pk.Global,
    b: pk.Global,
    c: pk.Global,  # (M/W, K) (K, N) (W, M/W, N)
    COMM: pk.constexpr = 8,
    BC: pk.constexpr = 256,
):
    inputs, output = gemm_pipes(x, b, c)
    ring = pk.pipeline(3, x=pk.shared((BM, BC), x.dtype))
    me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    full = pk.scratch((W, x.rows, x.cols), x.dtype)
    ready = pk.signals(W, rows)  # chunks of row block m of rank w that landed here
    with pk.communicator(sms=COMM):
        for m, j in pk.tasks(rows, chunks, group=1):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.x, x, (m, j))
            with pk.storer():
                with ring.drain() as s:
                    for r in pk.ranks_from(me + 1, W - 1):
                        pk.store_async(full[r], s.x, (me, m, j))
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(ready, (me, m), r)
    for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN)):  # own rows, then row block 0 of every peer, 1, ...
        own = i < rows
        m = i if own else (i - rows) // (W - 1)
        owner = me if own else (me + 1 + (i - rows) % (W - 1)) % W
        with pk.loader():
            if own:
                feed(inputs, x, (m,), b, n)
            else:
                pk.wait(ready, (owner, m), chunks)
                feed(inputs, full[me], (owner, m), b, n)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, x))
        with pk.storer():
            put(output, c, (owner, m), n)


@pk.kernel
def decode_matmul_all_reduce(
    a: pk.Global,
    b: pk.Global,
    c: pk.Global,  # (M <= 64, K) (K, N) (M, N)
    BM: pk.constexpr = 64,
    BN: pk.constexpr = 128,
    BK: pk.constexpr = 128,
    SPLIT: pk.constexpr = 2,
):
    inputs = pk.pipeline(3, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    sums, parts = pk.pipeline(1, p=pk.shared((BM, BN), pk.float32)), pk.pipeline(1, p=pk.shared((BM, BN), pk.float32))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype))
    me, W, cols, steps = pk.rank(), pk.world_size(), pk.cdiv(c.cols, BN), pk.cdiv(a.cols, BK)
    part = pk.scratch((W * SPLIT, c.rows, c.cols), pk.float32)
    arrived = pk.signals(cols)
    for n, z in pk.tasks(cols, SPLIT, group=1):
        first, last = z * steps // SPLIT, (z + 1) * steps // SPLIT
        with pk.loader():
            for k in pk.range(first, last):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (0, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(first, last):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
            with sums.fill() as s:
                pk.store(s.p, acc)
        with pk.storer():
            with sums.drain() as s:
                pk.store_async(part, s.p, (me * SPLIT + z, 0, n))  # whole Parallel: to every rank
            pk.signal_all(arrived, n)
    for n in pk.tasks(cols):  # every rank adds all partials in one fixed order
        with pk.loader():
            pk.wait(arrived, n, W * SPLIT)
            for z in pk.range(W * SPLIT):
                with parts.fill() as s:
                    pk.load_async(s.p, part[me], (z, 0, n))
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((BM, BN), pk.float32)
            for z in pk.range(W * SPLIT):
                with parts.drain() as s:
                    acc = acc + pk.load(s.p)
            with output.fill() as s:
                pk.store(s.c, acc)
        with pk.storer():
            with output.drain() as s:
                pk.store_async(c, s.c, (0, n))


@pk.kernel
def all_reduce_ring(x: pk.Global, out: pk.Global, BM: pk.constexpr = 64, BN: pk.constexpr = 256):  # (W, P, C): W chunks
    inputs, output = pk.pipeline(2, x=pk.shared((BM, BN), x.dtype)), pk.pipeline(2, y=pk.shared((BM, BN), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)
    last = 2 * W - 2  # W-1 reducing hops, W-1 gathering hops
    hop, got = pk.scratch((last, x.rows, x.cols), x.dtype), pk.signals(last, rows, cols)  # one slot a hop: no credits
    for step, p, c in pk.tasks(last + 1, rows, cols, group=1):
        chunk = (me - step) % W
        with pk.loader():
            if step < W:
                with inputs.fill() as s:
                    pk.load_async(s.x, x, (chunk, p, c))
            if step > 0:
                pk.wait(got, (step - 1, p, c), 1)
                with inputs.fill() as s:
                    pk.load_async(s.x, hop[me], (step - 1, p, c))
        with pk.consumer(warpgroups=2):
            acc = pk.zeros((BM, BN), pk.float32)
            for _ in pk.range((step < W) + (step > 0)):
                with inputs.drain() as s:
                    acc = acc + pk.load(s.x)
            with output.fill() as s:
                pk.store(s.y, acc)
        with pk.storer():
            with output.drain() as s:
                if step < last:
                    pk.store_async(hop[(me + 1) % W], s.y, (step, p, c))
                if step >= W - 1:
                    pk.store_async(out, s.y, (chunk, p, c))
            if step < last:
                pk.signal(got, (step, p, c), (me + 1) % W)


@pk.kernel
def matmul_reduce_scatter(
    a: pk.Global,  # (world, M / world, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N)
    c: pk.Parallel,  # (M / world, N)         on every rank; receives the sum
    BM: pk.constexpr = 128,
    BN: pk.constexpr = 256,
    BK: pk.constexpr = 64,
    P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4,
):
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(2, c=pk.shared((BM, P), c.dtype))
    me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    begun = pk.signals(pk.world_size(), rows, cols)  # this tile of that owner holds its first term

    for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):  # own tiles first: they initialise c
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (owner, m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=2):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
            for j in pk.static_range(BN // P):
                with output.fill() as s:
                    pk.store(s.c, acc[:, j * P : (j + 1) * P])
        with pk.storer():
            if owner != me:
                pk.wait(begun, (owner, m, n), 1)
            for j in pk.static_range(BN // P):
                with output.drain() as s:
                    if owner == me:
                        pk.store_async(c[me], s.c, (m, n * (BN // P) + j))
                    else:
                        pk.store_add_async(c[owner], s.c, (m, n * (BN // P) + j))
            if owner == me:
                pk.signal_all(begun, (me, m, n))


@pk.kernel
def matmul_reduce_scatter_short(a: pk.Global, b: pk.Global, c: pk.Parallel):  # (W, M/W, K) (K, N) (M/W, N)
    inputs, output = gemm_pipes(a, b, c)
    me, rows, cols = pk.rank(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    ready = pk.signals(pk.world_size(), rows, cols)  # tile of that owner holds its first term
    for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):  # own tiles first: they initialise c
        with pk.loader():
            feed(inputs, a, (owner, m), b, n)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, a))
        with pk.storer():
            if owner != me:
                pk.wait(ready, (owner, m, n), 1)
            put(output, c[owner], (m,), n, add=owner != me)
            if owner == me:
                pk.signal_all(ready, (me, m, n))
