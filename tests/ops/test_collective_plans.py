"""How collectives are planned: hops, tiles, blocks, and that all ranks plan alike."""

from __future__ import annotations

import pytest
import torch

import pk
import pk.ops
from pk.ops import collective_plans
from pk.runtime.group import current


def test_one_hop_or_two() -> None:
    """Two ranks send the same either way; the more there are, the earlier two hops are quicker."""
    assert all(collective_plans.one_hop(2, nbytes) for nbytes in (1, 1 << 20, 1 << 34))
    limits = [max(n for n in range(10, 40) if collective_plans.one_hop(world, 1 << n)) for world in range(3, 9)]
    assert limits == sorted(limits, reverse=True)
    assert (limits[0], limits[-1]) == (20, 17)
    inside = [collective_plans.one_hop(2, nbytes, inside=True) for nbytes in (1 << 20, 16 << 20)]
    assert inside == [True, False]  # as measured


@pytest.mark.parametrize(
    ("rows", "cols", "tile"),
    [
        (1, 100_000, (1, 8192)), (1, 512, (1, 512)), (1, 700, (1, 1024)), (1, 3, (1, 256)), (0, 0, (1, 256)),
        (4096, 2048, (4, 2048)), (4096, 24, (256, 32)), (3, 2048, (4, 2048)), (64, 192, (64, 64)), (5, 1, (8, 8)),
        (4096, 3000, (32, 256)), (4096, 100, (64, 128)), (4096, 5, (256, 8)),
    ],
)  # fmt: skip
def test_tiles(rows: int, cols: int, tile: tuple[int, int]) -> None:
    assert collective_plans.shape_of(rows, cols, 8192) == tile


def test_blocks() -> None:
    """A small message is for few blocks; a large one cut so that every SM has some, a signal behind 128 KiB."""
    small = collective_plans.tiling(1, 1, 512, 2, 132)
    assert (small.cols, small.per, small.blocks) == (512, 1, 1)
    some = collective_plans.tiling(1, 1, 32 << 10, 2, 132)
    assert (some.cols, some.per, some.blocks) == (2048, 1, 16)
    large = collective_plans.tiling(1, 1, 1 << 26, 4, 132)
    assert (large.cols, large.per, large.blocks) == (16384, 2, None)
    summed = collective_plans.tiling(1, 1, 1 << 26, 2, 132, summed=True)
    assert (summed.cols, summed.per, summed.blocks) == (8192, 8, None)
    several = collective_plans.tiling(1, 1, 1 << 22, 2, 132)
    assert (some.lag, several.lag, large.lag, summed.lag) == (0, 132, 0, 0)  # a round ahead, of several but not many


def test_ranks_with_different_numbers_of_sms() -> None:
    """Three ranks on two GPUs: what the kernels are made for must be alike."""

    def run(rank: int) -> None:
        current().sms = 132 if rank == 1 else 66
        x = torch.full((1 << 20,), rank + 1.0, dtype=torch.bfloat16)
        assert bool((pk.ops.all_reduce(x) == 6).all())
        assert bool((pk.ops.all_gather(x).view(3, -1) == torch.tensor([[1.0], [2.0], [3.0]])).all())

    pk.spawn(run, 3, "sim")
