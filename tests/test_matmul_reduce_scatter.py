"""The spine on the simulator: right at every world size, dtype and tail; repeatable; fast enough for a laptop."""

from __future__ import annotations

import resource
import time

import pytest
import torch

import pk
from tests.kernels import all_gather_matmul, matmul, matmul_reduce_scatter_ordered, operands, relative_error
from tests.problems import Problem, expected, problems, solve

LIMIT = 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_world_sizes(world: int, dtype: torch.dtype) -> None:
    problem = Problem(seed=world, m=136, n=264, k=72, dtype=dtype)
    for got, want in zip(pk.spawn(solve, world, "sim", (world, problem)), expected(world, problem), strict=True):
        assert relative_error(got, want) <= LIMIT


@pytest.mark.parametrize("problem", problems(), ids=str)
def test_random_shapes(problem: Problem) -> None:
    world = (1, 2, 3, 4, 8)[problem.seed % 5]
    for got, want in zip(pk.spawn(solve, world, "sim", (world, problem)), expected(world, problem), strict=True):
        assert relative_error(got, want) <= LIMIT


def test_1024_cubed_on_four_ranks_is_quick_and_small() -> None:
    problem = Problem(seed=1, m=256, n=1024, k=256, dtype=torch.bfloat16)
    start = time.process_time()  # of this process: other load on the machine does not count
    slices = pk.spawn(solve, 4, "sim", (4, problem))
    assert time.process_time() - start <= 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= 2 * 1024**2  # KiB
    for got, want in zip(slices, expected(4, problem), strict=True):
        assert relative_error(got, want) <= LIMIT


def _operator(rank: int, world: int, m: int, n: int, k: int, deterministic: bool) -> list[torch.Tensor]:
    results = []
    for seed in range(3):  # the workspace is reused: an earlier result must stay what it was
        a, b = operands(rank, m, k, n, torch.bfloat16, seed)
        results.append(pk.ops.matmul_reduce_scatter(a, b, deterministic=deterministic))
    return results


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_operator(world: int, deterministic: bool) -> None:
    m, n, k = 40 * world, 136, 88
    ranks = pk.spawn(_operator, world, "sim", (world, m, n, k, deterministic))
    for seed in range(3):
        total = torch.zeros(m, n, dtype=torch.float64)
        for r in range(world):
            a, b = operands(r, m, k, n, torch.bfloat16, seed)
            total += a.double() @ b.double()
        for got, want in zip(ranks, total.chunk(world), strict=True):
            assert relative_error(got[seed], want) <= LIMIT


def test_operator_of_nothing() -> None:
    a, b = torch.ones(0, 8).bfloat16(), torch.ones(8, 16).bfloat16()
    assert pk.ops.matmul_reduce_scatter(a, b).shape == (0, 16)
    assert torch.equal(
        pk.ops.matmul_reduce_scatter(torch.ones(4, 0).half(), torch.ones(0, 8).half()), torch.zeros(4, 8)
    )


def _matmul(rank: int) -> torch.Tensor:
    a, b = operands(0, 200, 136, 264, torch.float16)
    c = torch.full((200, 264), float("nan"), dtype=torch.float16)
    matmul(a, b, c)
    return c


def test_one_rank_without_spawn() -> None:
    a, b = operands(0, 200, 136, 264, torch.float16)
    assert relative_error(_matmul(0), a.double() @ b.double()) <= 1e-3


def _ordered(rank: int, world: int, m: int, n: int, k: int) -> torch.Tensor:
    a, b = operands(rank, world * m, k, n, torch.bfloat16)
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    matmul_reduce_scatter_ordered(a.view(world, m, k), b, c, STAGES=3)
    return c


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_scratch_and_register_arithmetic(world: int) -> None:
    m, n, k = 130, 264, 72
    pairs = [operands(r, world * m, k, n, torch.bfloat16) for r in range(world)]
    total = sum(a.double() @ b.double() for a, b in pairs)
    for got, want in zip(pk.spawn(_ordered, world, "sim", (world, m, n, k)), total.chunk(world), strict=True):
        assert relative_error(got, want) <= LIMIT


def _gather(rank: int, world: int, m: int, n: int, k: int) -> torch.Tensor:
    x, _ = operands(rank, m, k, n, torch.bfloat16)
    _, b = operands(100 + rank, m, k, n, torch.bfloat16)
    c = torch.full((world, m, n), float("nan"), dtype=torch.bfloat16)
    all_gather_matmul(x, b, c)
    return c


@pytest.mark.parametrize("world", [1, 2, 4])
def test_communicator(world: int) -> None:
    m, n, k = 136, 264, 328
    whole = torch.stack([operands(r, m, k, n, torch.bfloat16)[0] for r in range(world)]).double()
    for rank, got in enumerate(pk.spawn(_gather, world, "sim", (world, m, n, k))):
        assert relative_error(got, whole @ operands(100 + rank, m, k, n, torch.bfloat16)[1].double()) <= LIMIT
