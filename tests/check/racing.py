"""Small kernels with one race each, chosen by ``HOW``; with ``HOW="right"`` they have none."""
# mypy: ignore-errors

import pk


@pk.kernel
def handover(x: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """y := the left neighbour's x (n * 64, 64), through scratch, all by bulk copies."""
    to = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
    back = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
    n = pk.cdiv(x.rows, 64)
    box, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(n)
    right = (pk.rank() + 1) % pk.world_size()
    for i in pk.tasks(n):
        with pk.loader():
            with to.fill() as s:
                pk.load_async(s.t, x, (i, 0))
            if HOW != "no wait":
                pk.wait(sent, i, 1)  # [wait]
            with back.fill() as s:
                pk.load_async(s.t, box[pk.rank()], (i, 0))  # [read]
        with pk.storer():
            if HOW == "signal first":
                pk.signal(sent, i, right)
            with to.drain() as s:
                pk.store_async(box[right], s.t, (i, 0))  # [write]
            if HOW != "signal first":
                pk.signal(sent, i, right)
            with back.drain() as s:
                if HOW == "write again":
                    pk.store_async(box[right], s.t, (i, 0))  # [again]
                pk.store_async(y, s.t, (i, 0))


@pk.kernel
def sums(x: pk.Global, y: pk.Parallel, HOW: pk.constexpr = "right"):
    """y (64, 64) of rank 0 := the sum of every rank's x, of which rank 0's comes first."""
    ring = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
    begun, me = pk.signals(1), pk.rank()
    for i in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (0, 0))
        with pk.storer():
            if me > 0 and HOW != "no wait":
                pk.wait(begun, 0, 1)
            with ring.drain() as s:
                if me == 0 and HOW != "adds only":
                    pk.store_async(y[0], s.t, (0, 0))  # [write]
                else:
                    pk.store_add_async(y[0], s.t, (0, 0))  # [add]
            if me == 0:
                pk.signal_all(begun, 0)


@pk.kernel
def counted(x: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """y (1, 32) := the sum of row 0 of every rank's box, which all ranks have written; registers only."""
    me, W = pk.rank(), pk.world_size()
    box, sent = pk.scratch((W, 32), pk.float32), pk.signals(1)
    for i in pk.tasks(1):
        mine = pk.load(x, (0, 0), (1, 32))
        for r in pk.range(W):
            pk.store(box[r], mine, (me, 0))  # [write]
        pk.signal_all(sent, 0)
        if HOW == "one less":
            pk.wait(sent, 0, W - 1)
        else:
            pk.wait(sent, 0, W)
        total = pk.load(box[me], (0, 0), (1, 32))  # [read]
        for r in pk.range(1, W):
            total = total + pk.load(box[me], (r, 0), (1, 32))  # [read others]
        pk.store(y, total, (0, 0))
        if HOW == "cleared":
            for r in pk.range(W):
                pk.store(box[r], pk.full((1, 32), 0.0, pk.float32), (me, 0))  # [clear]


@pk.kernel
def by_pipeline(x: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """The consumer stores to a tensor, and the storer of its block reads it there: a pipeline does not order that."""
    ring, done = pk.pipeline(2, t=pk.shared((64, 64), x.dtype)), pk.signals(1)
    box = pk.scratch((64, 64), pk.float32)
    for i in pk.tasks(1):
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((64, 64), pk.float32)
            pk.store(box[pk.rank()], acc, (0, 0))  # [write]
            if HOW == "right":
                pk.signal(done, 0, pk.rank())
            with ring.fill() as s:
                pk.store(s.t, acc)
        with pk.storer():
            if HOW == "right":
                pk.wait(done, 0, 1)
            with ring.drain() as s:
                found = pk.load(box[pk.rank()], (0, 0))  # [read]
                if found == 0.0:
                    pk.store_async(y, s.t, (0, 0))


@pk.kernel
def last_arriver(x: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """y (32,) := the sum over rows of x (n, 32), stored row by row; whoever comes last adds them up."""
    n, me = x.shape[0], pk.rank()
    parts, done = pk.scratch((n, 32), pk.float32), pk.signals(1)
    for i in pk.tasks(n, dynamic=True):
        pk.store(parts[me], pk.load(x, (i, 0), (1, 32)), (i, 0))  # [write]
        if pk.fetch_add(done, 0, 1) == (n - 1 if HOW == "right" else n - 2):
            total = pk.load(parts[me], (0, 0), (1, 32))  # [read]
            for r in pk.range(1, n):
                total = total + pk.load(parts[me], (r, 0), (1, 32))  # [read others]
            pk.store(y, total, (0, 0))


@pk.kernel
def by_lane(at: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """Elements to the right neighbour, each with a signal of its own; y (32,) := what came."""
    right = (pk.rank() + 1) % pk.world_size()
    box, sent = pk.scratch((32,), pk.int32), pk.signals(32)
    for t in pk.tasks(1):
        i = pk.iota((32,))
        if HOW == "signal first":
            pk.signal(sent, i, right)
        pk.store(box, pk.load(at, 0, (32,)), i, rank=right)  # [write]
        if HOW != "signal first":
            pk.signal(sent, i, right)
        pk.wait(sent, i, 1)
        pk.store(y, pk.load(box[pk.rank()], i), i)  # [read]


@pk.kernel
def own_store(x: pk.Global, y: pk.Global, HOW: pk.constexpr = "right"):
    """A storer reads what it has just stored by a bulk copy."""
    ring, done = pk.pipeline(2, t=pk.shared((64, 64), x.dtype)), pk.signals(1)
    for i in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (0, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.t, (0, 0))  # [write]
            pk.signal(done, 0, pk.rank())
            if HOW == "right":
                pk.wait(done, 0, 1)
            found = pk.load(y, (0, 0))  # [read]
            assert found == found, "NaN"


@pk.kernel
def pull(x: pk.Parallel, y: pk.Global):
    """y := the right neighbour's x (64, 64): that rank's launch must not end before."""
    ring = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
    for i in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x[(pk.rank() + 1) % pk.world_size()], (0, 0))  # [read]
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.t, (0, 0))


@pk.kernel
def by_turns(x: pk.Global, y: pk.Global, phase: int):
    """Phase 0: push to the neighbour's scratch, unobserved.  Phase 1: use one's own scratch, without meeting a peer."""
    box, me = pk.scratch((1, 32), pk.float32), pk.rank()
    for i in pk.tasks(1):
        mine = pk.load(x, (0, 0), (1, 32))
        if phase == 0:
            pk.store(box[(me + 1) % pk.world_size()], mine, (0, 0))  # [push]
        else:
            pk.store(box[me], mine, (0, 0))  # [own]
        pk.store(y, mine, (0, 0))
