"""All-gather, reduce-scatter and all-to-all along any dimension of a tensor, without one reshaping copy.

A kernel's tensors may be views, permuted and strided.  A contiguous tensor that is gathered, scattered or exchanged
along some dimension *is* a (world, P, C) or (world, P, R, C) view of itself, whose first dimension counts ranks; so
three kernels of a few lines cover every dimension, and tiles are cut off at the ends of each rank's part by themselves.

    python examples/05_all_to_all.py                             4 ranks: on GPUs if there are any, else simulated
    python examples/05_all_to_all.py --ranks 3 --dtype float32
"""

import argparse
import itertools
import math
import time
from collections.abc import Sequence

import torch

import pk


@pk.kernel
def gather_kernel(x: pk.Global, out: pk.Parallel, BM: pk.constexpr = 128, BN: pk.constexpr = 128):
    # (P, C) -> (world, P, C) on every rank
    stages = pk.pipeline(12 // x.dtype.itemsize, x=pk.shared((BM, BN), x.dtype))
    for p, c in pk.tasks(pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)):
        with pk.loader():
            with stages.fill() as s:
                pk.load_async(s.x, x, (p, c))
        with pk.storer():
            with stages.drain() as s:
                pk.store_async(out, s.x, (pk.rank(), p, c))  # out without a rank: every rank's


@pk.kernel
def scatter_kernel(x: pk.Parallel, out: pk.Global, BM: pk.constexpr = 16, BN: pk.constexpr = 512):
    # (world, P, C) -> (P, C)
    for p, c in pk.tasks(pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)):
        pk.reduce(out, (p, c), x, (pk.rank(), p, c), shape=(BM, BN))


@pk.kernel
def exchange_kernel(x: pk.Global, out: pk.Parallel, BM: pk.constexpr = 128, BN: pk.constexpr = 128):
    # (world, P, R, C) both
    stages = pk.pipeline(12 // x.dtype.itemsize, x=pk.shared((BM, BN), x.dtype))
    for dst, p, r, c in pk.tasks(pk.ranks_from(pk.rank() + 1), x.depth, pk.cdiv(x.rows, BM), pk.cdiv(x.cols, BN)):
        with pk.loader():
            with stages.fill() as s:
                pk.load_async(s.x, x, (dst, p, r, c))
        with pk.storer():
            with stages.drain() as s:
                pk.store_async(out[dst], s.x, (pk.rank(), p, r, c))


def parts(t: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """The parts of ``t`` along ``dim``, one a rank, as a (world, P, C) view."""
    before, after = math.prod(t.shape[:dim]), math.prod(t.shape[dim:]) // world
    return t.view(before, world, after).movedim(1, 0)


def all_gather(x: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """Every rank's ``x``, joined along ``dim``."""
    out = pk.empty([n * world if d == dim else n for d, n in enumerate(x.shape)], x.dtype)
    gather_kernel(x.view(math.prod(x.shape[:dim]), -1), parts(out, dim, world))
    return out


def reduce_scatter(x: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """This rank's part, along ``dim``, of the sum of every rank's ``x`` (symmetric: ``pk.empty``)."""
    out = x.new_empty([n // world if d == dim else n for d, n in enumerate(x.shape)])
    scatter_kernel(parts(x, dim, world), out.view(math.prod(x.shape[:dim]), -1))
    return out


def all_to_all(x: torch.Tensor, split: int, concat: int, world: int) -> torch.Tensor:
    """``x`` cut along ``split``, part r sent to rank r; what arrives is joined along ``concat``."""
    full = [n // world if d == split else n for d, n in enumerate(x.shape)]  # extents without the world
    lo, hi = sorted((split, concat))
    P, R, C = (math.prod(full[i:j]) for i, j in ((0, lo), (lo, hi), (hi, None)))

    def view(t: torch.Tensor, dim: int) -> torch.Tensor:
        return t.view(*full[:dim], world, *full[dim:]).movedim(dim, 0).view(world, P, R, C)

    out = pk.empty([n * world if d == concat else n for d, n in enumerate(full)], x.dtype)
    exchange_kernel(view(x, split), view(out, concat))
    return out


def operand(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Rank ``rank``'s tensor, on the CPU, the same on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5000 + rank)).to(dtype)


def reference(world: int, shape: Sequence[int], dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
    """What each rank must get, for every dimension and pair of dimensions."""
    xs, want = [operand(r, shape, dtype) for r in range(world)], {}
    total = torch.stack(xs).double().sum(0)
    for dim in range(len(shape)):
        want[f"all-gather along {dim}"] = [torch.cat(xs, dim)] * world
        want[f"reduce-scatter along {dim}"] = list(total.chunk(world, dim))
    for split, concat in itertools.permutations(range(len(shape)), 2):
        cut = [x.chunk(world, split) for x in xs]
        want[f"all-to-all {split} -> {concat}"] = [torch.cat([c[r] for c in cut], concat) for r in range(world)]
    return want


def run(rank: int, world: int, shape: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What every rank does: all of the operations, on one tensor."""
    x, got = pk.empty(shape, dtype), {}
    x.copy_(operand(rank, shape, dtype))
    for dim in range(len(shape)):
        got[f"all-gather along {dim}"] = all_gather(x, dim, world)
        got[f"reduce-scatter along {dim}"] = reduce_scatter(x, dim, world)
    for split, concat in itertools.permutations(range(len(shape)), 2):
        got[f"all-to-all {split} -> {concat}"] = all_to_all(x, split, concat, world)
    pk.synchronize()
    return {name: t.cpu() for name, t in got.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="collectives along any dimension")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    args = parser.parse_args()
    world, dtype = args.ranks, getattr(torch, args.dtype)
    shape = (3 * world, 5 * world, 24 * world)
    print(f"{' x '.join(map(str, shape))} {args.dtype}, {world} ranks, {pk.describe_backend(world)}")
    start = time.perf_counter()
    ranks = pk.spawn(run, world, args=(world, shape, dtype))
    seconds = time.perf_counter() - start
    for name, want in reference(world, shape, dtype).items():
        pairs = [(got[name].double(), w.double()) for got, w in zip(ranks, want, strict=True)]
        worst = max(float((got - w).norm() / w.norm()) for got, w in pairs)
        print(f"  {name:<24} {'exact' if worst == 0 else f'relative error {worst:.1e}'}")
        if not worst <= (0 if "reduce" not in name else 1e-2):
            raise SystemExit(f"wrong: {name}")
    print(f"  {seconds:.1f} s")


if __name__ == "__main__":
    main()
