"""The kernels of ``primitives.py``, in the tile language.

Bandwidth kernels move tiles of (R, 64) bfloat16, R * 128 bytes that are contiguous in a tensor with 64 columns: R is
the message size.  Every rank writes to (or reads from) the rank to its right, itself if it is alone.
"""

import pk


@pk.kernel
def store(x: pk.Global, y: pk.Parallel, repeats: int, R: pk.constexpr = 256, STAGES: pk.constexpr = 4):
    """TMA store alone: block b reads tile b of x once and stores it to tiles b, b + blocks, ... of the right's y."""
    ring = pk.pipeline(1, t=pk.shared((R, 64), x.dtype))
    right, blocks = (pk.rank() + 1) % pk.world_size(), x.rows // R
    for b in pk.tasks(blocks):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (b, 0))
        with pk.storer():
            with ring.drain() as s:
                for i in pk.range(repeats):
                    pk.store_async(y[right], s.t, (i * blocks + b, 0))


@pk.kernel
def store_add(x: pk.Global, y: pk.Parallel, repeats: int, R: pk.constexpr = 256, STAGES: pk.constexpr = 4):
    """As ``store``, adding."""
    ring = pk.pipeline(1, t=pk.shared((R, 64), x.dtype))
    right, blocks = (pk.rank() + 1) % pk.world_size(), x.rows // R
    for b in pk.tasks(blocks):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (b, 0))
        with pk.storer():
            with ring.drain() as s:
                for i in pk.range(repeats):
                    pk.store_add_async(y[right], s.t, (i * blocks + b, 0))


@pk.kernel
def copy(x: pk.Global, y: pk.Parallel, R: pk.constexpr = 256, STAGES: pk.constexpr = 4):
    """The right's y = x: TMA load from here, TMA store to there."""
    ring = pk.pipeline(STAGES, t=pk.shared((R, 64), x.dtype))
    right = (pk.rank() + 1) % pk.world_size()
    for m in pk.tasks(x.rows // R):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (m, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y[right], s.t, (m, 0))


@pk.kernel
def load(
    x: pk.Global, y: pk.Parallel, R: pk.constexpr = 256, STAGES: pk.constexpr = 4, KEEP: pk.constexpr = False
):  # fmt: skip
    """TMA load of the right's y; x = y if KEEP, else what was loaded is dropped."""
    ring = pk.pipeline(STAGES, t=pk.shared((R, 64), x.dtype))
    right = (pk.rank() + 1) % pk.world_size()
    for m in pk.tasks(y.rows // R):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, y[right], (m, 0))
        with pk.storer():
            with ring.drain() as s:
                if KEEP:
                    pk.store_async(x, s.t, (m, 0))


@pk.kernel
def register_store(x: pk.Global, y: pk.Parallel, R: pk.constexpr = 64):
    """The right's y = x through registers: 16-byte loads here, 16-byte stores there."""
    right = (pk.rank() + 1) % pk.world_size()
    for m in pk.tasks(x.rows // R):
        r = pk.load(x, (m, 0), (R, 64))
        pk.store(y[right], r, (m, 0))


@pk.kernel
def register_load(x: pk.Global, y: pk.Parallel, R: pk.constexpr = 64):
    """x = the right's y through registers: 16-byte loads there, 16-byte stores here."""
    right = (pk.rank() + 1) % pk.world_size()
    for m in pk.tasks(y.rows // R):
        r = pk.load(y[right], (m, 0), (R, 64))
        pk.store(x, r, (m, 0))


@pk.kernel
def nothing(x: pk.Global):
    """A launch and no work."""
    for _ in pk.tasks(0 * x.rows):
        with pk.storer():
            pass


@pk.kernel
def meet(x: pk.Parallel):
    """A launch and no work, but for entry and exit words: a tile at every rank would be written if there were one."""
    ring = pk.pipeline(1, t=pk.shared((16, 64), x.dtype))
    for _ in pk.tasks(0 * x.rows):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x[pk.rank()], (0, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(x[(pk.rank() + 1) % pk.world_size()], s.t, (0, 0))


@pk.kernel
def handshakes(x: pk.Global, count: int):
    """Loader and storer of one block pass an empty stage to and fro ``count`` times: two mbarrier hops each."""
    ring = pk.pipeline(1, t=pk.shared((16, 64), x.dtype))
    for _ in pk.tasks(1):
        with pk.loader():
            for _ in pk.range(count):
                with ring.fill() as s:
                    pass
        with pk.storer():
            for _ in pk.range(count):
                with ring.drain() as s:
                    pass


@pk.kernel
def through_memory(x: pk.Global, count: int):
    """Two blocks of one rank signal each other in turn: two hops through the counters in memory each time."""
    turn = pk.signals(2)
    for b in pk.tasks(2):
        with pk.storer():
            for i in pk.range(count):
                if b == 0:
                    pk.signal(turn, 0, pk.rank())
                    pk.wait(turn, 1, i + 1)
                else:
                    pk.wait(turn, 0, i + 1)
                    pk.signal(turn, 1, pk.rank())


@pk.kernel
def ping_pong(x: pk.Global, count: int):
    """Ranks 0 and 1 signal each other in turn."""
    turn = pk.signals(1)
    for _ in pk.tasks(1):
        with pk.storer():
            for i in pk.range(count):
                if pk.rank() == 0:
                    pk.signal(turn, 0, 1)
                    pk.wait(turn, 0, i + 1)
                else:
                    pk.wait(turn, 0, i + 1)
                    pk.signal(turn, 0, 0)


@pk.kernel
def ping_pong_tile(x: pk.Global, y: pk.Parallel, count: int, R: pk.constexpr = 128):
    """As ``ping_pong``, with a tile of R * 128 bytes that arrives before each signal."""
    ring = pk.pipeline(1, t=pk.shared((R, 64), x.dtype))
    turn = pk.signals(1)
    for _ in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (0, 0))
        with pk.storer():
            with ring.drain() as s:
                for i in pk.range(count):
                    if pk.rank() == 0:
                        pk.store_async(y[1], s.t, (i, 0))
                        pk.signal(turn, 0, 1)
                        pk.wait(turn, 0, i + 1)
                    else:
                        pk.wait(turn, 0, i + 1)
                        pk.store_async(y[0], s.t, (i, 0))
                        pk.signal(turn, 0, 0)
