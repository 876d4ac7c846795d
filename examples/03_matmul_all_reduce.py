"""GEMM + all-reduce in one kernel: the sum over ranks of a @ b, whole on every rank.  Two ways.

Every rank holds a slice of the contraction: a (M, K / world) and b (K / world, N).  Row block m of c belongs to rank
m % world.

``matmul_all_reduce``: every rank computes its partial sums in its own c; as soon as all ranks have made a tile, SMs of
its owner read it from every rank, add in float32 in rank order, and write the sum to every rank.  The result has the
same bits in every run.

``matmul_all_reduce_push``: tiles are added into the owner's c while the next ones are computed (TMA does the adding),
and SMs of the owner send a finished tile to the others.  Fewer SMs for communication; the order of the sum varies.

    python examples/03_matmul_all_reduce.py                      4 ranks: on GPUs if there are any, else simulated
    python examples/03_matmul_all_reduce.py --ranks 3 --m 200 --n 264 --k 312
"""

import argparse
import time

import torch

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put, put_add  # the halves of a GEMM, a few lines each


@pk.kernel
def matmul_all_reduce(
    a: pk.Global,  # (M, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N)
    c: pk.Parallel,  # (M, N)  on every rank: its partial sums, then the sum
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4, COMM: pk.constexpr = 16,
):  # fmt: skip
    inputs, output = gemm_pipes(a, b, c, BM, BN, BK, P, STAGES)
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    G = pk.cdiv(8, W)  # row blocks of one owner in a group of the L2-friendly order
    done = pk.signals(rows, cols)  # ranks that have made this tile, counted at its owner

    with pk.communicator(sms=COMM):
        for i, n in pk.tasks(pk.cdiv(rows, W), cols, group=G):  # in the order in which the loop below makes them
            m = i * W + me
            if m < rows:
                pk.wait(done, (m, n), W)
                pk.all_reduce(c, (m, n), shape=(BM, BN))

    for m, n in pk.tasks(rows, cols, group=G * W):
        with pk.loader():
            feed(inputs, a, (m,), b, n, BK)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, a, BM, BN, BK), BN, P)
        with pk.storer():
            put(output, c[me], (m,), n, BN, P)
            pk.signal(done, (m, n), m % W)


@pk.kernel
def matmul_all_reduce_push(
    a: pk.Global,  # (M, K)  this rank's slice of the contraction
    b: pk.Global,  # (K, N)
    c: pk.Parallel,  # (M, N)  on every rank; receives the sum
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4, COMM: pk.constexpr = 8,
):  # fmt: skip
    inputs, output = gemm_pipes(a, b, c, BM, BN, BK, P, STAGES)
    ring = pk.pipeline(3, c=pk.shared((BM, BN), c.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)
    G = pk.cdiv(8, W)
    begun, done = pk.signals(rows, cols), pk.signals(rows, cols)  # holds its first term; ranks that have added to it

    with pk.communicator(sms=COMM):
        for i, n in pk.tasks(pk.cdiv(rows, W), cols, group=G):
            m = i * W + me
            if m < rows:
                with pk.loader():
                    pk.wait(done, (m, n), W)
                    with ring.fill() as s:
                        pk.load_async(s.c, c[me], (m, n))
                with pk.storer():
                    with ring.drain() as s:
                        for r in pk.ranks_from(me + 1, W - 1):
                            pk.store_async(c[r], s.c, (m, n))

    for m, n in pk.tasks(rows, cols, group=G * W):
        owner = m % W
        with pk.loader():
            feed(inputs, a, (m,), b, n, BK)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, a, BM, BN, BK), BN, P)
        with pk.storer():
            if owner == me:
                put(output, c[me], (m,), n, BN, P)
                pk.signal_all(begun, (m, n))
            else:
                pk.wait(begun, (m, n), 1)
                put_add(output, c[owner], (m,), n, BN, P)
            pk.signal(done, (m, n), owner)


KERNELS = {"owner reduces": matmul_all_reduce, "adds, then broadcast": matmul_all_reduce_push}


def operands(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank ``rank``'s slice: a (m, k / world), b (k / world, n), on the CPU, the same on every call."""
    gen = torch.Generator().manual_seed(3000 + rank)
    a = torch.randn(m, k // world, generator=gen) / (k**0.5)
    b = torch.randn(k // world, n, generator=gen)
    return a.to(dtype), b.to(dtype)


def reference(world: int, m: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole sum (m, n) in float64."""
    pairs = (operands(r, world, m, n, k, dtype) for r in range(world))
    return sum((a.double() @ b.double() for a, b in pairs), torch.zeros(m, n, dtype=torch.float64))


def run(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What every rank does: make operands, call the kernels, hand back its copies of the sum (m, n)."""
    a, b = (t.to(pk.device()) for t in operands(rank, world, m, n, k, dtype))
    results = {}
    for name, kernel in KERNELS.items():
        c = pk.empty((m, n), dtype)
        kernel(a, b, c)
        pk.synchronize()
        results[name] = c.cpu().clone()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="GEMM + all-reduce in one kernel")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    world, m, n, k, dtype = args.ranks, args.m, args.n, args.k, getattr(torch, args.dtype)
    if k % world:
        parser.error(f"--k {k} must be a multiple of --ranks {world}: each rank owns an equal slice of the contraction")

    print(f"GEMM + all-reduce, M {m}, N {n}, K {k}, {args.dtype}, {world} ranks, {pk.describe_backend(world)}")
    start = time.perf_counter()
    ranks = pk.spawn(run, world, args=(world, m, n, k, dtype))
    seconds = time.perf_counter() - start
    want = reference(world, m, n, k, dtype)
    worst = 0.0
    for name in KERNELS:
        errors = [float((copies[name].double() - want).norm() / want.norm()) for copies in ranks]
        same = all(torch.equal(copies[name], ranks[0][name]) for copies in ranks)
        worst = max(worst, *errors)
        print(f"  {name}: relative error {max(errors):.2e}, {'equal' if same else 'NOT equal'} on all ranks")
        if not same:
            raise SystemExit("wrong: an all-reduce leaves the same bits on every rank")
    print(f"  {seconds:.1f} s; the reference is float64, {args.dtype} itself resolves {torch.finfo(dtype).eps / 2:.1e}")
    if not worst <= 1e-2:
        raise SystemExit(f"wrong: relative error {worst:.2e} > 1e-2")


if __name__ == "__main__":
    main()
