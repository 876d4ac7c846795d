"""Kernels with scheduling options, which never change what a kernel computes; ``while``; choices between tensors."""
# mypy: ignore-errors

import pk


@pk.kernel
def multiply(
    a: pk.Global, b: pk.Global, c: pk.Global, BM: pk.constexpr = 64, BN: pk.constexpr = 64, BK: pk.constexpr = 64,
    G: pk.constexpr = 1, DYNAMIC: pk.constexpr = False, CLUSTER: pk.constexpr = 1,
    PINGPONG: pk.constexpr = False, STAGGER: pk.constexpr = False,
):  # fmt: skip
    inputs = pk.pipeline(3, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(2, c=pk.shared((BM, BN), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN), dynamic=DYNAMIC, cluster=CLUSTER):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=G, pingpong=PINGPONG, stagger=STAGGER):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    pk.mma(acc, s.a, s.b)
            with output.fill() as t:
                pk.store(t.c, acc)
        with pk.storer():
            with output.drain() as t:
                pk.store_async(c, t.c, (m, n))


@pk.kernel
def collatz(x: pk.Global, y: pk.Global, WHERE: pk.constexpr = "storer"):
    """y = how many steps x takes to 1, int32 (n,): ``while`` on a loaded value, in a role and in shared code."""
    for i in pk.tasks(x.cols):
        if WHERE == "shared":
            v, steps = pk.load(x, i), 0
            while v > 1:
                v = v // 2 if v % 2 == 0 else 3 * v + 1
                steps = steps + 1
            with pk.storer():
                pk.store(y, steps, i)
        if WHERE == "storer":
            with pk.storer():
                v, steps = pk.load(x, i), 0
                while v > 1:
                    v = v // 2 if v % 2 == 0 else 3 * v + 1
                    steps = steps + 1
                pk.store(y, steps, i)
        if WHERE == "team":
            v, steps = pk.load(x, i), 0
            while v > 1:
                v = v // 2 if v % 2 == 0 else 3 * v + 1
                steps = steps + 1
            pk.store(y, steps, i)
        if WHERE == "consumer":
            with pk.consumer(warpgroups=1):
                v, steps = pk.load(x, i), 0
                while v > 1:
                    v = v // 2 if v % 2 == 0 else 3 * v + 1
                    steps = steps + 1
                pk.store(y, steps, i)
