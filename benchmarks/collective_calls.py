"""Random calls of the collectives, and what torch makes of the same tensors of all ranks at once."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

import pk
import pk.ops
from pk.ops import collectives

SUMMED = (torch.bfloat16, torch.float16, torch.float32)
MOVED = (*SUMMED, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


@dataclass(frozen=True)
class Call:
    """``operator`` of an x of ``shape``; ``place``: where the result goes, "", "out", "symmetric" or "x"."""

    operator: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    place: str = ""

    def x(self, rank: int, seed: int) -> torch.Tensor:
        """What ``rank`` passes."""
        gen = torch.Generator().manual_seed(1000 * seed + rank)
        if self.dtype in SUMMED:
            return torch.randn(self.shape, generator=gen).to(self.dtype)
        raw = torch.randint(
            0, 2 if self.dtype == torch.bool else 256, (*self.shape, self.dtype.itemsize), generator=gen
        )
        return raw.to(torch.uint8).view(self.dtype).view(self.shape)

    def run(self, rank: int, world: int, seed: int) -> torch.Tensor:
        """The result on this rank."""
        x = self.x(rank, seed).to(pk.device())
        shape = collectives.result_shape(
            self.operator, x, dict(zip(collectives.DIMENSIONS[self.operator], self.front(), strict=True)), world
        )
        out = {"x": x}.get(self.place)
        if self.place == "out":
            out = torch.empty(shape, dtype=self.dtype, device=x.device)
        elif self.place == "symmetric":
            out = pk.empty(shape, self.dtype)
        got: torch.Tensor = getattr(pk.ops, self.operator)(x, *self.dims, out=out)
        assert out is None or got is out
        return got.cpu()

    def front(self) -> tuple[int, ...]:
        """The dimensions counted from the front."""
        return tuple(dim % len(self.shape) for dim in self.dims)

    def want(self, rank: int, world: int, seed: int) -> torch.Tensor:
        """By torch, sums in float64; float8 as bytes."""
        xs = [self.x(r, seed) for r in range(world)]
        if self.dtype == torch.float8_e4m3fn:
            xs = [x.view(torch.uint8) for x in xs]
        if self.operator == "all_gather":
            return torch.cat(xs, self.dims[0])
        if self.operator == "all_to_all":
            return torch.cat([_part(x, self.dims[0], rank, world) for x in xs], self.dims[1])
        total = torch.stack(xs).double().sum(0)
        return total if self.operator == "all_reduce" else _part(total, self.dims[0], rank, world)

    @property
    def alike(self) -> bool:
        """Whether all ranks get the same."""
        return self.operator in ("all_gather", "all_reduce")

    def check(self, ranks: dict[int, torch.Tensor], world: int, seed: int) -> None:
        """Raise AssertionError unless the result of each of ``ranks`` is right, to the bit where it only moved."""
        for rank, got in ranks.items():
            want = self.want(rank, world, seed)
            assert (got.shape, got.dtype) == (want.shape, self.dtype), (self, seed, rank)
            if self.operator in collectives.SUMS:
                error = float((got.double() - want).norm() / want.norm().clamp_min(1e-30))
                assert error <= ERROR[self.dtype], (self, seed, rank, error)
            else:
                assert torch.equal(raw(got), raw(want)), (self, seed, rank)
        if self.alike:
            assert all(torch.equal(raw(got), raw(ranks[0])) for got in ranks.values() if len(ranks) > 1), (self, seed)


def _part(x: torch.Tensor, dim: int, rank: int, world: int) -> torch.Tensor:
    share = x.shape[dim] // world
    return x.narrow(dim, rank * share, share)


def raw(x: torch.Tensor) -> torch.Tensor:
    """Its bytes."""
    return x.contiguous().view(-1).view(torch.uint8)


def make(rng: random.Random, world: int, most: int, operator: str = "") -> Call:
    """A call with up to ``most`` elements or so."""
    operator = operator or rng.choice(tuple(collectives.DIMENSIONS))
    shape = [rng.choice((1, 2, 3, rng.randrange(1, 20))) for _ in range(rng.randrange(1, 5))]
    dims = [rng.randrange(len(shape)) for _ in collectives.DIMENSIONS[operator]]
    split = dims[0] if dims else 0
    shape[rng.randrange(len(shape))] *= rng.choice((1, 8, 64, max(1, most // math.prod(shape) // world)))
    shape[split] = 0 if rng.random() < 0.03 else shape[split] * world
    dtype = rng.choice(SUMMED if operator in collectives.SUMS else MOVED)
    places = ["", "out"] + ["symmetric"] * (dtype in SUMMED) + ["x"] * (operator == "all_reduce")
    negative = [dim - len(shape) if rng.random() < 0.5 else dim for dim in dims]
    return Call(operator, tuple(shape), tuple(negative), dtype, rng.choice(places))
