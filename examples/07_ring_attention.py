"""Ring attention in one launch: ranks hold slices of a long sequence, and keys and values travel around the ring.

At step t a rank attends to the keys of rank (me - t) while its communicator blocks pass on the tiles that have landed.
Two slots a head hold what travels; counters say what has arrived (`ready`) and what may be overwritten (`freed`).  The
softmax state of a query tile waits in scratch between steps.  Causal attention splits the sequence in 2 * world chunks
and gives rank r chunks r and 2 * world - 1 - r, so that every rank has equally much to do.

    python examples/07_ring_attention.py                  4 ranks: on GPUs if there are any, else simulated
    python examples/07_ring_attention.py --ranks 3 --causal 1 --heads 4 --kv-heads 2 --chunk 100
"""

import argparse
import math
import time

import torch

import pk
from pk.ops.attention import attend, attention_pipes, feed_kv, fresh


@pk.function
def chunk(rank, half):
    """The chunk of the whole sequence that is half ``half`` of rank ``rank``."""
    return rank if half == 0 else 2 * pk.world_size() - 1 - rank


@pk.function
def seen(query, key, i, C, BQ, KV, CAUSAL):
    """Tiles of chunk ``key`` that tile ``i`` of chunk ``query`` sees."""
    if CAUSAL:
        return 0 if key > query else pk.cdiv(pk.min((i + 1) * BQ, C) if key == query else C, KV)
    return pk.cdiv(C, KV)


@pk.function
def held(step, head, heads, k, v, kbuf, vbuf):
    """Where this rank has the keys and values of ring step ``step``: tensors and leading coordinate."""
    return (k, v, head) if step == 0 else (kbuf[pk.rank()], vbuf[pk.rank()], (step % 2) * heads + head)


@pk.function
def pass_on(ring, ksrc, vsrc, here, kbuf, vbuf, there, ready, freed, step, head, half, j, arrivals, users):
    """One tile of keys and values to the next rank, when it has landed here and its slot there is free."""
    W, right = pk.world_size(), (pk.rank() + 1) % pk.world_size()
    with pk.loader():
        if step > 0:
            pk.wait(ready, (step, head), arrivals)
        with ring.fill() as s:
            pk.load_async(s.k, ksrc, (here, half, j, 0))
            pk.load_async(s.v, vsrc, (here, half, j, 0))
    with pk.storer():
        if step > 1:
            pk.wait(freed, (step - 1, head), users)
        with ring.drain() as s:
            pk.store_async(kbuf[right], s.k, (there, half, j, 0))
            pk.store_async(vbuf[right], s.v, (there, half, j, 0))
        pk.signal(ready, (step + 1, head), right)
        if 0 < step < W - 2:
            pk.signal(freed, (step, head), (pk.rank() - 1) % W)


@pk.function
def restore(state, at, BQ, D):
    """Softmax state of a query tile, from scratch."""
    m, z, acc = state
    me = pk.rank()
    return pk.load(m[me], at, (BQ, 1)), pk.load(z[me], at, (BQ, 1)), pk.load(acc[me], at, (BQ, D))


@pk.function
def save(state, at, m, z, acc):
    """Softmax state of a query tile, to scratch."""
    for place, value in ((state[0], m), (state[1], z), (state[2], acc)):
        pk.store(place[pk.rank()], value, at)


@pk.kernel
def ring_attention(
    q: pk.Global,  # (heads, 2, C, D)  this rank's two chunks
    k: pk.Global,  # (kv heads, 2, C, D)
    v: pk.Global,  # (kv heads, 2, C, D)
    o: pk.Global,  # (heads, 2, C, D)
    scale: float,  # log2(e) / sqrt(D)
    CAUSAL: pk.constexpr = False, D: pk.constexpr = 128, KV: pk.constexpr = 128, BQ: pk.constexpr = 128,
    WG: pk.constexpr = 2, COMM: pk.constexpr = 8, STAGGER: pk.constexpr = True, DYNAMIC: pk.constexpr = True,
):  # fmt: skip
    qs, ks, vs, output = attention_pipes(q, k, v, o, BQ, KV, D)
    ring = pk.pipeline(3, k=pk.shared((KV, D), k.dtype), v=pk.shared((KV, D), v.dtype))
    me, W, C, heads, R = pk.rank(), pk.world_size(), q.rows, k.batch, q.batch // k.batch
    tiles, kv_tiles = pk.cdiv(q.rows, BQ), pk.cdiv(k.rows, KV)
    kbuf, vbuf = pk.scratch((2 * heads, 2, C, D), k.dtype), pk.scratch((2 * heads, 2, C, D), v.dtype)  # two slots
    m_, z_ = pk.scratch((q.batch, 2, C, 1), pk.float32), pk.scratch((q.batch, 2, C, 1), pk.float32)
    acc_ = pk.scratch((q.batch, 2, C, D), pk.float32)  # state of every query tile between steps
    ready, freed = pk.signals(W, heads), pk.signals(W, heads)  # tiles of that step that landed; users that are through
    done = pk.signals(q.batch, 2, tiles)  # steps that a query tile has absorbed

    with pk.communicator(sms=COMM):
        for step, g, half, j in pk.tasks(W - 1, heads, 2, kv_tiles, group=1):  # pass on what I hold at `step`
            ksrc, vsrc, here = held(step, g, heads, k, v, kbuf, vbuf)
            there, users = ((step + 1) % 2) * heads + g, 2 * R * tiles + 2 * kv_tiles
            pass_on(ring, ksrc, vsrc, here, kbuf, vbuf, there, ready, freed, step, g, half, j, 2 * kv_tiles, users)

    for step, h, half, i in pk.tasks(W, q.batch, 2, tiles, group=1, dynamic=DYNAMIC):
        src, g, qc = (me - step) % W, h // R, chunk(me, half)
        ksrc, vsrc, here = held(step, g, heads, k, v, kbuf, vbuf)
        first, second = seen(qc, chunk(src, 0), i, C, BQ, KV, CAUSAL), seen(qc, chunk(src, 1), i, C, BQ, KV, CAUSAL)
        active = first + second > 0 or step == W - 1
        pos = qc * C + i * BQ if CAUSAL else 2 * W * C
        with pk.loader():
            if active:
                with qs.fill() as s:
                    pk.load_async(s.q, q, (h, half, i, 0))
                if step > 0:
                    pk.wait(ready, (step, g), 2 * kv_tiles)
                for part in pk.range(2):
                    feed_kv(ks, vs, ksrc, vsrc, (here, part), first if part == 0 else second)
        with pk.consumer(warpgroups=WG, stagger=STAGGER):
            m, z, acc = fresh(BQ, D)
            pk.wait(done, (h, half, i), step)
            if active:
                if step > 0:
                    m, z, acc = restore((m_, z_, acc_), (h, half, i, 0), BQ, D)
                with qs.drain() as s:
                    for part in pk.range(2):
                        at = chunk(src, part) * C
                        for j in pk.range(first if part == 0 else second):
                            m, z, acc = attend(s.q, ks, vs, m, z, acc, pos, at + j * KV, at + C, scale, KV)
                if step < W - 1:
                    save((m_, z_, acc_), (h, half, i, 0), m, z, acc)
            if step == W - 1:
                with output.fill() as s:
                    pk.store(s.o, acc * (1.0 / z))
            pk.signal(done, (h, half, i), me)
            if 0 < step < W - 2:
                pk.signal(freed, (step, g), (me - 1) % W)
        with pk.storer():
            if step == W - 1:
                with output.drain() as s:
                    pk.store_async(o, s.o, (h, half, i, 0))


def operands(world: int, heads: int, kv_heads: int, C: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v of the whole sequence (heads, 2 * world chunks, C, dim), on the CPU, the same on every call."""
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(n, 2 * world, C, dim, generator=gen).to(dtype) for n in (heads, kv_heads, kv_heads)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention over the whole sequence in float64, in the shape of q."""
    rows, keys, values = (t.double().flatten(1, 2) for t in (q, k, v))
    keys, values = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (keys, values))
    scores = rows @ keys.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
    return (torch.softmax(scores, -1) @ values).view(q.shape)


def mine(t: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """The two chunks of rank ``rank``."""
    return t[:, [rank, 2 * world - 1 - rank]].contiguous()


def run(
    rank: int, world: int, sizes: tuple[int, int, int, int], dtype: torch.dtype, causal: bool, tiles: dict[str, int]
) -> torch.Tensor:
    """What every rank does; returns its chunks of the output."""
    q, k, v = (mine(t, rank, world).to(pk.device()) for t in operands(world, *sizes, dtype))
    o = torch.empty_like(q)
    scale = math.log2(math.e) / math.sqrt(q.shape[-1])
    ring_attention(q, k, v, o, scale, CAUSAL=causal, D=q.shape[-1], **tiles)
    pk.synchronize()
    return o.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="ring attention in one launch")
    for name, value in (("ranks", 4), ("heads", 4), ("kv-heads", 2), ("chunk", 96), ("dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--causal", type=int, choices=[0, 1], default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    if args.heads % args.kv_heads or args.dim not in (64, 128):
        parser.error("--heads must be a multiple of --kv-heads, and --dim 64 or 128")
    world, dtype, causal = args.ranks, getattr(torch, args.dtype), bool(args.causal)
    sizes = (args.heads, args.kv_heads, args.chunk, args.dim)

    length = 2 * world * args.chunk
    print(f"ring attention, {length} keys in {2 * world} chunks, causal {causal}, {pk.describe_backend(world)}")
    start = time.perf_counter()
    outputs = pk.spawn(run, world, args=(world, sizes, dtype, causal, {}))
    seconds = time.perf_counter() - start
    expected = reference(*operands(world, *sizes, dtype), causal)
    worst = 0.0
    for rank, got in enumerate(outputs):
        want = mine(expected, rank, world)
        error = float((got.double() - want).norm() / want.norm())
        worst = max(worst, error)
        print(f"  rank {rank}: chunks {rank} and {2 * world - 1 - rank}, relative error {error:.2e}")
    print(f"  {seconds:.1f} s")
    if not worst <= 1e-2:
        raise SystemExit(f"wrong: relative error {worst:.2e} > 1e-2")

    print("\nThe same function as a cubin for sm_90a:")
    print(ring_attention.resources(**{n: pk.spec(dtype, 4) for n in ("q", "k", "v", "o")}, CAUSAL=causal, D=args.dim))


if __name__ == "__main__":
    main()
