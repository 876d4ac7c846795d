"""Collectives on a GPU whose SMs the ranks share: the examples, and every bit of the reductions and copies."""

from __future__ import annotations

import pytest
import torch

import pk
from tests.collectives import kernels
from tests.collectives.test_examples import LIMIT, error, example

pytestmark = pytest.mark.gpu(1)
WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOVED = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32)


@WORLDS
def test_all_gather_matmul(world: int) -> None:
    e = example("02_all_gather_matmul")
    size = (world, 137 * world, 264, 200, torch.bfloat16)
    for rank, got in enumerate(pk.spawn(e.run, world, "cuda", size)):
        assert error(got, e.reference(rank, *size)) <= LIMIT


@WORLDS
def test_matmul_all_reduce(world: int) -> None:
    e = example("03_matmul_all_reduce")
    size = (world, 1333, 1288, 64 * world, torch.bfloat16)
    want, ranks = e.reference(*size), pk.spawn(e.run, world, "cuda", size)
    for name in e.KERNELS:
        assert max(error(copies[name], want) for copies in ranks) <= LIMIT
        assert all(torch.equal(copies[name], ranks[0][name]) for copies in ranks)


@WORLDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(world: int, dtype: torch.dtype) -> None:
    e = example("04_all_reduce")
    args = (world, 300_001, dtype)
    ranks, simulated = (pk.spawn(e.run, world, backend, args) for backend in ("cuda", "sim"))
    for name in ranks[0]:
        assert all(torch.equal(copies[name], simulated[0][name]) for copies in ranks), name


@WORLDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all(world: int, dtype: torch.dtype) -> None:
    e = example("05_all_to_all")
    args = (world, (3 * world, 2 * world, 8 * world), dtype)
    ranks, simulated = (pk.spawn(e.run, world, backend, args) for backend in ("cuda", "sim"))
    for got, want in zip(ranks, simulated, strict=True):
        assert all(torch.equal(got[name], want[name]) for name in want)


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(rank)
    values = (
        torch.randint(-999, 999, shape, generator=gen) if dtype == torch.int32 else torch.randn(shape, generator=gen)
    )
    return values.to(dtype)


def _reduced(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Windows of many shapes; odd columns keep some rows off 16 bytes."""
    results = []
    for rows, cols, tile in ((1, 4096, (1, 512)), (70, 264, (16, 16)), (300, 300, (256, 256)), (33, 131, (8, 32))):
        for op in ("sum", "min", "max"):
            x = pk.empty((rows, cols), dtype)
            x.copy_(numbers(rank, (rows, cols), dtype))
            out = torch.empty(rows, cols, dtype=dtype, device=x.device)
            kernels.reduce_2d(x, out, R=tile[0], C=tile[1], OP=op)
            kernels.all_reduce_2d(x, R=tile[0], C=tile[1], OP=op)
            results += [out, x.clone()]
    y = pk.empty((100, 136), dtype)
    y.copy_(numbers(rank, (100, 136), dtype))
    out = torch.empty_like(y)
    kernels.reduce_in_consumer(y, out)
    pk.synchronize()
    return [t.cpu() for t in (*results, out)]


@WORLDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_have_the_simulators_bits(world: int, dtype: torch.dtype) -> None:
    ranks, simulated = (pk.spawn(_reduced, world, backend, (dtype,)) for backend in ("cuda", "sim"))
    for got, want in zip(ranks, simulated, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def _moved(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    results = []
    step = 16 // dtype.itemsize
    for tile in ((16, 16), (256, 16), (64, 64), (200, 32)):
        for lead in ((), (2,), (2, 3)):
            shape = (*lead, tile[0] + 3, 5 * step)
            x, out = numbers(rank, shape, dtype).to(pk.device()), pk.empty(shape, dtype)
            kernels.copy(x, out, R=tile[0], C=tile[1])
            results.append(out)
            if dtype.itemsize > 1:
                total = pk.empty(shape, dtype)
                total.zero_()
                kernels.copy(x, total, R=tile[0], C=tile[1], TO="add")
                results.append(total)
    for cols in (16, 256, 2048):
        x, out = numbers(rank, (1504,), dtype).to(pk.device()), pk.empty((1504,), dtype)
        kernels.copy_vector(x, out, B=cols)
        results.append(out)
    x, out = numbers(rank, (70, 5 * step), dtype).to(pk.device()), pk.empty((world, 70, 5 * step), dtype)
    kernels.broadcast(x, out, R=32, C=32)
    pk.synchronize()
    return [t.cpu() for t in (*results, out)]


@WORLDS
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_copies_and_adds_have_the_simulators_bits(world: int, dtype: torch.dtype) -> None:
    ranks, simulated = (pk.spawn(_moved, world, backend, (world, dtype)) for backend in ("cuda", "sim"))
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for got, want in zip(ranks, simulated, strict=True):
        assert all(torch.equal(g.view(raw), w.view(raw)) for g, w in zip(got, want, strict=True))
