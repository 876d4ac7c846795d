"""Stages that the consumer changes in place, on GPUs: the bits are those without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.ops import parallel_kernels
from pk.ops.fused import owner_turns
from tests.test_over import WAYS, numbers

pytestmark = pytest.mark.gpu(1)
TILES: list[dict[str, Any]] = [
    {"BM": 128, "BN": 256, "P": 64, "STAGES": 3, "PARTS": 5, "AHEAD": 5},
    {"BM": 128, "BN": 256, "P": 64, "STAGES": 3, "PARTS": 3, "AHEAD": 2},
    {"BM": 64, "BN": 128, "P": 64, "STAGES": 4, "WARPGROUPS": 1, "PARTS": 1, "AHEAD": 1},
]


@pytest.mark.parametrize(("kernel", "options"), WAYS, ids=str)
def test_elements(kernel: Any, options: dict[str, Any]) -> None:
    for m, n in ((300, 264), (4096, 2048), (8, 8)):
        x = numbers(m, n).to(pk.device())
        for _ in range(20):
            y = torch.full_like(x, float("nan"))
            kernel(x, y, **options)
            pk.synchronize()
            assert torch.equal(y, 2 * x)


def _scattered(rank: int, world: int, tile: dict[str, Any]) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count // world
    for m, n, k in ((384, 640, 512), (136, 264, 72), (1024, 1024, 256), (8, 8, 8)):
        a = numbers(world, m, k, seed=rank).to(pk.device())
        b = numbers(k, n, seed=50 + rank).to(pk.device())
        results = []
        for in_place in (False, *(True for _ in range(20))):
            c = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=pk.device())
            options = tile | {"IN_PLACE": in_place} | owner_turns(sms, world)
            if not in_place:
                options |= {"PARTS": 2, "AHEAD": 1, "STAGES": 3}
            parallel_kernels.matmul_reduce_scatter_ordered(a=a, b=b, c=c, LAG=sms, **options)
            pk.synchronize()
            results.append(c)
        assert torch.isfinite(results[0]).all()
        assert all(torch.equal(results[0], c) for c in results[1:]), (m, n, k)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t['BM']}x{t['BN']}-{t['PARTS']}")
def test_sums_have_the_same_bits(world: int, tile: dict[str, Any]) -> None:
    pk.spawn(_scattered, world, "cuda-threads", (world, tile))
