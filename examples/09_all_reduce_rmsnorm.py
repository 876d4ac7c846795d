"""All-reduce + residual + RMSNorm in one kernel: what follows a tensor-parallel linear layer.

Every rank holds a partial sum x (T, H).  The rows are dealt to the ranks in blocks; the owner of a block adds the
ranks' rows and the residual in float32, in a fixed order, normalises them in registers and writes both results to every
rank.

    python examples/09_all_reduce_rmsnorm.py                     4 ranks: on GPUs if there are any, else simulated
    python examples/09_all_reduce_rmsnorm.py --ranks 8 --tokens 24 --hidden 8192 --dtype float16
"""

import argparse
import time

import torch

import pk

EPS = 1e-5


@pk.kernel
def all_reduce_rmsnorm(
    x: pk.Parallel,  # (T, H)  this rank's partial sum
    residual: pk.Global,  # (T, H)  the same on every rank
    weight: pk.Global,  # (1, H)
    y: pk.Parallel,  # (T, H)  on every rank; receives the normalised sum
    residual_out: pk.Parallel,  # (T, H)  on every rank; receives the sum
    eps: float,
    H: pk.constexpr, BR: pk.constexpr = 2,
):  # fmt: skip
    inputs = pk.pipeline(3, x=pk.shared((BR, H), x.dtype))
    output = pk.pipeline(1, y=pk.shared((BR, H), x.dtype), r=pk.shared((BR, H), x.dtype))
    me, world = pk.rank(), pk.world_size()
    for i in pk.tasks(pk.cdiv(pk.cdiv(x.rows, BR), world)):
        m = i * world + me  # rank r owns every world-th block of rows
        with pk.loader():
            for r in pk.range(world):
                with inputs.fill() as s:
                    pk.load_async(s.x, x[r], (m, 0))
            with inputs.fill() as s:
                pk.load_async(s.x, residual, (m, 0))
        with pk.consumer(warpgroups=2):
            total = pk.zeros((BR, H), pk.float32)
            for _ in pk.range(world + 1):
                with inputs.drain() as s:
                    total = total + pk.load(s.x)
            scale = pk.rsqrt(pk.sum(total * total, axis=1) / H + eps)
            with output.fill() as s:
                pk.store(s.r, total)
                pk.store(s.y, total * scale * pk.load(weight, (0, 0), (1, H)))
        with pk.storer():
            with output.drain() as s:
                pk.store_async(y, s.y, (m, 0))  # a whole Parallel: to every rank
                pk.store_async(residual_out, s.r, (m, 0))


def operands(rank: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rank ``rank``'s partial sum (T, H), and what all ranks share: residual (T, H) and weight (1, H)."""
    own, common = torch.Generator().manual_seed(2000 + rank), torch.Generator().manual_seed(1999)
    x = torch.randn(tokens, hidden, generator=own).to(dtype)
    residual = torch.randn(tokens, hidden, generator=common).to(dtype)
    return x, residual, 1 + torch.randn(1, hidden, generator=common).to(dtype) / 4


def reference(world: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum and the sum, in float64."""
    _, residual, weight = operands(0, tokens, hidden, dtype)
    total = residual.double()
    for rank in range(world):
        total = total + operands(rank, tokens, hidden, dtype)[0].double()
    scale = torch.rsqrt((total * total).mean(1, keepdim=True) + EPS)
    return total * scale * weight.double(), total


def run(rank: int, world: int, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rank does: both results, as this rank has them."""
    own, residual, weight = (t.to(pk.device()) for t in operands(rank, tokens, hidden, dtype))
    x, y, residual_out = (pk.empty((tokens, hidden), dtype) for _ in range(3))
    x.copy_(own)
    all_reduce_rmsnorm(x, residual, weight, y, residual_out, EPS, H=hidden)
    pk.synchronize()
    return y.cpu(), residual_out.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="All-reduce + residual + RMSNorm in one kernel")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=37)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    world, tokens, hidden, dtype = args.ranks, args.tokens, args.hidden, getattr(torch, args.dtype)

    print(f"All-reduce + RMSNorm, {tokens} x {hidden}, {args.dtype}, {world} ranks, {pk.describe_backend(world)}")
    start = time.perf_counter()
    results = pk.spawn(run, world, args=(world, tokens, hidden, dtype))
    seconds = time.perf_counter() - start
    wanted, worst = reference(world, tokens, hidden, dtype), 0.0
    for rank, got in enumerate(results):
        errors = [float((g.double() - w).norm() / w.norm()) for g, w in zip(got, wanted, strict=True)]
        worst = max([worst, *errors])
        print(f"  rank {rank}: relative error of y {errors[0]:.2e}, of the sum {errors[1]:.2e}")
    same = all(torch.equal(got[0], results[0][0]) and torch.equal(got[1], results[0][1]) for got in results)
    print(f"  {seconds:.1f} s; the ranks' results are {'identical' if same else 'NOT identical'}")
    if not worst <= 1e-2 or not same:
        raise SystemExit(f"wrong: relative error {worst:.2e}")


if __name__ == "__main__":
    main()
