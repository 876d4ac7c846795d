"""The kernels of the tensor-parallel operators.  ``examples/`` shows them in plain form.

A row block of the operand or of the result belongs to a rank.  What crosses between ranks is rounded to the result's
dtype once for each rank's partial sum; sums are made in float32 and in one order, so results have the same bits on
every run.  Scales and bias are float32 vectors that may be missing.
"""

import pk
from pk.ops.product import accumulate_part, activated, feed_vectors, product_pipes


@pk.function
def pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T):
    """Pipelines of A and B tiles, of output pieces, and of the epilogue's vectors: None without."""
    return product_pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, False, B_T, False)


@pk.function
def feed_rows(inputs, a, row, b, n, K, BK, B_T):
    """Loader's half: the tiles of A at ``row`` and of B at column tile ``n``, along K."""
    for k in pk.range(pk.cdiv(K, BK)):
        with inputs.fill() as s:
            pk.load_async(s.a, a, (*row, k))
            pk.load_async(s.b, b, (n, k) if B_T else (k, n))


@pk.function
def feed_piece(parts, part, row, column):
    """Storer's half of a sum: the other ranks' partial sums of a piece, from their memory, rank by rank."""
    for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
        with parts.fill() as s:
            pk.load_async(s.c, part[r], (*row, column))


@pk.function
def scaled(r, factor, scale, start, stop):
    """A piece by row and column scales; ``scale``: a shared tile (1, BN) or None."""
    if factor is not None:
        r = r * factor
    if scale is not None:
        r = r * pk.load(scale)[:, start:stop]
    return r


@pk.function
def finished(r, bias, start, stop, ACTIVATION):
    """A piece whose sum is complete, with bias (a shared tile (1, BN) or None) and activation."""
    if bias is not None:
        r = r + pk.load(bias)[:, start:stop]
    return activated(r, ACTIVATION)


@pk.function
def epilogue(output, acc, parts, factor, scale, bias, last, BN, P, ACTIVATION):
    """Consumer's epilogue in pieces of P columns: scales, then, if this rank is the ``last`` to touch the tile, the
    others' partial sums, bias and activation.  ``scale``, ``bias``: shared tiles (1, BN) or None.
    """
    for j in pk.static_range(BN // P):
        r = acc[:, j * P : (j + 1) * P]
        r = scaled(r, factor, scale, j * P, (j + 1) * P)
        if last:
            if parts is not None:
                for _ in pk.range(pk.world_size() - 1):
                    with parts.drain() as s:
                        r = r + pk.load(s.c)
            r = finished(r, bias, j * P, (j + 1) * P, ACTIVATION)
        with output.fill() as s:
            pk.store(s.c, r)


@pk.function
def epilogue_in_place(output, acc, parts, factor, scale, bias, last, BN, P, ACTIVATION):
    """The same where ``output`` is over ``parts``: each piece replaces the last partial sum that it adds."""
    for j in pk.static_range(BN // P):
        r = acc[:, j * P : (j + 1) * P]
        r = scaled(r, factor, scale, j * P, (j + 1) * P)
        for _ in pk.range(parts_before(last)):
            with parts.drain() as s:
                r = r + pk.load(s.c)
                with output.fill():
                    pass
        with parts.drain() as s:
            if last:
                if pk.world_size() > 1:
                    r = r + pk.load(s.c)
                r = finished(r, bias, j * P, (j + 1) * P, ACTIVATION)
            with output.fill() as t:
                pk.store(t.c, r)


@pk.function
def parts_before(last):
    """Partial sums of a piece but for the last one, in whose stage the result is."""
    return pk.max(pk.world_size() - 2, 0) if last else 0


@pk.function
def finish_rows(output, acc, parts, vectors, factor, scale, bias, last, BN, P, ACTIVATION, IN_PLACE=False):
    """The epilogue, with the vectors of this column tile in shared memory if there are any."""
    body = epilogue_in_place if IN_PLACE else epilogue
    if vectors is None:
        body(output, acc, parts, factor, None, None, last, BN, P, ACTIVATION)
    else:
        with vectors.drain() as v:
            cols, added = None if scale is None else v.scale, None if bias is None else v.bias
            body(output, acc, parts, factor, cols, added, last, BN, P, ACTIVATION)


@pk.function
def place(t, rows, cols, G):
    """Row and column of tile number ``t``: groups of G rows, column by column in a group, so that L2 serves both."""
    group = t // (G * cols)
    height, i = pk.min(G, rows - group * G), t - group * (G * cols)
    return group * G + i % height, i // height


@pk.function
def owned_tile(t, owner, rows, cols, G, BY_COLS):
    """Row and column of tile number ``t`` of those of ``owner``, rows by cols, every W-th row (BY_COLS: column)."""
    x, y = place(t, rows, cols, G)
    return (x, y * pk.world_size() + owner) if BY_COLS else (x * pk.world_size() + owner, y)


@pk.function
def take_tile(dst, src, m, n, BM, BN, R, C):
    """Of a communicator warp: copy tile (m, n), a piece of R rows and C columns at a time."""
    for i in pk.range(BM // R):
        for j in pk.range(BN // C):
            at = pk.at(m * BM + i * R, n * BN + j * C)
            pk.store(dst, pk.load(src, at, (R, C)), at)


@pk.function
def put_rows(output, dst, row, n, BN, P):
    """Storer's half: write the pieces of column tile ``n`` at ``row``."""
    for j in pk.static_range(BN // P):
        with output.drain() as s:
            pk.store_async(dst, s.c, (*row, n * (BN // P) + j))


@pk.function
def put_sums(output, parts, part, row, dst, peers, m, n, BN, P, AHEAD):
    """The same, AHEAD pieces behind their partial sums.  The loader, which has the next tile to load, stays out.
    ``peers``: what every other rank receives the tile in as well, or None.

    More than ``parts`` holds beyond the pieces that ``output`` holds would wait for a consumer that waits for these.
    """
    for j in pk.static_range(min(AHEAD, BN // P)):
        feed_piece(parts, part, row, n * (BN // P) + j)
    for j in pk.static_range(BN // P):
        if j + AHEAD < BN // P:
            feed_piece(parts, part, row, n * (BN // P) + j + AHEAD)
        with output.drain() as s:
            put_finished(s, dst, peers, m, n * (BN // P) + j)


@pk.function
def put_finished(s, dst, peers, m, column):
    """A piece of the result from stage ``s``."""
    pk.store_async(dst, s.c, (m, column))
    if peers is not None:
        for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
            pk.store_async(peers[r], s.c, (m, column))


@pk.function
def hand_on(output, parts, part, row, dst, peers, m, n, last, BN, P, AHEAD):
    """Storer's half in place, of own tiles and of others': stages go to the consumer, AHEAD of them, with the partial
    sums that it adds or empty, and come back with what is to be stored.
    """
    me, count, pieces = pk.rank(), parts_before(last) + 1, BN // P
    first = pk.min(AHEAD, pieces * count)
    for u in pk.range(first):
        lend(parts, part, row, n * pieces + u // count, u % count, last)
    for u in pk.range(pieces * count - first):
        take_back(output, part[me], row, dst, peers, m, n * pieces + u // count, u % count == count - 1, last)
        v = u + first
        lend(parts, part, row, n * pieces + v // count, v % count, last)
    for u in pk.range(first):
        v = u + pieces * count - first
        take_back(output, part[me], row, dst, peers, m, n * pieces + v // count, v % count == count - 1, last)


@pk.function
def lend(parts, part, row, column, q, last):
    """A stage for the consumer, with the partial sum of the q-th rank behind this one."""
    with parts.fill() as s:
        if last and pk.world_size() > 1:
            pk.load_async(s.c, part[(pk.rank() + 1 + q) % pk.world_size()], (*row, column))


@pk.function
def take_back(output, mine, row, dst, peers, m, column, whole, last):
    """A stage from the consumer, which holds a piece if it is ``whole``."""
    with output.drain() as s:
        if whole:
            if last:
                put_finished(s, dst, peers, m, column)
            else:
                pk.store_async(mine, s.c, (*row, column))


@pk.function
def owner_of(step, turn, STEPS, SHIFT):
    """The rank whose tile task (step, turn) is: all in turn, from the next one on, shifted by SHIFT every STEPS steps.

    Tasks are dealt round-robin.  Where the ranks divide the blocks, each block would otherwise have tiles of one
    owner, and those of its own rank take longer: the others then waited for these blocks.
    """
    return (pk.rank() + 1 + turn + step // STEPS * SHIFT) % pk.world_size()


@pk.function
def summed_tile(
    inputs, output, vectors, parts, a, row, b, c, peers, m, n, owner, part, arrived, done, row_scale, scale, bias,
    BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION, AHEAD, IN_PLACE=False,
):  # fmt: skip
    """All roles' halves of a tile of a sum over ranks: A and partial sums at ``row``, C at ``m``.  Its owner adds the
    partial sums that the others have in ``part`` and writes ``c``, and ``peers`` (with a signal ``done``) if not None.

    The owner fetches them.  Sent to it, they leave faster than the link takes them whenever the blocks end tiles
    together, and an SM whose stores are held up does not load either: 3 to 14 % of the time on two H200s.
    """
    me, W = pk.rank(), pk.world_size()
    last = owner == me
    with pk.loader():
        feed_rows(inputs, a, row, b, n, a.cols, BK, B_T)
        feed_vectors(vectors, scale, bias, n)
    with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
        factor = None if row_scale is None else pk.load(row_scale, (*row, 0), (BM, 1))
        acc = accumulate_part(inputs, 0, pk.cdiv(a.cols, BK), BM, BN, False, B_T)
        finish_rows(output, acc, parts, vectors, factor, scale, bias, last, BN, P, ACTIVATION, IN_PLACE)
    with pk.storer():
        if IN_PLACE:
            if last:
                pk.wait(arrived, (m, n), W - 1)
            hand_on(output, parts, part, row, c, peers, m, n, last, BN, P, AHEAD)
            if owner != me:
                pk.signal(arrived, (m, n), owner)
            elif peers is not None:
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(done, (m, n), r)
        elif last:
            pk.wait(arrived, (m, n), W - 1)
            put_sums(output, parts, part, row, c, peers, m, n, BN, P, AHEAD)
            if peers is not None:
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(done, (m, n), r)
        else:
            put_rows(output, part[me], row, n, BN, P)
            pk.signal(arrived, (m, n), owner)


@pk.function
def push_rows(x, full, m, j, peers, BM, BC, PUSH):
    """Of a communicator warp: chunk ``j`` of row block ``m`` of x to ``peers`` ranks, PUSH rows at a time."""
    me = pk.rank()
    for i in pk.range(pk.cdiv(pk.min(BM, x.rows - m * BM), PUSH)):
        piece = pk.load(x, pk.at(m * BM + i * PUSH, j * BC), (PUSH, BC))
        for r in pk.ranks_from(me + 1, peers):
            pk.store(full[r], piece, pk.at(me, m * BM + i * PUSH, j * BC))


@pk.kernel
def all_gather_matmul(
    x: pk.Global,  # (M / world, K)  this rank's rows
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (world, M / world, N)
    whole: pk.Parallel = None,  # (world, M / world, K)  if the caller wants all the rows
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (W, M/W, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 4, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
    COMM: pk.constexpr = 8, BC: pk.constexpr = 128, PARTS: pk.constexpr = 4, CHUNKS: pk.constexpr = 1,
    PUSH: pk.constexpr = 16, JOIN: pk.constexpr = False,
):  # fmt: skip
    """c[r] = activation(x of rank r @ b * scales + bias).

    SMs of the communicator push own rows to the peers in the order in which these need them, a row block in PARTS along
    K, each with one signal: a signal waits for its stores, so one for every message would halve the rate.  Compute
    starts with its own rows, read where they are, then takes row block 0 of every peer, and so on: all links bring
    data at once (ParallelKittens, arXiv 2511.13940, section 4).

    COMM = 0: a warp of every block does that instead, CHUNKS chunks of BC columns a signal, PUSH rows at a time, all of
    whose loads are under way together.  No SM is set aside, so that the product does not take another wave of tiles.
    """
    inputs, output, vectors = pipes(x, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    ring = pk.pipeline(3, x=pk.shared((BM, BC), x.dtype))
    me, W, rows, chunks = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BC)
    parts, peers = PARTS if COMM else pk.cdiv(chunks, CHUNKS), W - 1 if whole is None else W
    full = pk.scratch((W, x.rows, x.cols), x.dtype) if whole is None else whole
    ready = pk.signals(W, rows)  # parts of row block m of rank w that landed here
    if COMM:
        with pk.communicator(sms=COMM, joins=JOIN):
            for m, part in pk.tasks(rows, PARTS, group=1):
                first, stop = part * chunks // PARTS, (part + 1) * chunks // PARTS
                with pk.loader():
                    for j in pk.range(first, stop):
                        with ring.fill() as s:
                            pk.load_async(s.x, x, (m, j))
                with pk.storer():
                    for j in pk.range(first, stop):
                        with ring.drain() as s:
                            for r in pk.ranks_from(me + 1, peers):
                                pk.store_async(full[r], s.x, (me, m, j))
                    for r in pk.ranks_from(me + 1, W - 1):
                        pk.signal(ready, (me, m), r)
    else:
        with pk.communicator():
            for m, part in pk.tasks(rows * pk.min(peers, 1), parts, group=1):
                for j in pk.range(part * CHUNKS, pk.min((part + 1) * CHUNKS, chunks)):
                    push_rows(x, full, m, j, peers, BM, BC, PUSH)
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(ready, (me, m), r)
    for i, n in pk.tasks(rows * W, pk.cdiv(c.cols, BN), group=GROUP, dynamic=JOIN):
        own = i < rows
        m = i if own else (i - rows) // (W - 1)
        owner = me if own else (me + 1 + (i - rows) % (W - 1)) % W
        with pk.loader():
            if own:
                feed_rows(inputs, x, (m,), b, n, x.cols, BK, B_T)
            else:
                pk.wait(ready, (owner, m), parts)
                feed_rows(inputs, full[me], (owner, m), b, n, x.cols, BK, B_T)
            feed_vectors(vectors, scale, bias, n)
        with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
            factor = None if row_scale is None else pk.load(row_scale, (owner, m, 0), (BM, 1))
            acc = accumulate_part(inputs, 0, pk.cdiv(x.cols, BK), BM, BN, False, B_T)
            finish_rows(output, acc, None, vectors, factor, scale, bias, True, BN, P, ACTIVATION)
        with pk.storer():
            put_rows(output, c, (owner, m), n, BN, P)


@pk.kernel
def matmul_reduce_scatter_ordered(
    a: pk.Global,  # (world, M / world, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Global,  # (M / world, N)  ordinary memory
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (W, M/W, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 3, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, LAG: pk.constexpr = 80, STEPS: pk.constexpr = 66, SHIFT: pk.constexpr = 1,
    PARTS: pk.constexpr = 3, AHEAD: pk.constexpr = 2, IN_PLACE: pk.constexpr = False, B_T: pk.constexpr = False,
    ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a[me] @ b * scales + bias).

    Partial sums stay in scratch, from where the owner adds them to its accumulator: nothing needs zeroing, and the
    output is ordinary memory.  A step computes one tile of every other owner, and of the own ones that of LAG steps
    ago, whose partial sums are there by then: so the links are busy all the time, not in the last steps only.
    """
    inputs, output, vectors = pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    parts = pk.pipeline(PARTS, c=pk.shared((BM, P), c.dtype))
    changed = pk.pipeline(over=parts) if IN_PLACE else output
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    lag = pk.min(LAG, rows * cols)
    part = pk.scratch((W, c.rows, c.cols), c.dtype)  # [owner, row, col]
    arrived = pk.signals(rows, cols)
    for step, turn in pk.tasks(rows * cols + lag, W, group=1):
        owner = owner_of(step, turn, STEPS, SHIFT)
        t = step - lag if owner == me else step
        if t >= 0 and t < rows * cols:
            m, n = place(t, rows, cols, GROUP)
            summed_tile(
                inputs, changed, vectors, parts, a, (owner, m), b, c, None, m, n, owner, part, arrived, None,
                row_scale, scale, bias,
                BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION, AHEAD, IN_PLACE,
            )  # fmt: skip


@pk.kernel
def matmul_all_reduce_ordered(
    a: pk.Global,  # (M, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N), or (N, K) with B_T
    c: pk.Parallel = None,  # (M, N)  on every rank; receives the sum
    out: pk.Global = None,  # (M, N)  the same in ordinary memory, in place of c
    row_scale: pk.Global = None, scale: pk.Global = None, bias: pk.Global = None,  # (M, 1) (1, N) (1, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, P: pk.constexpr = 64,
    STAGES: pk.constexpr = 3, OUTS: pk.constexpr = 2, WARPGROUPS: pk.constexpr = 2, PINGPONG: pk.constexpr = False,
    GROUP: pk.constexpr = 8, LAG: pk.constexpr = 80, STEPS: pk.constexpr = 66, SHIFT: pk.constexpr = 1,
    PARTS: pk.constexpr = 3, AHEAD: pk.constexpr = 2, PR: pk.constexpr = 32, BY_COLS: pk.constexpr = False,
    IN_PLACE: pk.constexpr = False, B_T: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a @ b * scales + bias), on every rank.

    Row tiles (with BY_COLS: column tiles) belong to ranks in turn.  As in the reduce-scatter, but the storer sends the
    finished tile to every rank.  Into ``out``, which peers cannot reach, a warp of every block takes it from there.
    """
    c, out, peers = (c, None, None) if out is None else (out, out, pk.scratch((a.rows, out.cols), out.dtype))
    inputs, output, vectors = pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, B_T)
    parts = pk.pipeline(PARTS, c=pk.shared((BM, P), c.dtype))
    changed = pk.pipeline(over=parts) if IN_PLACE else output
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    owned_rows, owned_cols = (rows, pk.cdiv(cols, W)) if BY_COLS else (pk.cdiv(rows, W), cols)
    owned = owned_rows * owned_cols
    lag = pk.min(LAG, owned)
    part = pk.scratch((a.rows, c.cols), c.dtype)
    arrived = pk.signals(rows, cols)
    done = None if out is None else pk.signals(rows, cols)  # the tile is in this rank's `peers`
    if out is not None:
        with pk.communicator():
            for t, turn in pk.tasks(owned, W - 1, group=1):
                m, n = owned_tile(t, (me + 1 + turn) % W, owned_rows, owned_cols, GROUP, BY_COLS)
                if m < rows and n < cols:
                    pk.wait(done, (m, n), 1)
                    take_tile(out, peers[me], m, n, BM, BN, PR, P)
    for step, turn in pk.tasks(owned + lag, W, group=1):
        owner = owner_of(step, turn, STEPS, SHIFT)
        t = step - lag if owner == me else step
        if t >= 0 and t < owned:
            m, n = owned_tile(t, owner, owned_rows, owned_cols, GROUP, BY_COLS)
            if m < rows and n < cols:
                summed_tile(
                    inputs, changed, vectors, parts, a, (m,), b, c, peers, m, n, owner, part, arrived, done,
                    row_scale, scale, bias,
                    BM, BN, BK, P, WARPGROUPS, PINGPONG, B_T, ACTIVATION, AHEAD, IN_PLACE,
                )  # fmt: skip
