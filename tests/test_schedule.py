"""Scheduling options never change results: the kernels of ``schedule_kernels`` with and without them, simulated."""

from __future__ import annotations

import pytest
import torch

import pk
from pk import errors
from pk.ops.kernels import matmul
from tests.kernels import operands, relative_error
from tests.schedule_kernels import copy_halves, doubling, ring_gather, two_communicators
from tests.test_attention import example


def block(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).bfloat16()


def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_choice_between_tensors(dynamic: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SEED", str(seed))
    a, b, out = block(1, 200, 136), block(2, 200, 136), nan(2, 200, 136)
    copy_halves(a, b, out, DYNAMIC=dynamic)
    assert torch.equal(out, torch.stack([a, b]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_while(dynamic: bool) -> None:
    x, out = block(1, 450, 136), nan(6, 450, 136)
    doubling(x, out, DYNAMIC=dynamic)
    for copy in range(6):
        assert torch.equal(out[copy], x) if copy in (0, 1, 2, 4) else out[copy].isnan().all()


def _ring(rank: int, world: int, dynamic: bool) -> torch.Tensor:
    out = nan(world, 200, 136)
    ring_gather(block(rank, 1, 200, 136), out, DYNAMIC=dynamic)
    return out


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ring(world: int, dynamic: bool) -> None:
    whole = torch.cat([block(r, 1, 200, 136) for r in range(world)])
    for got in pk.spawn(_ring, world, "sim", (world, dynamic)):
        assert torch.equal(got, whole)


def _two(rank: int, world: int, sms: int, dynamic: bool) -> list[torch.Tensor]:
    x = block(rank, 200, 136)
    out, twice = (pk.empty((world, 200, 136), torch.bfloat16) for _ in range(2))
    mine = nan(200, 136)
    two_communicators(x, out, twice, mine, COMM=sms, DYNAMIC=dynamic)
    return [out, twice, mine]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("world", "sms"), [(1, 1), (2, 9), (3, 2)])
def test_two_communicators(world: int, sms: int, dynamic: bool) -> None:
    whole = torch.stack([block(r, 200, 136) for r in range(world)])
    for rank, (out, twice, mine) in enumerate(pk.spawn(_two, world, "sim", (world, sms, dynamic))):
        assert torch.equal(out, whole)
        assert torch.equal(twice, whole)
        assert torch.equal(mine, whole[rank])


def test_two_communicators_need_four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SIM_SMS", "3")
    with pytest.raises(errors.ArgumentError, match=r"2 communicators, which need 2 SMs.*sms=3"):
        _two(0, 1, 1, False)


@pytest.mark.parametrize(
    "options",
    [{"PINGPONG": True}, {"CLUSTER": 2}, {"PINGPONG": True, "CLUSTER": 2}, {"PINGPONG": True, "BM": 64}],
    ids=str,
)
def test_gemm_options(options: dict[str, object]) -> None:
    a, b = operands(0, 392, 136, 264, torch.bfloat16)
    plain, c = nan(392, 264), nan(392, 264)
    matmul(a, b, plain, BN=128)
    matmul(a, b, c, BN=128, **options)
    assert torch.equal(c, plain)
    assert relative_error(c, a.double() @ b.double()) <= 1e-2


@pytest.mark.parametrize("world", [1, 3])
def test_ring_attention_options(world: int) -> None:
    ring = example("07_ring_attention")
    sizes, tiles = (2, 1, 72, 64), {"KV": 64, "COMM": 1}
    plain = {**tiles, "STAGGER": False, "DYNAMIC": False}
    want = pk.spawn(ring.run, world, "sim", (world, sizes, torch.bfloat16, True, plain))
    got = pk.spawn(ring.run, world, "sim", (world, sizes, torch.bfloat16, True, tiles))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
