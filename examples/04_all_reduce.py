"""All-reduce in four ways: the sum over ranks of a tensor, whole on every rank.

``one_shot``: every rank reads everything from every rank.  Least latency, most traffic: for small tensors.
``two_shot``: rank r reads every W-th block from every rank, and writes the sum to every rank.
``push``: every rank writes its blocks to every rank and adds what has arrived: one hop, and nobody waits for a read.
``ring``: chunks travel around the ring twice, once being added to, once being copied; every link carries equal traffic.

All add in float32 in an order that does not depend on timing: results are the same bits in every run.

    python examples/04_all_reduce.py                             4 ranks: on GPUs if there are any, else simulated
    python examples/04_all_reduce.py --ranks 7 --n 50001
"""

import argparse
import time

import torch

import pk


@pk.kernel
def one_shot(x: pk.Parallel, out: pk.Global, B: pk.constexpr = 2048):  # (1, n) both
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        pk.reduce(out, (0, i), x, (0, i), shape=(1, B))


@pk.kernel
def two_shot(x: pk.Parallel, B: pk.constexpr = 8192):  # (1, n), in place
    for i in pk.tasks(pk.cdiv(pk.cdiv(x.cols, B), pk.world_size())):
        pk.all_reduce(x, (0, i * pk.world_size() + pk.rank()), shape=(1, B))


@pk.kernel
def push(x: pk.Global, out: pk.Global, B: pk.constexpr = 2048):  # (1, n) both, ordinary memory
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    slots, got = pk.scratch((W, x.cols), x.dtype), pk.signals(n)
    for i in pk.tasks(n):
        pk.store(slots, pk.load(x, (0, i), (1, B)), (me, i))  # slots without a rank: every rank's
        pk.signal_all(got, i)
        pk.wait(got, i, W)
        acc = pk.zeros((1, B), pk.float32)
        for r in pk.range(W):
            acc = acc + pk.load(slots[me], (r, i), (1, B))
        pk.store(out, acc, (0, i))


@pk.kernel
def ring(
    x: pk.Global,  # (world, rows, cols): a chunk for each rank
    out: pk.Global,  # the same; ordinary memory
    BM: pk.constexpr = 64, BN: pk.constexpr = 128,
):  # fmt: skip
    inputs, output = pk.pipeline(2, x=pk.shared((BM, BN), x.dtype)), pk.pipeline(2, y=pk.shared((BM, BN), x.dtype))
    me, W, rows, cols = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)
    last = 2 * W - 2  # W - 1 reducing hops, W - 1 gathering hops
    hop, got = pk.scratch((last, x.rows, x.cols), x.dtype), pk.signals(last, rows, cols)  # one slot a hop: no credits

    for step, p, c in pk.tasks(last + 1, rows, cols, group=1):
        chunk = (me - step) % W
        with pk.loader():
            if step < W:
                with inputs.fill() as s:
                    pk.load_async(s.x, x, (chunk, p, c))
            if step > 0:
                pk.wait(got, (step - 1, p, c), 1)
                with inputs.fill() as s:
                    pk.load_async(s.x, hop[me], (step - 1, p, c))
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((BM, BN), pk.float32)
            for _ in pk.range((step < W) + (step > 0)):
                with inputs.drain() as s:
                    acc = acc + pk.load(s.x)
            with output.fill() as s:
                pk.store(s.y, acc)
        with pk.storer():
            with output.drain() as s:
                if step < last:
                    pk.store_async(hop[(me + 1) % W], s.y, (step, p, c))
                if step >= W - 1:
                    pk.store_async(out, s.y, (chunk, p, c))
            if step < last:
                pk.signal(got, (step, p, c), (me + 1) % W)


def operand(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank ``rank``'s n numbers, on the CPU, the same on every call."""
    return torch.randn(n, generator=torch.Generator().manual_seed(4000 + rank)).to(dtype)


def reference(world: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in float64."""
    return torch.stack([operand(r, n, dtype) for r in range(world)]).double().sum(0)


def chunked(x: torch.Tensor, world: int, cols: int = 512) -> torch.Tensor:
    """``x`` (n,) with zeros behind it, as (world, rows, cols)."""
    rows = pk.cdiv(pk.cdiv(x.numel(), cols), world)
    return torch.nn.functional.pad(x, (0, world * rows * cols - x.numel())).view(world, rows, cols)


def run(rank: int, world: int, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What every rank does: hand back its copy of the sum (n,), made in each way."""
    x, results = operand(rank, n, dtype).to(pk.device()), {}
    shared, out = pk.empty((1, n), dtype), torch.empty(1, n, dtype=dtype, device=x.device)
    shared.copy_(x)
    one_shot(shared, out)
    results["one-shot"] = out.clone()
    two_shot(shared)
    results["two-shot"] = shared.clone()
    push(x.view(1, n), out)
    results["push"] = out.clone()
    chunks = chunked(x, world)
    summed = torch.empty_like(chunks)
    ring(chunks, summed)
    results["ring"] = summed.flatten()[:n]
    pk.synchronize()
    return {name: result.flatten().cpu() for name, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="all-reduce in four ways")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    args = parser.parse_args()
    world, n, dtype = args.ranks, args.n, getattr(torch, args.dtype)
    print(f"all-reduce of {n} {args.dtype}, {world} ranks, {pk.describe_backend(world)}")
    start = time.perf_counter()
    ranks = pk.spawn(run, world, args=(world, n, dtype))
    seconds = time.perf_counter() - start
    want = reference(world, n, dtype)
    for name in ranks[0]:
        worst = max(float((copies[name].double() - want).norm() / want.norm()) for copies in ranks)
        same = all(torch.equal(copies[name], ranks[0][name]) for copies in ranks)
        print(f"  {name:<9} relative error {worst:.2e}, {'equal' if same else 'NOT equal'} on all ranks")
        if not (same and worst <= 2e-2):
            raise SystemExit(f"wrong: {name}")
    print(f"  {seconds:.1f} s; the reference is float64, {args.dtype} itself resolves {torch.finfo(dtype).eps / 2:.1e}")


if __name__ == "__main__":
    main()
