"""All-gather + GEMM in one kernel: every rank multiplies the rows of all ranks by its own columns of b.

Every rank holds a slice of the rows, x (M / world, K), and its columns b (K, N).  A few SMs, the communicator, push
this rank's rows to the peers in the order in which they need them, while the others compute: own rows first, read where
they are, then the first row block of every peer, the second, and so on, each as soon as a signal says it is there.

    python examples/02_all_gather_matmul.py                      4 ranks: on GPUs if there are any, else simulated
    python examples/02_all_gather_matmul.py --ranks 8 --m 1000 --n 264 --k 328
"""

import argparse
import time

import torch

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put  # the four halves of a GEMM, a few lines each


@pk.kernel
def all_gather_matmul(
    x: pk.Global,  # (M / world, K)  this rank's rows
    b: pk.Global,  # (K, N)
    c: pk.Global,  # (world, M / world, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4,
    COMM: pk.constexpr = 8, BC: pk.constexpr = 256,
):  # fmt: skip
    inputs, output = gemm_pipes(x, b, c, BM, BN, BK, P, STAGES)
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
                feed(inputs, x, (m,), b, n, BK)
            else:
                pk.wait(ready, (owner, m), chunks)
                feed(inputs, full[me], (owner, m), b, n, BK)
        with pk.consumer(warpgroups=2):
            emit(output, accumulate(inputs, x, BM, BN, BK), BN, P)
        with pk.storer():
            put(output, c, (owner, m), n, BN, P)


def operands(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank ``rank``'s x (m / world, k) and b (k, n), on the CPU, the same on every call."""
    gen = torch.Generator().manual_seed(2000 + rank)
    x = torch.randn(m // world, k, generator=gen) / (k**0.5)
    b = torch.randn(k, n, generator=gen)
    return x.to(dtype), b.to(dtype)


def reference(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank ``rank``'s product (m, n) in float64."""
    whole = torch.cat([operands(r, world, m, n, k, dtype)[0] for r in range(world)])
    return whole.double() @ operands(rank, world, m, n, k, dtype)[1].double()


def run(rank: int, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """What every rank does: make operands, call the kernel, hand back its product (m, n)."""
    x, b = (t.to(pk.device()) for t in operands(rank, world, m, n, k, dtype))
    c = torch.full((world, m // world, n), float("nan"), dtype=dtype, device=x.device)
    all_gather_matmul(x, b, c)
    pk.synchronize()
    return c.view(m, n).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="all-gather + GEMM in one kernel")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=512)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    world, m, n, k, dtype = args.ranks, args.m, args.n, args.k, getattr(torch, args.dtype)
    if m % world:
        parser.error(f"--m {m} must be a multiple of --ranks {world}: each rank owns an equal slice of the rows")

    print(f"all-gather + GEMM, M {m}, N {n}, K {k}, {args.dtype}, {world} ranks, {pk.describe_backend(world)}")
    start = time.perf_counter()
    products = pk.spawn(run, world, args=(world, m, n, k, dtype))
    seconds = time.perf_counter() - start
    worst = 0.0
    for rank, got in enumerate(products):
        want = reference(rank, world, m, n, k, dtype)
        error = float((got.double() - want).norm() / want.norm())
        worst = max(worst, error)
        print(f"  rank {rank}: relative error {error:.2e}")
    print(f"  {seconds:.1f} s; the reference is float64, {args.dtype} itself resolves {torch.finfo(dtype).eps / 2:.1e}")
    if not worst <= 1e-2:
        raise SystemExit(f"wrong: relative error {worst:.2e} > 1e-2")


if __name__ == "__main__":
    main()
