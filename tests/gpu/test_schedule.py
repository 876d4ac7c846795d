"""Scheduling options on a GPU: the results are those of the simulator, whatever the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.ops.kernels import matmul
from tests.codegen.test_schedule import SCHEDULES
from tests.kernels import operands, relative_error
from tests.schedule_kernels import copy_halves, doubling, ring_gather, two_communicators
from tests.test_schedule import block

pytestmark = pytest.mark.gpu(1)

# Rows of tiles: one, an odd number, more than a group; K: none at all, shorter than a stage, longer than the ring.
SHAPES = [(128, 64, 256), (1, 8, 8), (392, 136, 264), (1160, 512, 520), (4000, 1096, 2056), (256, 0, 264)]


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=pk.device())


@pytest.mark.parametrize("name", SCHEDULES)
def test_gemm(name: str) -> None:
    for m, k, n in SHAPES:
        a, b = (t.to(pk.device()) for t in operands(0, m, k, n, torch.bfloat16))
        want = a.double() @ b.double()
        results = []
        for _ in range(3):
            c = nan(m, n)
            matmul(a, b, c, **SCHEDULES[name])
            pk.synchronize()
            results.append(c)
        assert relative_error(results[0].cpu(), want.cpu()) <= 1e-2, (m, k, n)
        assert all(torch.equal(results[0], c) for c in results[1:]), (m, k, n)


@pytest.mark.parametrize("name", ["c128x256, cluster 2", "p128x128, 6 stages", "p128x128, cluster 2"])
def test_gemm_many_times(name: str) -> None:
    """A missed phase or turn shows after many tasks a block and many launches."""
    a, b = (t.to(pk.device()) for t in operands(0, 3000, 2048, 3000, torch.bfloat16))
    first = nan(3000, 3000)
    matmul(a, b, first, **SCHEDULES[name])
    for _ in range(100):
        c = nan(3000, 3000)
        matmul(a, b, c, **SCHEDULES[name])
    pk.synchronize()
    assert torch.equal(c, first)
    assert relative_error(c.cpu(), (a.double() @ b.double()).cpu()) <= 1e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_choice_and_while(dynamic: bool) -> None:
    for m, n in ((200, 136), (3000, 1048)):
        x, y = block(1, m, n).to(pk.device()), block(2, m, n).to(pk.device())
        for _ in range(20):  # the work counter is zero at every launch
            out, copies = nan(2, m, n), nan(6, m, n)
            copy_halves(x, y, out, DYNAMIC=dynamic)
            doubling(x, copies, DYNAMIC=dynamic)
            pk.synchronize()
            assert torch.equal(out, torch.stack([x, y]))
            for copy in range(6):
                assert torch.equal(copies[copy], x) if copy in (0, 1, 2, 4) else copies[copy].isnan().all()


def _ring(rank: int, world: int, dynamic: bool) -> list[torch.Tensor]:
    results = []
    for m, n in ((200, 136), (1000, 520)):
        x = block(rank, 1, m, n).to(pk.device())
        for _ in range(50):
            out = nan(world, m, n)
            ring_gather(x, out, DYNAMIC=dynamic)
        pk.synchronize()
        results.append(out.cpu())
    return results


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ring(world: int, dynamic: bool) -> None:
    ranks = pk.spawn(_ring, world, "cuda", (world, dynamic))
    for i, (m, n) in enumerate(((200, 136), (1000, 520))):
        whole = torch.cat([block(r, 1, m, n) for r in range(world)])
        assert all(torch.equal(results[i], whole) for results in ranks)


def _two(rank: int, world: int, options: dict[str, Any]) -> list[torch.Tensor]:
    x = block(rank, 1000, 520).to(pk.device())
    out, twice = (pk.empty((world, 1000, 520), torch.bfloat16) for _ in range(2))
    mine = nan(1000, 520)
    for _ in range(20):
        two_communicators(x, out, twice, mine, **options)
    pk.synchronize()
    return [out.cpu(), twice.cpu(), mine.cpu()]


@pytest.mark.parametrize("options", [{}, {"COMM": 9, "DYNAMIC": True}, {"COMM": 200}], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_two_communicators(world: int, options: dict[str, Any]) -> None:
    whole = torch.stack([block(r, 1000, 520) for r in range(world)])
    for rank, (out, twice, mine) in enumerate(pk.spawn(_two, world, "cuda", (world, options))):
        assert torch.equal(out, whole)
        assert torch.equal(twice, whole)
        assert torch.equal(mine, whole[rank])
