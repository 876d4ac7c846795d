"""The kernels of the tensor-parallel operators.  ``examples/`` shows them in plain form.

A row block of the operand or of the result belongs to a rank.  What crosses between ranks is rounded to the result's
dtype once for each rank's partial sum; sums are made in float32 and in one order, so results have the same bits on
every run.  Scales and bias are vectors that may be missing.

A tile of the result is BM x BN.  With TURNED its transpose is computed, and stored transposed, in pieces of P rows;
else pieces have P columns.  A tile of 192 x 128 turned reads shared memory as one of 128 x 192 does, and writes rows of
128 elements, where pieces of 32 columns, which is what fits beside it, would be 64 bytes of a row.  Its vectors lie the
other way: ``row_scale`` (W, 1, M/W) or (1, M), ``scale`` and ``bias`` (N, 1).
"""

import pk
from pk.ops.product import accumulate_part, activated, feed_vectors, product_pipes


@pk.function
def pipes(a, b, c, row_scale, scale, bias, SHAPE, STAGES, OUTS):
    """Pipelines of operand tiles, of output pieces, and of what the epilogue reads along the accumulator's columns.

    SHAPE: what all roles of a tile must know of it, BM, BN, BK, P, B_T, TURNED, ACTIVATION.
    """
    BM, BN, BK, P, B_T, TURNED, _ = SHAPE
    if TURNED:
        return product_pipes(b, a, c, row_scale, None, BN, BM, BK, P, STAGES, OUTS, not B_T, True, True)
    return product_pipes(a, b, c, scale, bias, BM, BN, BK, P, STAGES, OUTS, False, B_T, False)


@pk.function
def feed_rows(inputs, a, row, b, n, K, SHAPE):
    """Loader's half: the tiles of A at ``row`` and of B at column tile ``n``, along K."""
    _, _, BK, _, B_T, TURNED, _ = SHAPE
    for k in pk.range(pk.cdiv(K, BK)):
        with inputs.fill() as s:
            pk.load_async(s.b if TURNED else s.a, a, (*row, k))
            pk.load_async(s.a if TURNED else s.b, b, (n, k) if B_T else (k, n))


@pk.function
def feed_along(vectors, row_scale, scale, bias, row, n, TURNED):
    """The same of the epilogue's vectors."""
    if TURNED:
        feed_vectors(vectors, row_scale, None, (*row[:-1], 0, row[-1]))
    else:
        feed_vectors(vectors, scale, bias, (0, n))


@pk.function
def multiplied(inputs, K, SHAPE):
    """Consumer's half: the float32 sum over K, (BM, BN), or (BN, BM) if TURNED."""
    BM, BN, BK, _, B_T, TURNED, _ = SHAPE
    if TURNED:
        return accumulate_part(inputs, 0, pk.cdiv(K, BK), BN, BM, not B_T, True)
    return accumulate_part(inputs, 0, pk.cdiv(K, BK), BM, BN, False, B_T)


@pk.function
def along_rows(row_scale, scale, bias, row, n, SHAPE):
    """What the epilogue multiplies by and adds along the accumulator's rows, in registers: None without."""
    BM, BN, _, _, _, TURNED, _ = SHAPE
    if TURNED:
        factor = None if scale is None else pk.load(scale, (n, 0), (BN, 1))
        return factor, None if bias is None else pk.load(bias, (n, 0), (BN, 1))
    return None if row_scale is None else pk.load(row_scale, (*row, 0), (BM, 1)), None


@pk.function
def piece_at(row, n, j, SHAPE):
    """Where piece ``j`` of the tile at ``row`` and column tile ``n`` lies."""
    BM, BN, _, P, _, TURNED, _ = SHAPE
    if TURNED:
        return (*row[:-1], row[-1] * (BM // P) + j, n)
    return (*row, n * (BN // P) + j)


@pk.function
def pieces_of(SHAPE):
    """Pieces of a tile."""
    BM, BN, _, P, _, TURNED, _ = SHAPE
    return (BM if TURNED else BN) // P


@pk.function
def feed_piece(parts, part, at):
    """Storer's half of a sum: the other ranks' partial sums of a piece, from their memory, rank by rank."""
    for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
        with parts.fill() as s:
            pk.load_async(s.c, part[r], at)


@pk.function
def scaled(r, factor, scale, start, stop):
    """A piece by row and column scales; ``scale``: a shared tile (1, BN) or None."""
    if factor is not None:
        r = r * factor
    if scale is not None:
        r = r * pk.load(scale)[:, start:stop]
    return r


@pk.function
def finished(r, offset, bias, start, stop, ACTIVATION):
    """A piece whose sum is complete, with bias, one of the two or neither, and activation."""
    if offset is not None:
        r = r + offset
    if bias is not None:
        r = r + pk.load(bias)[:, start:stop]
    return activated(r, ACTIVATION)


@pk.function
def epilogue(output, acc, parts, factor, offset, scale, bias, last, SHAPE):
    """Consumer's epilogue in pieces: scales, then, if this rank is the ``last`` to touch the tile, the others' partial
    sums, bias and activation.  ``scale``, ``bias``: shared tiles along the accumulator's columns or None.
    """
    _, _, _, P, _, TURNED, ACTIVATION = SHAPE
    for j in pk.static_range(pieces_of(SHAPE)):
        r = acc[:, j * P : (j + 1) * P]
        r = scaled(r, factor, scale, j * P, (j + 1) * P)
        if last:
            if parts is not None:
                for _ in pk.range(pk.world_size() - 1):
                    with parts.drain() as s:
                        r = r + pk.load(s.c.T if TURNED else s.c)
            r = finished(r, offset, bias, j * P, (j + 1) * P, ACTIVATION)
        with output.fill() as s:
            pk.store(s.c.T if TURNED else s.c, r)


@pk.function
def epilogue_in_place(output, acc, parts, factor, offset, scale, bias, last, SHAPE):
    """The same where ``output`` is over ``parts``: each piece replaces the last partial sum that it adds."""
    _, _, _, P, _, TURNED, ACTIVATION = SHAPE
    for j in pk.static_range(pieces_of(SHAPE)):
        r = acc[:, j * P : (j + 1) * P]
        r = scaled(r, factor, scale, j * P, (j + 1) * P)
        for _ in pk.range(parts_before(last)):
            with parts.drain() as s:
                r = r + pk.load(s.c.T if TURNED else s.c)
                with output.fill():
                    pass
        with parts.drain() as s:
            if last:
                if pk.world_size() > 1:
                    r = r + pk.load(s.c.T if TURNED else s.c)
                r = finished(r, offset, bias, j * P, (j + 1) * P, ACTIVATION)
            with output.fill() as t:
                pk.store(t.c.T if TURNED else t.c, r)


@pk.function
def parts_before(last):
    """Partial sums of a piece but for the last one, in whose stage the result is."""
    return pk.max(pk.world_size() - 2, 0) if last else 0


@pk.function
def finish_rows(output, acc, parts, vectors, row_scale, scale, bias, rows, last, SHAPE, IN_PLACE=False):
    """The epilogue, with the vectors of this column tile in shared memory if there are any; ``rows``: those along the
    accumulator's rows.
    """
    TURNED, (factor, offset) = SHAPE[5], rows
    body = epilogue_in_place if IN_PLACE else epilogue
    if vectors is None:
        body(output, acc, parts, factor, offset, None, None, last, SHAPE)
    else:
        with vectors.drain() as v:
            scales = None if (row_scale if TURNED else scale) is None else v.scale
            added = None if TURNED or bias is None else v.bias
            body(output, acc, parts, factor, offset, scales, added, last, SHAPE)


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
def put_rows(output, dst, row, n, SHAPE):
    """Storer's half: write the pieces of column tile ``n`` at ``row``."""
    for j in pk.static_range(pieces_of(SHAPE)):
        with output.drain() as s:
            pk.store_async(dst, s.c, piece_at(row, n, j, SHAPE))


@pk.function
def put_sums(output, parts, part, row, dst, peers, m, n, SHAPE, AHEAD):
    """The same, AHEAD pieces behind their partial sums.  The loader, which has the next tile to load, stays out.
    ``peers``: what every other rank receives the tile in as well, or None.

    More than ``parts`` holds beyond the pieces that ``output`` holds would wait for a consumer that waits for these.
    """
    for j in pk.static_range(min(AHEAD, pieces_of(SHAPE))):
        feed_piece(parts, part, piece_at(row, n, j, SHAPE))
    for j in pk.static_range(pieces_of(SHAPE)):
        if j + AHEAD < pieces_of(SHAPE):
            feed_piece(parts, part, piece_at(row, n, j + AHEAD, SHAPE))
        with output.drain() as s:
            put_finished(s, dst, peers, piece_at((m,), n, j, SHAPE))


@pk.function
def put_finished(s, dst, peers, at):
    """A piece of the result from stage ``s``."""
    pk.store_async(dst, s.c, at)
    if peers is not None:
        for r in pk.ranks_from(pk.rank() + 1, pk.world_size() - 1):
            pk.store_async(peers[r], s.c, at)


@pk.function
def hand_on(output, parts, part, row, dst, peers, m, n, last, SHAPE, AHEAD):
    """Storer's half in place, of own tiles and of others': stages go to the consumer, AHEAD of them, with the partial
    sums that it adds or empty, and come back with what is to be stored.
    """
    me, count, pieces = pk.rank(), parts_before(last) + 1, pieces_of(SHAPE)
    first = pk.min(AHEAD, pieces * count)
    for u in pk.range(first):
        lend(parts, part, piece_at(row, n, u // count, SHAPE), u % count, last)
    for u in pk.range(pieces * count - first):
        take_back(output, part[me], row, dst, peers, m, n, u // count, u % count == count - 1, last, SHAPE)
        v = u + first
        lend(parts, part, piece_at(row, n, v // count, SHAPE), v % count, last)
    for u in pk.range(first):
        v = u + pieces * count - first
        take_back(output, part[me], row, dst, peers, m, n, v // count, v % count == count - 1, last, SHAPE)


@pk.function
def lend(parts, part, at, q, last):
    """A stage for the consumer, with the partial sum of the q-th rank behind this one."""
    with parts.fill() as s:
        if last and pk.world_size() > 1:
            pk.load_async(s.c, part[(pk.rank() + 1 + q) % pk.world_size()], at)


@pk.function
def take_back(output, mine, row, dst, peers, m, n, j, whole, last, SHAPE):
    """A stage from the consumer, which holds piece ``j`` if it is ``whole``."""
    with output.drain() as s:
        if whole:
            if last:
                put_finished(s, dst, peers, piece_at((m,), n, j, SHAPE))
            else:
                pk.store_async(mine, s.c, piece_at(row, n, j, SHAPE))


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
    SHAPE, WARPGROUPS, PINGPONG, AHEAD, IN_PLACE=False,
):  # fmt: skip
    """All roles' halves of a tile of a sum over ranks: A and partial sums at ``row``, C at ``m``.  Its owner adds the
    partial sums that the others have in ``part`` and writes ``c``, and ``peers`` (with a signal ``done``) if not None.

    The owner fetches them.  Sent to it, they leave faster than the link takes them whenever the blocks end tiles
    together, and an SM whose stores are held up does not load either: 3 to 14 % of the time on two H200s.
    """
    me, W = pk.rank(), pk.world_size()
    last = owner == me
    with pk.loader():
        feed_rows(inputs, a, row, b, n, a.cols, SHAPE)
        feed_along(vectors, row_scale, scale, bias, row, n, SHAPE[5])
    with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
        rows = along_rows(row_scale, scale, bias, row, n, SHAPE)
        acc = multiplied(inputs, a.cols, SHAPE)
        finish_rows(output, acc, parts, vectors, row_scale, scale, bias, rows, last, SHAPE, IN_PLACE)
    with pk.storer():
        if IN_PLACE:
            if last:
                pk.wait(arrived, (m, n), W - 1)
            hand_on(output, parts, part, row, c, peers, m, n, last, SHAPE, AHEAD)
            if owner != me:
                pk.signal(arrived, (m, n), owner)
            elif peers is not None:
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(done, (m, n), r)
        elif last:
            pk.wait(arrived, (m, n), W - 1)
            put_sums(output, parts, part, row, c, peers, m, n, SHAPE, AHEAD)
            if peers is not None:
                for r in pk.ranks_from(me + 1, W - 1):
                    pk.signal(done, (m, n), r)
        else:
            put_rows(output, part[me], row, n, SHAPE)
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
    GROUP: pk.constexpr = 8, B_T: pk.constexpr = False, TURNED: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
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
    SHAPE = BM, BN, BK, P, B_T, TURNED, ACTIVATION
    inputs, output, vectors = pipes(x, b, c, row_scale, scale, bias, SHAPE, STAGES, OUTS)
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
                feed_rows(inputs, x, (m,), b, n, x.cols, SHAPE)
            else:
                pk.wait(ready, (owner, m), parts)
                feed_rows(inputs, full[me], (owner, m), b, n, x.cols, SHAPE)
            feed_along(vectors, row_scale, scale, bias, (owner, m), n, TURNED)
        with pk.consumer(warpgroups=WARPGROUPS, pingpong=PINGPONG):
            along = along_rows(row_scale, scale, bias, (owner, m), n, SHAPE)
            acc = multiplied(inputs, x.cols, SHAPE)
            finish_rows(output, acc, None, vectors, row_scale, scale, bias, along, True, SHAPE)
        with pk.storer():
            put_rows(output, c, (owner, m), n, SHAPE)


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
    TURNED: pk.constexpr = False, ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a[me] @ b * scales + bias).

    Partial sums stay in scratch, from where the owner adds them to its accumulator: nothing needs zeroing, and the
    output is ordinary memory.  A step computes one tile of every other owner, and of the own ones that of LAG steps
    ago, whose partial sums are there by then: so the links are busy all the time, not in the last steps only.
    """
    SHAPE = BM, BN, BK, P, B_T, TURNED, ACTIVATION
    inputs, output, vectors = pipes(a, b, c, row_scale, scale, bias, SHAPE, STAGES, OUTS)
    parts = pk.pipeline(PARTS, c=pk.shared((P, BN) if TURNED else (BM, P), c.dtype))
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
                row_scale, scale, bias, SHAPE, WARPGROUPS, PINGPONG, AHEAD, IN_PLACE,
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
    IN_PLACE: pk.constexpr = False, B_T: pk.constexpr = False, TURNED: pk.constexpr = False,
    ACTIVATION: pk.constexpr = "none",
):  # fmt: skip
    """c = activation(sum over ranks of a @ b * scales + bias), on every rank.

    Row tiles (with BY_COLS: column tiles) belong to ranks in turn.  As in the reduce-scatter, but the storer sends the
    finished tile to every rank.  Into ``out``, which peers cannot reach, a warp of every block takes it from there.
    """
    c, out, peers = (c, None, None) if out is None else (out, out, pk.scratch((a.rows, out.cols), out.dtype))
    SHAPE = BM, BN, BK, P, B_T, TURNED, ACTIVATION
    inputs, output, vectors = pipes(a, b, c, row_scale, scale, bias, SHAPE, STAGES, OUTS)
    parts = pk.pipeline(PARTS, c=pk.shared((P, BN) if TURNED else (BM, P), c.dtype))
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
                    take_tile(out, peers[me], m, n, BM, BN, PR, BN if TURNED else P)
    for step, turn in pk.tasks(owned + lag, W, group=1):
        owner = owner_of(step, turn, STEPS, SHIFT)
        t = step - lag if owner == me else step
        if t >= 0 and t < owned:
            m, n = owned_tile(t, owner, owned_rows, owned_cols, GROUP, BY_COLS)
            if m < rows and n < cols:
                summed_tile(
                    inputs, changed, vectors, parts, a, (m,), b, c, peers, m, n, owner, part, arrived, done,
                    row_scale, scale, bias, SHAPE, WARPGROUPS, PINGPONG, AHEAD, IN_PLACE,
                )  # fmt: skip
