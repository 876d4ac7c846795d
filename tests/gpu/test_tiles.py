"""Register tiles on the GPU: bit for bit as in the simulator where the order of operations is defined."""

from __future__ import annotations

import pytest
import torch

import pk
from tests.tiles import kernels
from tests.tiles.test_example import EXAMPLE
from tests.tiles.test_simulator import normal

pytestmark = pytest.mark.gpu(1)

SHAPES = [(1, 2048), (2, 512), (3, 96), (8, 64), (16, 33), (37, 40), (5, 1), (1, 7), (64, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _reductions(rank: int, r: int, c: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x = normal(r, c, dtype=dtype).to(pk.device())
    rows, cols = (torch.full(s, float("nan"), device=x.device) for s in ((r, 3), (3, c)))
    kernels.reductions(x, rows, cols, R=r, C=c)
    pk.synchronize()
    return [rows.cpu(), cols.cpu()]


def _everything(rank: int) -> list[torch.Tensor]:
    """All that rounds the same everywhere."""
    return [t for dtype in DTYPES for r, c in SHAPES for t in _reductions(rank, r, c, dtype)]


def test_reductions_agree_bit_for_bit() -> None:
    (sim,), (gpu,) = (pk.spawn(_everything, 1, backend) for backend in ("sim", "cuda"))
    for mine, theirs in zip(gpu, sim, strict=True):
        assert torch.equal(mine, theirs)


def _fragment(rank: int, groups: int) -> list[torch.Tensor]:
    m = 100 * groups
    # Small integers: the tensor core's sums are then exact, and what is left is the order of ours.
    a = torch.randint(-4, 5, (m, 64), generator=torch.Generator().manual_seed(0)).to(torch.float16)
    b = torch.randint(-4, 5, (64, 56), generator=torch.Generator().manual_seed(1)).to(torch.float16)
    tasks, device = -(-m // (64 * groups)), pk.device()
    y, rows, cols = (torch.zeros(s, device=device) for s in ((m, 56), (m, 1), (tasks, 56)))
    kernels.fragment_softmax(a.to(device), b.to(device), y, rows, cols, G=groups)
    pk.synchronize()
    return [y.cpu(), rows.cpu(), cols.cpu()]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_fragments(groups: int) -> None:
    (sim,), (gpu,) = (pk.spawn(_fragment, 1, backend, (groups,)) for backend in ("sim", "cuda"))
    assert torch.allclose(gpu[0], sim[0], rtol=1e-5, atol=1e-9)  # exp is within 2 ulp
    assert torch.equal(gpu[1], sim[1])
    assert torch.equal(gpu[2], sim[2])


def _others(rank: int) -> list[torch.Tensor]:
    device = pk.device()
    x, w, b = (t.to(device) for t in (normal(37, 200, dtype=torch.bfloat16), normal(200, seed=1), normal(200, seed=2)))
    soft, norm = torch.zeros(37, 200, device=device), torch.zeros(37, 200, device=device)
    kernels.softmax(x, soft)
    kernels.layernorm(x, w, b, norm, 1e-5)
    back = normal(20, 3, 1100, dtype=torch.bfloat16).to(device).transpose(0, 1)
    out = torch.zeros(20, 1100, device=device)
    kernels.moe_weighted_sum(back, normal(20, 3, seed=4).to(device), out)
    numbers = torch.randint(-9, 9, (1, 256), dtype=torch.int32, generator=torch.Generator().manual_seed(3)).to(device)
    prefix = torch.zeros(256, 1, dtype=torch.int32, device=device)
    kernels.prefix_sum(numbers, prefix)
    pk.synchronize()
    return [t.cpu() for t in (out, prefix, soft, norm)]


def test_weighted_sum_prefix_sum_softmax_layernorm() -> None:
    (sim,), (gpu,) = (pk.spawn(_others, 1, backend) for backend in ("sim", "cuda"))
    assert torch.equal(gpu[0], sim[0])
    assert torch.equal(gpu[1], sim[1])
    assert torch.allclose(gpu[2], sim[2], rtol=2e-6, atol=0)
    assert torch.allclose(gpu[3], sim[3], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_all_reduce_rmsnorm(world: int) -> None:
    tokens, hidden, dtype = 37, 1024, torch.bfloat16
    gpu = pk.spawn(EXAMPLE.run, world, "cuda", (world, tokens, hidden, dtype))
    sim = pk.spawn(EXAMPLE.run, world, "sim", (world, tokens, hidden, dtype))
    for (y, total), (want_y, want_total) in zip(gpu, sim, strict=True):
        assert torch.equal(total, want_total)  # sums in one order, rounded once
        assert torch.allclose(y.float(), want_y.float(), rtol=8e-3, atol=1e-6)  # rsqrt is within 2 ulp, then bfloat16


def _scalars(rank: int, world: int) -> torch.Tensor:
    device = pk.device()
    x = normal(64, 64, dtype=torch.bfloat16, seed=rank).to(device)
    y = pk.empty((64, 64), torch.float32)
    y.zero_()
    kernels.scalars(x, torch.tensor([2, 3, 1], dtype=torch.int32, device=device), y, 5)
    pk.synchronize()
    return y.cpu()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_scalars(world: int) -> None:
    for mine, theirs in zip(*(pk.spawn(_scalars, world, b, (world,)) for b in ("cuda", "sim")), strict=True):
        assert torch.equal(mine, theirs)
