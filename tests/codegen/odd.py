"""Kernels that use corners of the language, for the emitter: they are compiled, not run."""

from __future__ import annotations

from pk.ir import nodes as ir
from pk.ir.types import bfloat16, float16, float32
from tests.dsl.reading import read

GEMM = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global, G: pk.constexpr = 2,
      BM: pk.constexpr = 128, BN: pk.constexpr = 128, BK: pk.constexpr = 64, STAGES: pk.constexpr = 3):
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=G):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
            with output.fill() as s:
                pk.store(s.c, acc)
        with pk.storer():
            with output.drain() as s:
                pk.store_async(c, s.c, (m, n))
"""

TRANSPOSED = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global):                      # (K, M) (N, K) (M, N)
    inputs = pk.pipeline(3, a=pk.shared((64, 128), a.dtype), b=pk.shared((128, 64), b.dtype))
    output = pk.pipeline(2, c=pk.shared((128, 32), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, 128), pk.cdiv(c.cols, 128)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.rows, 64)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (k, m))
                    pk.load_async(s.b, b, (n, k))
        with pk.consumer(warpgroups=2):
            acc = pk.zeros((128, 128), pk.float32)
            for k in pk.range(pk.cdiv(a.rows, 64)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a.T, s.b.T)
            for j in pk.static_range(4):
                with output.fill() as s:
                    pk.store(s.c, acc[:, j * 32 : (j + 1) * 32])
        with pk.storer():
            for j in pk.static_range(4):
                with output.drain() as s:
                    pk.store_async(c, s.c, (m, 4 * n + j))
"""

# Arithmetic on tiles, run-time scalars, a query tile held across the key loop, an assert.
EPILOGUE = """
@pk.kernel
def k(x: pk.Global, y: pk.Global, out: pk.Global, scale: float, shift: int):
    held = pk.pipeline(1, q=pk.shared((64, 64), x.dtype))
    parts = pk.pipeline(2, y=pk.shared((64, 64), y.dtype))
    output = pk.pipeline(2, c=pk.shared((64, 64), out.dtype))
    rows = pk.cdiv(x.rows, 64)
    for m in pk.tasks(rows):
        assert shift < rows, "shift is too large"
        with pk.loader():
            with held.fill() as q:
                pk.load_async(q.q, x, (m, 0))
                for i in pk.range(pk.cdiv(y.cols, 64)):
                    with parts.fill() as s:
                        pk.load_async(s.y, y, ((m - shift) % rows, i))
        with pk.consumer(warpgroups=1):
            total = pk.full((64, 64), 1.5)
            with held.drain() as q:
                first = pk.load(q.q)
                for i in pk.range(pk.cdiv(y.cols, 64)):
                    with parts.drain() as s:
                        piece = pk.load(s.y)
                    total = pk.max(total, piece * first) - abs(piece) / 2
            with output.fill() as s:
                pk.store(s.c, -total * scale + pk.zeros((64, 64)) + first)
        with pk.storer():
            with output.drain() as s:
                pk.store_async(out, s.c, (m, 0))
"""

BROADCAST = """
@pk.kernel
def k(x: pk.Global, out: pk.Parallel, flag: pk.constexpr = True):
    ring = pk.pipeline(4, x=pk.shared((320, 64), x.dtype))
    done = pk.signals()
    for p, c in pk.tasks(pk.cdiv(x.rows, 320), pk.cdiv(x.cols, 64)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (p, c))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(out, s.x, (pk.rank(), p, c))
                pk.store_add_async(out[(pk.rank() + 1) % pk.world_size()], s.x, (0, p, c))
            pk.signal_all(done, ())
    with pk.storer():
        pk.wait(done, (), pk.cdiv(x.rows, 320))
"""

TEAM = """
@pk.kernel
def k(x: pk.Global, n: int):
    ready, meet = pk.signals(pk.world_size(), 4), pk.signals(4)
    for i in pk.tasks(n):
        if i % 2 == 0:
            pk.signal(ready, (pk.rank(), i), (pk.rank() + i) % pk.world_size(), 2)
        else:
            pk.wait(ready, (0, i // 2), 1)
        j = i
        for r in pk.range(pk.world_size()):
            j = j + r
        pk.barrier(meet, j % 4)
"""

# A mma that one branch only issues, two accumulators of one stage, and names that C++ or the headers take.
BRANCHES = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global, new: int):
    inputs = pk.pipeline(3, a=pk.shared((128, 64), a.dtype), b=pk.shared((64, 64), b.dtype))
    launch = pk.pipeline(2, c=pk.shared((128, 64), c.dtype))
    for role, task in pk.tasks(pk.cdiv(c.rows, 128), pk.cdiv(c.cols, 128)):
        wait = role + new
        with pk.loader():
            for k in pk.range(wait):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (role, k))
                    if k < new:
                        pk.load_async(s.b, b, (k, task))
        with pk.consumer(warpgroups=2):
            acc, more = pk.zeros((128, 64), pk.float32), pk.zeros((128, 64), pk.float32)
            for k in pk.range(wait):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
                    pk.mma(more, s.a, s.b)
            if task > 0:
                acc = acc + more
            with launch.fill() as s:
                pk.store(s.c, acc)
        with pk.storer():
            with launch.drain() as shared:
                pk.store_async(c, shared.c, (role, task))
"""

# A tile that some tasks do not multiply, and a communicator with a consumer of its own and a team-like wait.
CONDITIONAL = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global, out: pk.Parallel):
    inputs = pk.pipeline(3, a=pk.shared((64, 64), a.dtype), b=pk.shared((64, 128), b.dtype))
    output = pk.pipeline(2, c=pk.shared((64, 128), c.dtype))
    taken, given = pk.pipeline(2, x=pk.shared((128, 64), a.dtype)), pk.pipeline(1, y=pk.shared((128, 64), a.dtype))
    me, done = pk.rank(), pk.signals(pk.cdiv(a.rows, 128))
    with pk.communicator(sms=4):
        for m in pk.tasks(pk.cdiv(a.rows, 128)):
            with pk.loader():
                for r in pk.ranks_from(me + 1):
                    with taken.fill() as s:
                        pk.load_async(s.x, out[r], (m, 0))
            with pk.consumer(warpgroups=2):
                total = pk.zeros((128, 64))
                for r in pk.range(pk.world_size()):
                    with taken.drain() as s:
                        total = total + pk.load(s.x)
                pk.signal(done, m, me)
                with given.fill() as s:
                    pk.store(s.y, total)
            with pk.storer():
                with given.drain() as s:
                    pk.store_async(out[me], s.y, (m, 0))
    for m, n in pk.tasks(pk.cdiv(c.rows, 64), pk.cdiv(c.cols, 128)):
        busy = m % 2 == 0
        with pk.loader():
            if busy:
                for k in pk.range(pk.cdiv(a.cols, 64)):
                    with inputs.fill() as s:
                        pk.load_async(s.a, a, (m, k))
                        pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((64, 128), pk.float32)
            if busy:
                for k in pk.range(pk.cdiv(a.cols, 64)):
                    with inputs.drain() as s:
                        pk.mma(acc, s.a, s.b)
            with output.fill() as s:
                pk.store(s.c, acc)
        with pk.storer():
            pk.wait(done, m // 2, 1)
            with output.drain() as s:
                pk.store_async(c, s.c, (m, n))
"""


def kernels() -> dict[str, ir.Kernel]:
    """Every kernel of this file, built and checked."""
    small = {"G": 1, "BM": 64, "BN": 256}
    return {
        "one warpgroup": read(GEMM, **small),
        "three warpgroups": read(GEMM, G=3, BM=192, BN=192, BK=64),
        "one stage": read(GEMM, STAGES=1),
        "float16": read(GEMM, dtype={"a": float16, "b": float16, "c": float16}),
        "float32 output": read(GEMM, dtype={"c": float32}),
        "narrow": read(GEMM, BN=32, BK=32),
        "transposed": read(TRANSPOSED),
        "epilogue": read(EPILOGUE),
        "broadcast": read(BROADCAST, {"out": 3}, {"x": bfloat16}),
        "team": read(TEAM),
        "branches": read(BRANCHES),
        "conditional": read(CONDITIONAL),
    }
