"""A mixture-of-experts layer: tokens to the ranks of their experts, two grouped GEMMs, results back.  Three launches.

Every rank has its own tokens, as many as it likes, and El experts.  Nothing is counted on the host, nothing is padded:

``moe_dispatch_matmul``: one block of every rank exchanges counts and computes where each (rank, expert) segment goes;
some SMs gather token rows and scatter them to the owners; each tile of the first GEMM waits for exactly its rows, so
early experts compute while later rows are on their way.  Epilogue: silu.
``moe_matmul_return``: the second GEMM; finished rows go straight back to the entry of the rank that they came from.
``moe_weighted_sum``: every token's results, weighted.  Local.

    python examples/08_moe.py                                    4 ranks: on GPUs if there are any, else simulated
    python examples/08_moe.py --ranks 3 --tokens 45 --experts 9 --topk 3 --hidden 200 --inner 136
"""

import argparse
import time
from dataclasses import dataclass

import torch

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put  # the halves of a GEMM, a few lines each


@pk.function
def turn_of(e, W, El):
    """When expert ``e``'s rows are sent: expert 0 of every rank (the next rank first), then expert 1, ..."""
    return (e % El) * W + (e // El - pk.rank() - 1) % W


@pk.function
def plan(mine, table, counted, El, BM, E):
    """Exchange counts: mine (1, E) -> first row of each expert at its owner (E, 1), rows of each expert (1, E), and
    what takes a place in sending order to a row of the owner (E, 1).
    """
    me, W = pk.rank(), pk.world_size()
    pk.store(table, mine, (me, 0))  # on every rank
    pk.signal_all(counted, ())
    pk.wait(counted, (), W)
    total, before = pk.zeros((1, E), pk.int32), pk.zeros((1, E), pk.int32)
    for r in pk.range(W):
        theirs = pk.load(table[me], (r, 0), (1, E))
        total = total + theirs
        if r < me:
            before = before + theirs
    i, j = pk.iota((E, 1)), pk.iota((1, E))  # prefix sums as masked sums
    base = pk.sum(pk.where((i // El == j // El) & (j < i), pk.cdiv(total, BM) * BM, 0), axis=1)
    turn_i, turn_j = turn_of(i, W, El), turn_of(j, W, El)
    to_row = base + pk.sum(pk.where(i == j, before, 0) - pk.where(turn_j < turn_i, mine, 0), axis=1)
    return base, total, to_row


@pk.kernel
def moe_dispatch_matmul(
    x: pk.Global,  # (T, H)  this rank's tokens
    perm: pk.Global, expert: pk.Global,  # (T * TOPK,)  entries token * TOPK + k in sending order; the expert of each
    counts: pk.Global,  # (1, E)  entries of each expert
    w: pk.Global,  # (El, H, F)  this rank's experts
    y: pk.Global,  # (R, F)  silu(rows @ w), expert by expert, each from a multiple of BM on
    origin: pk.Parallel,  # (R,)  where each row came from: source rank * slots + entry
    base_of: pk.Global, total_of: pk.Global,  # (E, 1), (1, E)  first row of each expert at its owner, rows of each
    slots: int,  # most entries that a rank has
    E: pk.constexpr, TOPK: pk.constexpr, BH: pk.constexpr = 512, ROWS: pk.constexpr = 32, COMM: pk.constexpr = 24,
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4,
):  # fmt: skip
    inputs, output = gemm_pipes(x, w, y, BM, BN, BK, P, STAGES)
    ring = pk.pipeline(3, x=pk.shared((ROWS, BH), x.dtype))
    me, W, El, N, chunks = pk.rank(), pk.world_size(), w.depth, perm.shape[0], pk.cdiv(x.cols, BH)
    table, shift = pk.scratch((W, E), pk.int32), pk.scratch((E, 1), pk.int32)
    recv = pk.scratch((origin.shape[0], x.cols), x.dtype)
    counted, planned, arrived = pk.signals(), pk.signals(), pk.signals(pk.cdiv(origin.shape[0], BM))

    with pk.communicator(sms=COMM):
        pk.wait(planned, (), 1)
        for t, j in pk.tasks(pk.cdiv(N, ROWS), chunks, group=1):
            entry = pk.load(perm, t, (ROWS,), other=-1)  # one a lane; -1 past the end
            with pk.loader():
                with ring.fill() as s:
                    pk.gather_async(s.x, x, pk.where(entry < 0, -1, entry // TOPK), j)
            with pk.storer():
                e = pk.load(expert, t, (ROWS,))
                row = t * ROWS + pk.iota((ROWS,)) + pk.load(shift[me], (e, 0))
                row = pk.where((entry < 0) | (row >= y.rows), -1, row)
                with ring.drain() as s:
                    pk.scatter_async(recv, s.x, row, j, rank=e // El)
                if j == 0:
                    pk.store(origin, me * slots + entry, row, rank=e // El)
                pk.signal(arrived, pk.where(row < 0, -1, row // BM), e // El)

    for _ in pk.tasks(1):  # the plan, by one block of every rank
        with pk.consumer(warpgroups=2):
            base, total, to_row = plan(pk.load(counts, (0, 0), (1, E)), table, counted, El, BM, E)
            pk.store(shift[me], to_row, (0, 0))
            pk.store(base_of, base, (0, 0))
            pk.store(total_of, total, (0, 0))
            pk.signal(planned, (), me)
    pk.wait(planned, (), 1)
    for e in pk.range(El):
        base, total = pk.load(base_of, (me * El + e, 0)), pk.load(total_of, (0, me * El + e))
        assert base + total <= y.rows, "more rows arrive than y holds"
        for m, n in pk.tasks(pk.cdiv(total, BM), pk.cdiv(w.cols, BN)):
            with pk.loader():
                pk.wait(arrived, base // BM + m, pk.min(BM, total - m * BM) * chunks)
                feed(inputs, recv[me], (base // BM + m,), w, n, BK, lead=(e,))
            with pk.consumer(warpgroups=2):
                emit(output, pk.silu(accumulate(inputs, x, BM, BN, BK)), BN, P)
            with pk.storer():
                put(output, y, (base // BM + m,), n, BN, P)


@pk.kernel
def moe_matmul_return(
    y: pk.Global,  # (R, F)
    w: pk.Global,  # (El, F, H)
    back: pk.Parallel,  # (slots, H)  on every rank: row `entry` receives y @ w of that entry
    origin: pk.Parallel, base_of: pk.Global, total_of: pk.Global,  # as above
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64, STAGES: pk.constexpr = 3,
):  # fmt: skip
    inputs = pk.pipeline(STAGES, a=pk.shared((BM, BK), y.dtype), b=pk.shared((BK, BN), w.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), y.dtype))
    me, El, slots = pk.rank(), w.depth, back.rows
    for e in pk.range(El):
        base, total = pk.load(base_of, (me * El + e, 0)), pk.load(total_of, (0, me * El + e))
        for m, n in pk.tasks(pk.cdiv(total, BM), pk.cdiv(w.cols, BN)):
            with pk.loader():
                feed(inputs, y, (base // BM + m,), w, n, BK, lead=(e,))
            with pk.consumer(warpgroups=2):
                acc = accumulate(inputs, y, BM, BN, BK)
                with output.fill() as s:
                    pk.store(s.c, acc)
            with pk.storer():
                home = pk.load(origin[me], base // BM + m, (BM,))
                row = pk.where(m * BM + pk.iota((BM,)) < total, home % slots, -1)
                with output.drain() as s:
                    pk.scatter_async(back, s.c, row, n, rank=home // slots)


@pk.kernel
def moe_weighted_sum(
    back: pk.Global,  # (TOPK, T, H)
    weight: pk.Global,  # (T, TOPK)
    out: pk.Global,  # (T, H)
    R: pk.constexpr = 8, BH: pk.constexpr = 1024,
):  # fmt: skip
    for t, j in pk.tasks(pk.cdiv(out.rows, R), pk.cdiv(out.cols, BH)):
        acc = pk.zeros((R, BH), pk.float32)
        for k in pk.range(back.depth):
            acc = acc + pk.load(weight, (t, k), (R, 1)) * pk.load(back, (k, t, j), (R, BH))
        pk.store(out, acc, (t, j))


@dataclass
class Buffers:
    """What the launches of one layer share.  ``slots``: most tokens of a rank times TOPK; ``rows``: most that one
    rank's experts receive, each expert's rounded up to 128 (the kernel asserts it).
    """

    y: torch.Tensor
    back: torch.Tensor
    origin: torch.Tensor
    base: torch.Tensor
    total: torch.Tensor

    @classmethod
    def make(cls, slots: int, rows: int, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> "Buffers":
        """Buffers for ``experts`` of all ranks, tokens of ``hidden`` and inner rows of ``inner`` elements."""
        device = pk.device()
        return cls(
            torch.empty(rows, inner, dtype=dtype, device=device), pk.empty((slots, hidden), dtype),
            pk.empty((rows,), torch.int32), torch.empty(experts, 1, dtype=torch.int32, device=device),
            torch.empty(1, experts, dtype=torch.int32, device=device),
        )  # fmt: skip


def moe(x, ids, weight, w1, w2, buf, rank, world, **config):
    """out[t] = sum over k of weight[t, k] * silu(x[t] @ w1[e]) @ w2[e], e = ids[t, k].

    x (T, H); ids (T, TOPK) int64, each of the El * world experts; weight (T, TOPK) float32; w1 (El, H, F) and
    w2 (El, F, H): experts rank * El ... of this rank.  Returns (T, H).
    """
    El, flat, slots = w1.shape[0], ids.flatten(), buf.back.shape[0]
    perm = (flat % El * world + (flat // El - rank - 1) % world).argsort(stable=True)  # turn_of
    counts = torch.bincount(flat, minlength=El * world).int()[None]
    moe_dispatch_matmul(
        x, perm.int(), flat[perm].int(), counts, w1, buf.y, buf.origin, buf.base, buf.total, slots,
        E=El * world, TOPK=ids.shape[1], **config,
    )  # fmt: skip
    moe_matmul_return(buf.y, w2, buf.back, buf.origin, buf.base, buf.total)
    out = torch.empty_like(x)
    back = buf.back[: ids.numel()].view(*ids.shape, x.shape[1]).transpose(0, 1)
    moe_weighted_sum(back, weight, out)
    return out


# --------------------------------------------------------------------------------------------------- the problem
@dataclass(frozen=True)
class Problem:
    """``tokens``: of each rank.  ``skew``: 0 for an even choice of experts; 1: expert 0 gets a row of every token, the
    last expert none.
    """

    tokens: tuple[int, ...]
    experts: int  # of all ranks
    topk: int
    hidden: int
    inner: int
    skew: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    def operands(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, ids and weight of ``rank``, the same on every call."""
        gen = torch.Generator().manual_seed(77 + rank)
        x = torch.randn(self.tokens[rank], self.hidden, generator=gen).to(self.dtype)
        score = torch.randn(self.tokens[rank], self.experts, generator=gen)
        if self.skew:
            score[:, 0], score[:, -1] = 100, -100
        ids = score.topk(self.topk, dim=1).indices
        weight = torch.rand(self.tokens[rank], self.topk, generator=gen)
        return x, ids, weight / weight.sum(1, keepdim=True)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w1 (E, H, F) and w2 (E, F, H) of all experts."""
        gen = torch.Generator().manual_seed(5)
        w1 = torch.randn(self.experts, self.hidden, self.inner, generator=gen) / self.hidden**0.5
        w2 = torch.randn(self.experts, self.inner, self.hidden, generator=gen) / self.inner**0.5
        return w1.to(self.dtype), w2.to(self.dtype)

    def reference(self, rank: int) -> torch.Tensor:
        """What ``rank`` must get, in float64."""
        x, ids, weight = self.operands(rank)
        w1, w2 = (w.double() for w in self.weights())
        rows = torch.einsum("th,tkhf->tkf", x.double(), w1[ids])
        return torch.einsum("tkf,tkfh,tk->th", torch.nn.functional.silu(rows), w2[ids], weight.double())


def run(rank: int, problem: Problem, times: int = 1) -> torch.Tensor:
    """What every rank does."""
    world, El, dtype = problem.world, problem.experts // problem.world, problem.dtype
    x, ids, weight = (t.to(pk.device()) for t in problem.operands(rank))
    w1, w2 = (w[rank * El : (rank + 1) * El].contiguous().to(pk.device()) for w in problem.weights())
    rows = sum(problem.tokens) * problem.topk + El * 128  # nothing can overflow; real layers choose less
    slots = max(problem.tokens) * problem.topk
    buf = Buffers.make(slots, rows, problem.experts, problem.hidden, problem.inner, dtype)
    for _ in range(times):
        out = moe(x, ids, weight, w1, w2, buf, rank, world)
    pk.synchronize()
    return out.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="A mixture-of-experts layer")
    for name, default in (("ranks", 4), ("tokens", 60), ("experts", 16), ("topk", 4), ("hidden", 256), ("inner", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.experts % args.ranks:
        parser.error(f"--experts {args.experts} must be a multiple of --ranks {args.ranks}")
    tokens = tuple(args.tokens + r for r in range(args.ranks))  # not even equal on all ranks
    problem = Problem(tokens, args.experts, args.topk, args.hidden, args.inner)
    print(f"MoE, tokens {tokens}, {args.experts} experts, top {args.topk}, hidden {args.hidden}, inner {args.inner}, "
          f"{args.ranks} ranks, {pk.describe_backend(args.ranks)}")  # fmt: skip
    start = time.perf_counter()
    outputs = pk.spawn(run, args.ranks, args=(problem,))
    print(f"  {time.perf_counter() - start:.1f} s; the reference is float64")
    for rank, got in enumerate(outputs):
        want = problem.reference(rank)
        error = float((got.double() - want).norm() / want.norm())
        print(f"  rank {rank}: {problem.tokens[rank]} tokens, relative error {error:.2e}")
        if not error <= 1e-2:
            raise SystemExit("wrong")


if __name__ == "__main__":
    main()
