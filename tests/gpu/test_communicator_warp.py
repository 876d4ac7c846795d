"""Communicator warps on a GPU whose SMs the ranks share: every bit that they copy, and the operator that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.ops import parallel_kernels
from tests import communicator_kernels as k

pytestmark = pytest.mark.gpu(1)
WORLDS = pytest.mark.parametrize("world", [1, 2, 4])
MOVED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rank)
    values = torch.randint(-99, 99, shape, generator=gen) if dtype == torch.int32 else torch.randn(shape, generator=gen)
    return values.to(dtype)


def _gathered(rank: int, world: int, dtype: torch.dtype, constants: dict[str, Any]) -> list[torch.Tensor]:
    x, results = numbers(rank, (201, 336), dtype).to(pk.device()), []
    for _ in range(3):
        out = torch.zeros(world, 201, 336, dtype=dtype, device=x.device)
        k.gather(x, out, **constants)
        pk.synchronize()
        results.append(out.cpu())
    return results


@WORLDS
@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("constants", [{}, {"DYNAMIC": True}, {"CLUSTER": 2}], ids=str)
def test_gather(world: int, dtype: torch.dtype, constants: dict[str, Any]) -> None:
    want = torch.stack([numbers(r, (201, 336), dtype) for r in range(world)])
    for results in pk.spawn(_gathered, world, "cuda-threads", (world, dtype, constants)):
        assert all(torch.equal(out.view(torch.uint8), want.view(torch.uint8)) for out in results)


def _odd(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows off 16 bytes, tiles over every edge, pieces that no power of two divides, fewer rows than the tile has."""
    results = []
    for cols, tile in (
        (131, (5, 24)),
        (264, (5, 24)),
        (131, (16, 128)),
        (528, (16, 128)),
        (100, (1, 33)),
        (7, (40, 1)),
    ):
        for at in (0, 3):
            x = numbers(rank, (45, cols), dtype).to(pk.device())
            y = pk.empty((world, 45, cols), dtype)
            y.view(torch.uint8).zero_()
            a, b = (torch.zeros(16, 16, dtype=torch.bfloat16, device=x.device) for _ in range(2))
            k.odd_copies(x, y, a, b, R=tile[0], C=tile[1], ROWS=max(1, tile[0] - 1), AT=at)
            pk.synchronize()
            results.append(y.cpu())
    return results


@WORLDS
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_odd_copies(world: int, dtype: torch.dtype) -> None:
    for results in pk.spawn(_odd, world, "cuda-threads", (world, dtype)):
        for y in results:
            want = torch.stack([numbers(r, (45, y.shape[2]), dtype) for r in range(world)])
            assert torch.equal(y.view(torch.uint8), want.view(torch.uint8))


@WORLDS
def test_arithmetic(world: int) -> None:
    xs = torch.stack([numbers(r, (37, 152), torch.float32).round() for r in range(world)])

    def body(rank: int) -> tuple[torch.Tensor, ...]:
        total, tops = pk.empty((world, 37, 1), torch.float32), pk.empty((world, 1, 152), torch.float32)
        x, copy = xs[rank].to(pk.device()), torch.zeros(37, 152, device=pk.device())
        k.reckon(x, total, tops, copy)
        pk.synchronize()
        return total.cpu(), tops.cpu(), copy.cpu()

    for rank, (total, tops, copy) in enumerate(pk.spawn(body, world, "cuda-threads")):
        assert torch.equal(total, xs.sum(2, keepdim=True))
        assert torch.equal(tops, xs.amax(1, keepdim=True))
        assert torch.equal(copy, xs[rank])


SIZES = (  # rows of a rank, K, N, constants
    ((1000, 1088, 520), {}),
    ((257, 4096, 1024), {"CHUNKS": 2}),
    ((300, 528, 200), {"BM": 64, "BN": 128, "WARPGROUPS": 1, "CHUNKS": 2}),
    ((640, 1024, 480), {"BN": 160, "P": 32, "PINGPONG": True}),
)


def _product(rank: int, world: int, at: int, dtype: torch.dtype, whole: bool) -> list[torch.Tensor]:
    (m, depth, n), constants = SIZES[at]
    x, b = numbers(rank, (m, depth), dtype).to(pk.device()), numbers(99, (depth, n), dtype).to(pk.device())
    narrow = dtype.itemsize == 1
    if narrow:
        b = b.t().contiguous()
    full = pk.empty((world, m, depth), dtype) if whole else None
    sizes = {"BK": 128 // dtype.itemsize, "BC": 256 // dtype.itemsize, "B_T": narrow, **constants}
    results = []
    for comm in (0, 0, 4):
        c = torch.full((world, m, n), float("nan"), dtype=torch.bfloat16, device=x.device)
        parallel_kernels.all_gather_matmul(x, b, c, full, COMM=comm, **sizes)
        pk.synchronize()
        results += [c.cpu()] + ([full.cpu()] if full is not None else [])
    return results


@WORLDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("at", range(len(SIZES)))
def test_all_gather_matmul(world: int, dtype: torch.dtype, at: int) -> None:
    """The same bits as with SMs that communicate; the rows as the ranks have them."""
    (m, depth, _), _ = SIZES[at]
    xs = torch.stack([numbers(r, (m, depth), dtype) for r in range(world)])
    for whole in (False, True):
        for results in pk.spawn(_product, world, "cuda-threads", (world, at, dtype, whole)):
            step = 1 + whole
            assert all(torch.equal(c, results[-step]) for c in results[::step])
            assert not results[0].isnan().any()
            for full in results[1::2] if whole else ():
                assert torch.equal(full.view(torch.uint8), xs.view(torch.uint8))


def _operator(rank: int) -> list[torch.Tensor]:
    a, b = (
        numbers(rank, (512, 1024), torch.bfloat16).to(pk.device()),
        numbers(9, (1024, 768), torch.bfloat16).to(pk.device()),
    )
    found = [pk.ops.all_gather_matmul(a, b, comm_sms=sms, config="c128x256") for sms in (0, 4)]
    pk.synchronize()
    return [c.cpu() for c in found]


@WORLDS
def test_the_operator(world: int) -> None:
    for warps, sms in pk.spawn(_operator, world, "cuda-threads"):
        assert torch.equal(warps, sms)


def _stuck(rank: int) -> str:
    x, out = (
        numbers(rank, (64, 64), torch.bfloat16).to(pk.device()),
        torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=pk.device()),
    )
    try:
        k.gather(x, out, SIGNAL=False)
        pk.synchronize()
    except pk.HangError as error:
        pk.reset()
        return str(error)
    return ""


def test_a_missing_signal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "2")
    for said in pk.spawn(_stuck, 2, "cuda-threads"):
        assert "ready" in said
        assert "loader" in said
