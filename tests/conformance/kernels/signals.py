"""Kernels that meet: signals from every role that may signal, waits in every role, scratch, communicators."""
# mypy: ignore-errors

import pk


@pk.kernel
def relay(x: pk.Global, out: pk.Global, R: pk.constexpr = 32, C: pk.constexpr = 64, WAIT: pk.constexpr = "loader"):
    """out = x of the left neighbour, through scratch: storer signals, ``WAIT`` waits."""
    ring, back = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    slot = pk.scratch((x.rows, x.cols), x.dtype)
    landed = pk.signals(rows, cols)
    for m, n in pk.tasks(rows, cols):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, n))
        with pk.storer():
            right = (me + 1) % W
            with ring.drain() as s:
                pk.store_async(slot[right], s.x, (m, n))
            pk.signal(landed, (m, n), right, 3)
    for m, n in pk.tasks(rows, cols):
        if WAIT == "shared":
            pk.wait(landed, (m, n), 3)
        with pk.loader():
            if WAIT == "loader":
                pk.wait(landed, (m, n), 3)
            with back.fill() as s:
                pk.load_async(s.x, slot[me], (m, n))
        with pk.storer():
            with back.drain() as s:
                pk.store_async(out, s.x, (m, n))


@pk.kernel
def credits(x: pk.Global, out: pk.Global, R: pk.constexpr = 64, C: pk.constexpr = 32):
    """x (steps, R, C) goes right through two slots of scratch; the consumer gives the slot back with a signal."""
    ring, back = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    output = pk.pipeline(1, y=pk.shared((R, C), x.dtype))
    me, W = pk.rank(), pk.world_size()
    slots = pk.scratch((2, x.rows, x.cols), x.dtype)
    full, free = pk.signals(x.depth), pk.signals(2)
    for step in pk.tasks(x.depth):
        left, right, slot = (me - 1) % W, (me + 1) % W, step % 2
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (step, 0, 0))
        with pk.storer():
            pk.wait(free, slot, step // 2)  # taken as often as it was filled
            with ring.drain() as s:
                pk.store_async(slots[right], s.x, (slot, 0, 0))
            pk.signal(full, step, right)
        with pk.loader():
            pk.wait(full, step, 1)
            with back.fill() as s:
                pk.load_async(s.x, slots[me], (slot, 0, 0))
        with pk.consumer(warpgroups=1):
            with back.drain() as s:
                r = pk.load(s.x)
            pk.signal(free, slot, left)
            with output.fill() as t:
                pk.store(t.y, r * 2.0)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(out, t.y, (step, 0, 0))


@pk.kernel
def meet(x: pk.Global, out: pk.Global, R: pk.constexpr = 32, C: pk.constexpr = 64,
         ROLE: pk.constexpr = "storer", HOW: pk.constexpr = "barrier"):  # fmt: skip
    """x (world, rows, cols) -> out: all to all through scratch; ``ROLE`` tells everybody, in the way ``HOW``."""
    ring, back = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    buf = pk.scratch((W, x.rows, x.cols), x.dtype)
    sent, met = pk.signals(), pk.signals(1, 2)
    if ROLE == "team":
        with pk.communicator(sms=1):
            pk.wait(sent, (), rows * cols)
            if HOW == "barrier":
                pk.barrier(met, (0, 1))
            elif HOW == "signal_all":
                pk.signal_all(met, (0, 1))
            else:
                for r in pk.ranks_from(me):
                    pk.signal(met, (0, 1), r)
    for m, n in pk.tasks(rows, cols):
        with pk.loader():
            for r in pk.range(W):
                with ring.fill() as s:
                    pk.load_async(s.x, x, (r, m, n))
        with pk.storer():
            for r in pk.range(W):
                with ring.drain() as s:
                    pk.store_async(buf[r], s.x, (me, m, n))
            pk.signal(sent, (), me)
    for once in pk.tasks(1):
        if ROLE == "storer":
            with pk.storer():
                pk.wait(sent, (), rows * cols)
                if HOW == "barrier":
                    pk.barrier(met, (0, 1))
                elif HOW == "signal_all":
                    pk.signal_all(met, (0, 1))
                else:
                    for r in pk.ranks_from(me):
                        pk.signal(met, (0, 1), r)
        if ROLE == "consumer":
            with pk.consumer(warpgroups=1):
                pk.wait(sent, (), rows * cols)
                if HOW == "barrier":
                    pk.barrier(met, (0, 1))
                elif HOW == "signal_all":
                    pk.signal_all(met, (0, 1))
                else:
                    for r in pk.ranks_from(me):
                        pk.signal(met, (0, 1), r)
    for r, m, n in pk.tasks(W, rows, cols):
        with pk.loader():
            pk.wait(met, (0, 1), W)
            with back.fill() as s:
                pk.load_async(s.x, buf[me], (r, m, n))
        with pk.storer():
            with back.drain() as s:
                pk.store_async(out, s.x, (r, m, n))


@pk.kernel
def gather(x: pk.Global, out: pk.Global, SMS: pk.constexpr = 2, R: pk.constexpr = 32, C: pk.constexpr = 64):
    """out (world, rows, cols): communicators push x into scratch, compute blocks copy it out as it comes."""
    ring, back = pk.pipeline(2, x=pk.shared((R, C), x.dtype)), pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    full = pk.scratch((W, x.rows, x.cols), x.dtype)
    ready = pk.signals(W, rows)
    with pk.communicator(sms=SMS):
        for m, n in pk.tasks(rows, cols, group=1):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.x, x, (m, n))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_async(full, s.x, (me, m, n))
                pk.signal_all(ready, (me, m), 2)
    for i, m, n in pk.tasks(pk.ranks_from(me), rows, cols, group=1):
        with pk.loader():
            pk.wait(ready, (i, m), 2 * cols)
            with back.fill() as s:
                pk.load_async(s.x, full[me], (i, m, n))
        with pk.storer():
            with back.drain() as s:
                pk.store_async(out, s.x, (i, m, n))


@pk.kernel
def gather_by_warps(x: pk.Global, out: pk.Global, R: pk.constexpr = 32, C: pk.constexpr = 64):
    """The same as ``gather``, with communicator warps; every second push scales the tile in registers first."""
    back = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    full = pk.scratch((W, x.rows, x.cols), x.dtype)
    ready = pk.signals(W, rows)
    with pk.communicator():
        for m, n in pk.tasks(rows, cols, group=1):
            for i in pk.range(R // 8):
                if (m + n) % 2 == 0:
                    t = pk.load(x, (m * (R // 8) + i, n), (8, C))
                    for r in pk.ranks_from(me):
                        pk.store(full[r], t, (me, m * (R // 8) + i, n))
                else:
                    half = pk.load(x, (m * (R // 8) + i, n), (8, C)) * 0.5
                    pk.store(full, half + half, (me, m * (R // 8) + i, n))
            pk.signal_all(ready, (me, m), 2)
    for i, m, n in pk.tasks(pk.ranks_from(me), rows, cols, group=1):
        with pk.loader():
            pk.wait(ready, (i, m), 2 * cols)
            with back.fill() as s:
                pk.load_async(s.x, full[me], (i, m, n))
        with pk.storer():
            with back.drain() as s:
                pk.store_async(out, s.x, (i, m, n))


@pk.kernel
def first_then_add(x: pk.Global, out: pk.Parallel, R: pk.constexpr = 32, C: pk.constexpr = 64):
    """x (world, rows, cols), out (rows, cols): the owner stores and says so, the others wait and add."""
    ring = pk.pipeline(2, x=pk.shared((R, C), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, R), pk.cdiv(x.cols, C)
    begun = pk.signals(W, rows, cols, 1)
    for owner, m, n in pk.tasks(pk.ranks_from(me), rows, cols):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (owner, m, n))
        with pk.storer():
            if owner != me:
                pk.wait(begun, (owner, m, n, 0), 1)
            with ring.drain() as s:
                if owner == me:
                    pk.store_async(out[me], s.x, (m, n))
                else:
                    pk.store_add_async(out[owner], s.x, (m, n))
            if owner == me:
                pk.signal_all(begun, (me, m, n, 0))
