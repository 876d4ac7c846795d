"""The random problems that simulator and GPU both solve: shapes with tails in M, N and K."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import pk
from tests.kernels import matmul_reduce_scatter, operands


@dataclass(frozen=True)
class Problem:
    """A GEMM + reduce-scatter: ``m`` rows a rank, ``n`` columns, ``k`` of the contraction a rank."""

    seed: int
    m: int
    n: int
    k: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.seed}-{self.m}x{self.n}x{self.k}-{str(self.dtype).removeprefix('torch.')}"


def problems(count: int = 30, seed: int = 20) -> list[Problem]:
    """``count`` random problems: any m, n and k multiples of 8, seldom multiples of a tile; both 16-bit dtypes."""
    rng = random.Random(seed)
    draw = lambda top: 8 * rng.randint(1, top // 8)  # noqa: E731
    dtypes = (torch.bfloat16, torch.float16)
    return [Problem(i, rng.randint(1, 300), draw(560), draw(300), dtypes[i % 2]) for i in range(count)]


def solve(rank: int, world: int, problem: Problem) -> torch.Tensor:
    """One rank's part: its rows (m, n) of the sum."""
    a, b = operands(rank, world * problem.m, problem.k, problem.n, problem.dtype, problem.seed)
    a, b = a.to(pk.device()), b.to(pk.device())
    c = pk.empty((problem.m, problem.n), problem.dtype)
    c.fill_(float("nan"))  # nothing may depend on what was there
    matmul_reduce_scatter(a.view(world, problem.m, problem.k), b, c)
    pk.synchronize()
    return c.cpu()


def solve_all(rank: int, world: int, batch: list[Problem]) -> list[torch.Tensor]:
    """One rank's part of many problems, one launch after the other."""
    return [solve(rank, world, problem) for problem in batch]


def expected(world: int, problem: Problem) -> list[torch.Tensor]:
    """Every rank's rows in float64."""
    total = torch.zeros(world * problem.m, problem.n, dtype=torch.float64)
    for rank in range(world):
        a, b = operands(rank, world * problem.m, problem.k, problem.n, problem.dtype, problem.seed)
        total += a.double() @ b.double()
    return list(total.chunk(world))
