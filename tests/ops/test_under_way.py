"""How many pieces of sums over ranks are under way, where, and how far own tiles stay behind the others'."""

from __future__ import annotations

import pytest
import torch

import pk
import pk.ops
from pk.ops import fused
from pk.ops.fused import OPERATORS
from pk.ops.model import CONFIGS, Problem

SUMS = OPERATORS[1:]


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "in_place", "lags"),
    [
        (8192, 8192, 8192, "c128x256", True, (132, 132)),
        (8192, 4096, 8192, "c128x256", True, (132, 132)),
        (16384, 4096, 4096, "c128x256", True, (99, 132)),  # own tiles wait for the link at the end
        (4096, 4096, 4096, "c128x256", False, (99, 132)),
        (2048, 8192, 8192, "c128x256", False, (132, 132)),
        (8192, 8192, 8192, "p128x160", False, (132, 132)),
    ],
)
def test_as_measured_on_two_gpus(m: int, n: int, k: int, tile: str, in_place: bool, lags: tuple[int, int]) -> None:
    p = Problem(m, n, k // 2, 16, 16, 132, "kn")
    for scatters, lag in zip((True, False), lags, strict=True):
        found = fused._under_way(p, CONFIGS[tile], 2, scatters)
        assert (found.get("IN_PLACE", False), found["LAG"]) == (in_place, lag)
        assert found["OUTS"] + found["PARTS"] * (not in_place) <= fused.IN_PLACE


@pytest.mark.parametrize("operator", SUMS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_same_bits_in_place(operator: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(rank)
        a, b = (torch.randn(*s, generator=made).bfloat16() for s in ((130 * world, 72), (72, 264)))
        bias = torch.randn(264, generator=torch.Generator().manual_seed(9))
        result: torch.Tensor = getattr(pk.ops, operator)(a, b, bias=bias, activation="gelu", config="c64x128")
        return result

    ways = []
    for waves in (1e9, -1.0):
        fused._under_way.cache_clear()
        monkeypatch.setattr(fused, "IN_PLACE_WAVES", waves)
        ways.append(pk.spawn(run, world, "sim"))
    fused._under_way.cache_clear()
    assert all(torch.equal(apart, in_place) for apart, in_place in zip(*ways, strict=True))
