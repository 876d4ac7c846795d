"""Kernels and problems that many tests share."""

from __future__ import annotations

import torch

import pk
from pk.ops.gemm import accumulate, emit, feed, gemm_pipes, put
from pk.ops.kernels import matmul, matmul_reduce_scatter, matmul_reduce_scatter_ordered

__all__ = ["KERNELS", "all_gather_matmul", "matmul", "matmul_reduce_scatter", "matmul_reduce_scatter_ordered"]


@pk.kernel
def all_gather_matmul(
    x: pk.Global,  # (M / world, K)
    b: pk.Global,  # (K, N)
    c: pk.Global,  # (world, M / world, N)
    BM: pk.constexpr = 128, BN: pk.constexpr = 256, BK: pk.constexpr = 64,
    P: pk.constexpr = 64, STAGES: pk.constexpr = 4,
    COMM: pk.constexpr = 8, BC: pk.constexpr = 256,
):  # fmt: skip
    """Communicators push row blocks to peers while compute starts on its own rows."""
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


KERNELS = {
    "matmul": (matmul, {"a": 2, "b": 2, "c": 2}),
    "matmul_reduce_scatter": (matmul_reduce_scatter, {"a": 3, "b": 2, "c": 2}),
    "matmul_reduce_scatter_ordered": (matmul_reduce_scatter_ordered, {"a": 3, "b": 2, "c": 2}),
    "all_gather_matmul": (all_gather_matmul, {"x": 2, "b": 2, "c": 3}),
}
"""Every kernel of the repository, with the numbers of dimensions of its tensors."""


def specs(name: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Arguments for ``source()``, ``resources()``, ... of kernel ``name``."""
    return {tensor: pk.spec(dtype, ndim) for tensor, ndim in KERNELS[name][1].items()}


def operands(rank: int, m: int, k: int, n: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal a (m, k) and b (k, n) of ``rank``, scaled so that the product is of order 1."""
    gen = torch.Generator().manual_seed(7919 * seed + rank)
    a = torch.randn(m, k, generator=gen) / max(k, 1) ** 0.5
    return a.to(dtype), torch.randn(k, n, generator=gen).to(dtype)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float64; NaN if got has one."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))
