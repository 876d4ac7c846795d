"""Flash attention forward: softmax(q k.T / sqrt(D)) v without ever writing the scores to memory.

Each warpgroup holds 64 query rows; keys and values stream through shared memory.  Causal attention lines the last query
up with the last key; queries may share heads of k and v (grouped-query attention); no length has to divide anything.

    python examples/06_attention.py                  on a GPU if there is one, else simulated
    python examples/06_attention.py --causal 0 --heads 8 --kv-heads 2 --queries 300 --keys 500 --dim 64
"""

import argparse
import math
import time

import torch

import pk
from pk.ops.attention import attend, attention_pipes, feed_kv, fresh


@pk.kernel
def attention(
    q: pk.Global,  # (batch, heads, queries, D)
    k: pk.Global,  # (batch, kv heads, keys, D)
    v: pk.Global,  # (batch, kv heads, keys, D)
    o: pk.Global,  # (batch, heads, queries, D)
    lse: pk.Global,  # (batch, heads, queries, 1) float32: log2 of the sum of 2 ** (q k.T * scale)
    scale: float,  # log2(e) / sqrt(D)
    CAUSAL: pk.constexpr = True, D: pk.constexpr = 128, KV: pk.constexpr = 128,
    BQ: pk.constexpr = 128, WG: pk.constexpr = 2, STAGGER: pk.constexpr = True, DYNAMIC: pk.constexpr = True,
):  # fmt: skip
    qs, ks, vs, output = attention_pipes(q, k, v, o, BQ, KV, D)
    tiles = pk.cdiv(q.rows, BQ)
    for b, h, t in pk.tasks(q.batch, q.depth, tiles, group=1, dynamic=DYNAMIC):
        i, g = tiles - 1 - t, h // (q.depth // k.depth)  # the longest rows first; the head of k and v
        pos = i * BQ + k.rows - q.rows if CAUSAL else k.rows  # the last key that the tile's first row sees
        n = pk.max(pk.cdiv(pk.min(pos + BQ, k.rows), KV), 0)
        with pk.loader():
            with qs.fill() as s:
                pk.load_async(s.q, q, (b, h, i, 0))
            feed_kv(ks, vs, k, v, (b, g), n)
        with pk.consumer(warpgroups=WG, stagger=STAGGER):
            m, z, acc = fresh(BQ, D)
            with qs.drain() as s:
                for j in pk.range(n):
                    m, z, acc = attend(s.q, ks, vs, m, z, acc, pos, j * KV, k.rows, scale, KV)
            pk.store(lse, m * scale + pk.log2(z), (b, h, i, 0))
            with output.fill() as s:
                pk.store(s.o, acc * (1.0 / pk.max(z, 1e-30)))  # a row that sees no key is 0
        with pk.storer():
            with output.drain() as s:
                pk.store_async(o, s.o, (b, h, i, 0))


def operands(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k and v on the CPU, the same on every call."""
    gen = torch.Generator().manual_seed(0)
    shapes = (batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim)
    return [torch.randn(*shape, generator=gen).to(dtype) for shape in shapes]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 log-sum-exp in float64."""
    k, v = (t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        row, col = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        scores = scores.masked_fill(col > row + k.shape[2] - q.shape[2], -math.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) @ v), scores.logsumexp(-1, keepdim=True) / math.log(2)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on this rank's device; output and base-2 log-sum-exp, on the CPU."""
    q, k, v = (t.to(pk.device()) for t in (q, k, v))
    o, lse = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device=q.device)
    scale = math.log2(math.e) / math.sqrt(q.shape[-1])
    attention(q, k, v, o, lse, scale, CAUSAL=causal, D=q.shape[-1], **tiles)
    pk.synchronize()
    return o.cpu(), lse.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="flash attention forward")
    for name, value in (("batch", 1), ("heads", 4), ("kv-heads", 2), ("queries", 300), ("keys", 300), ("dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--causal", type=int, choices=[0, 1], default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    if args.heads % args.kv_heads or args.dim not in (64, 128):
        parser.error("--heads must be a multiple of --kv-heads, and --dim 64 or 128")
    dtype, causal = getattr(torch, args.dtype), bool(args.causal)
    q, k, v = operands(args.batch, args.heads, args.kv_heads, args.queries, args.keys, args.dim, dtype)

    print(f"attention, q {tuple(q.shape)}, k {tuple(k.shape)}, {args.dtype}, causal {causal}, {pk.describe_backend(1)}")
    start = time.perf_counter()
    ((o, lse),) = pk.spawn(run_rank, 1, args=(q, k, v, causal, {}))
    seconds = time.perf_counter() - start
    want, want_lse = reference(q, k, v, causal)
    error = float((o.double() - want).norm() / want.norm())
    seen = torch.isfinite(want_lse)
    worst = float((lse.double() - want_lse)[seen].abs().max())
    print(f"  relative error {error:.2e}, log-sum-exp off by at most {worst:.2e}, {seconds:.1f} s")
    if not (error <= 1e-2 and worst <= 1e-2):
        raise SystemExit(f"wrong: relative error {error:.2e}, log-sum-exp off by {worst:.2e}")

    print("\nThe same function as a cubin for sm_90a:")
    spec = {name: pk.spec(dtype, 4) for name in ("q", "k", "v", "o")} | {"lse": pk.spec(torch.float32, 4)}
    print(attention.resources(**spec, CAUSAL=causal, D=args.dim))


def run_rank(
    rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, tiles: dict[str, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``run`` as ``pk.spawn`` calls it."""
    return run(q, k, v, causal, **tiles)


if __name__ == "__main__":
    main()
