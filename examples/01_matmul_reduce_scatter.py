"""GEMM + reduce-scatter in one kernel: the sum over ranks of a @ b, each rank keeping its slice of rows.

Every rank holds a slice of the contraction: a (M, K / world) and b (K / world, N).  A tile is computed where its
operands are and added into the memory of the rank that owns its rows, while the next tile is being computed.

    python examples/01_matmul_reduce_scatter.py                  4 ranks: on GPUs if there are any, else simulated
    python examples/01_matmul_reduce_scatter.py --ranks 8 --m 1024 --n 768 --k 512 --dtype float16
"""

import argparse
import time

import torch

import pk


@pk.kernel
def matmul_reduce_scatter(
    a: pk.Global, b: pk.Global,  # (world, M / world, K), (K, N)  this rank's slice of the contraction
    c: pk.Parallel,  # (M / world, N)  on every rank; receives the sum
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4):  # fmt: skip
    assert BN % P == 0, "P must divide BN"
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


def operands(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank ``rank``'s slice: a (m, k / world), b (k / world, n), on the CPU, the same on every call."""
    gen = torch.Generator().manual_seed(1000 + rank)
    a = torch.randn(m, k // world, generator=gen) / (k**0.5)
    b = torch.randn(k // world, n, generator=gen)
    return a.to(dtype), b.to(dtype)


def reference(world: int, m: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole sum (m, n) in float64."""
    pairs = (operands(r, world, m, n, k, dtype) for r in range(world))
    return sum((a.double() @ b.double() for a, b in pairs), torch.zeros(m, n, dtype=torch.float64))


def run(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """What every rank does: make operands, call the kernel, hand back its rows (m / world, n)."""
    a, b = (t.to(pk.device()) for t in operands(rank, world, m, n, k, dtype))
    c = pk.empty((m // world, n), dtype)
    matmul_reduce_scatter(a.view(world, m // world, -1), b, c)
    pk.synchronize()
    return c.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="GEMM + reduce-scatter in one kernel")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    world, m, n, k, dtype = args.ranks, args.m, args.n, args.k, getattr(torch, args.dtype)
    if m % world or k % world:
        parser.error(f"--m {m} and --k {k} must be multiples of --ranks {world}: each rank owns an equal slice of both")

    print(f"GEMM + reduce-scatter, M {m}, N {n}, K {k}, {args.dtype}, {pk.describe_backend(world)}")
    start = time.perf_counter()
    slices = pk.spawn(run, world, args=(world, m, n, k, dtype))
    seconds = time.perf_counter() - start
    expected = reference(world, m, n, k, dtype).chunk(world)
    worst = 0.0
    for rank, (got, want) in enumerate(zip(slices, expected, strict=True)):
        error = float((got.double() - want).norm() / want.norm())
        worst = max(worst, error)
        print(f"  rank {rank}: rows {rank * (m // world)}..{(rank + 1) * (m // world) - 1}, relative error {error:.2e}")
    print(f"  {seconds:.1f} s; the reference is float64, {args.dtype} itself resolves {torch.finfo(dtype).eps / 2:.1e}")
    if not worst <= 1e-2:
        raise SystemExit(f"wrong: relative error {worst:.2e} > 1e-2")

    print("\nThe same function as a cubin for sm_90a:")
    spec = {"a": pk.spec(dtype, 3), "b": pk.spec(dtype, 2), "c": pk.spec(dtype, 2)}
    print(matmul_reduce_scatter.resources(**spec))
    print("\nNext (after `. .venv/bin/activate`, if pk was installed by make):")
    print("  the CUDA it became     python -m pk show examples/01_matmul_reduce_scatter.py --ndim a=3 --stage cuda")
    print("  its typed IR           python -m pk show examples/01_matmul_reduce_scatter.py --ndim a=3 --stage ir")
    print("  what can run here      python -m pk doctor")


if __name__ == "__main__":
    main()
