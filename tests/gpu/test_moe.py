"""Index vectors and the mixture-of-experts layer on a GPU: against float64, and against the simulator."""

from __future__ import annotations

import pytest
import torch

import pk
from tests.test_moe import load
from tests.vector_kernels import double_rows, exchange_rows, gather_rows, last_adds, segments

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("skew", [0, 1], ids=["even", "skewed"])
@pytest.mark.parametrize(
    "tokens", [(31,), (300, 41), (1, 150, 33), (5, 0, 700, 7), (64, 65, 66, 67, 68, 69, 70, 71)], ids=str
)
def test_mixture_of_experts(tokens: tuple[int, ...], skew: int) -> None:
    example, world = load(), len(tokens)
    problem = example.Problem(tokens, 4 * world, 3, 328, 200, skew)
    for rank, got in enumerate(pk.spawn(example.run, world, "cuda-threads", (problem, 5))):
        want = problem.reference(rank)
        if want.numel():
            assert float((got.double() - want).norm() / want.norm()) <= 1e-2, f"rank {rank}"


def _alone(rank: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    device = pk.device()
    x = torch.randn(50, 136, generator=gen).bfloat16().to(device)
    rows = torch.randint(-2, 53, (300,), generator=gen).int().to(device)
    outputs = [torch.full((300, 136), 3.0, device=device).bfloat16() for _ in range(3)]
    gather_rows(x, rows, outputs[0])
    gather_rows(x[:, :77], rows, outputs[1][:, :77], R=128)  # a ragged edge
    double_rows(x, rows, outputs[2])
    first, count = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([3, 0, 50, 10], [20, 50, 0, 1]))
    parts = torch.zeros(200, 136, device=device).bfloat16()
    segments(x, first, count, parts)
    total = torch.zeros(64, dtype=torch.int32, device=device)
    last_adds(torch.arange(9 * 64, device=device).int().view(9, 64), total)
    pk.synchronize()
    return [t.cpu() for t in (*outputs, parts, total)]


def test_kernels_of_one_rank_agree_with_the_simulator() -> None:
    (on_gpu,), (simulated,) = (pk.spawn(_alone, 1, backend) for backend in ("cuda-threads", "sim"))
    for got, want in zip(on_gpu, simulated, strict=True):
        assert torch.equal(got, want)


def _exchange(rank: int, world: int, n: int, cols: int) -> list[torch.Tensor]:
    perm = torch.randperm(world * n, generator=torch.Generator().manual_seed(n)).int()
    to = perm[rank * n : (rank + 1) * n].clone().to(pk.device())
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(rank)).bfloat16().to(pk.device())
    y, source = pk.empty((n, cols), torch.bfloat16), pk.empty((n,), torch.int32)
    seen, tickets = (torch.zeros(k, dtype=torch.int32, device=pk.device()) for k in (n, 1))
    for _ in range(20):
        exchange_rows(x, to, y, source, seen, tickets)
    pk.synchronize()
    return [t.cpu() for t in (y, seen, tickets)]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_rows_exchanged_between_ranks(world: int) -> None:
    ranks = [pk.spawn(_exchange, world, backend, (world, 215, 264)) for backend in ("cuda-threads", "sim")]
    for got, want in zip(*ranks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
