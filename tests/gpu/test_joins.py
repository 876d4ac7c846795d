"""Communicators whose blocks compute when they have ended, on GPUs: the bits are those without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk import errors
from pk.ops import parallel_kernels
from tests.gpu.passing import Passing
from tests.test_joins import spread

pytestmark = pytest.mark.gpu(1)
SIZES = [((384, 512), 640), ((130, 72), 264), ((1024, 2048), 1024), ((8, 8), 8)]
TILES: list[dict[str, Any]] = [
    {"BM": 128, "BN": 256, "P": 64, "STAGES": 4},
    {"BM": 128, "BN": 192, "P": 32, "STAGES": 4, "PINGPONG": True},
    {"BM": 64, "BN": 128, "P": 64, "STAGES": 6, "WARPGROUPS": 1},
]


def _gathered(rank: int, world: int, tile: dict[str, Any]) -> None:
    for (m, k), n in SIZES:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(rank)).bfloat16().to(pk.device())
        b = torch.randn(k, n, generator=torch.Generator().manual_seed(99)).bfloat16().to(pk.device())
        results = []
        for comm, join in ((2, False), *((c, True) for c in (1, 2, 4, 8) for _ in range(10))):
            c = torch.full((world, m, n), float("nan"), dtype=torch.bfloat16, device=pk.device())
            parallel_kernels.all_gather_matmul(x=x, b=b, c=c, COMM=comm, JOIN=join, **tile)
            pk.synchronize()
            results.append(c)
        assert all(torch.equal(results[0], c) for c in results[1:]), (m, k, n)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t['BM']}x{t['BN']}")
def test_the_same_bits_as_without(world: int, tile: dict[str, Any]) -> None:
    pk.spawn(_gathered, world, "cuda-threads", (world, tile))


def _forgets(rank: int, world: int) -> str:
    x, y = torch.ones(80, 16, device=pk.device()), pk.empty((80, 16), torch.float32)
    out, said = torch.zeros_like(x), ""
    try:
        spread(x, y, out, SIGNAL=False)
        pk.synchronize()
    except errors.HangError as error:
        said = str(error)
    pk.reset()
    work = Passing(rank, world)
    work.warm_up()
    for _ in range(3):
        work.step()
    work.check(3)
    return said


def test_a_signal_that_a_communicator_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "0.5")
    for said in pk.spawn(_forgets, 2, "cuda-threads", (2,)):
        assert "landed" in said
