"""The closed-form times against measured ones, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import pk
import pk.ops
from pk.ops import choose, estimate, fused
from pk.ops.choose import Choice
from pk.ops.estimate import Case
from pk.ops.model import CONFIGS

AG, RS, AR = fused.OPERATORS
MEASURED = [  # two H200s, microseconds: operator, m, n, k of a rank's product, NCCL + cuBLAS
    (AG, 8192, 4096, 8192, 981), (AG, 8192, 2048, 8192, 670), (AG, 16384, 2048, 4096, 686), (AG, 4096, 2048, 4096, 199),
    (RS, 8192, 8192, 4096, 1150), (RS, 8192, 4096, 4096, 546), (RS, 16384, 4096, 2048, 705),
    (RS, 4096, 4096, 2048, 197), (AR, 8192, 8192, 4096, 1296), (AR, 4096, 4096, 2048, 238),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "m", "n", "k", "us"), MEASURED)
def test_the_librarys_estimate(operator: str, m: int, n: int, k: int, us: float) -> None:
    case = Case(operator, 2, m, n, k)
    assert 0.86 < estimate.library_us(case) / us < 1.12
    quickest = min(choose.cost(case, way) for way in _ways(case))
    assert estimate.floor_us(case) <= quickest < 0.9 * us


def _ways(case: Case) -> list[Choice]:
    counts = estimate.comm_counts(case.operator, case.world, case.sms)
    return [Choice(tile, comm) for tile in estimate.fitting(case, fused.TILES) for comm in counts]


def test_more_is_not_quicker() -> None:
    for operator in fused.OPERATORS:
        small, large = Case(operator, 4, 2048, 2048, 2048), Case(operator, 4, 4096, 4096, 4096)
        assert estimate.library_us(small) < estimate.library_us(large)
        assert estimate.link_us(small, 8) < estimate.link_us(large, 8)
        tile = CONFIGS["c128x256"]
        assert estimate.fused_us(small, tile, 8) < estimate.fused_us(large, tile, 8)
    link_bound = Case(AG, 8, 8192, 128, 8192)
    tile = CONFIGS["c128x64"]
    assert estimate.fused_us(link_bound, tile, 8) < estimate.fused_us(link_bound, tile, 2)
    busy = Case(AG, 2, 4096, 32768, 1024)
    assert estimate.fused_us(busy, CONFIGS["c128x256"], 16) > estimate.fused_us(busy, CONFIGS["c128x256"], 4)


def test_ranks_that_share_a_gpu_keep_most_of_it_for_compute() -> None:
    assert estimate.comm_counts(AG, 8, 132) == (0, 1, 2, 4, 8, 16)
    assert estimate.comm_counts(AG, 8, 16) == (0, 1, 2)
    assert estimate.comm_counts(AG, 1, 132) == (1,)
    assert estimate.comm_counts(RS, 8, 132) == (0,)


def test_communicator_warps_are_taken_where_they_save_a_wave() -> None:
    tile = CONFIGS["c128x256"]
    facts = choose.Facts("a GPU", 132, "", "", {})
    case = Case(AG, 2, 8192, 2048, 8192)  # 3.9 waves of tiles
    whole, fewer = (estimate.fused_us(case, tile, comm) for comm in (0, 8))
    assert whole < fewer  # the product has all SMs
    every = choose.candidates(case, facts)
    assert every[0].choice == Choice(tile, 0)
    assert choose.warps(AG, every[0].choice)
    assert not [c for c in every if choose.warps(AG, c.choice) and fused.crowded(c.choice.tile)]  # too slow for a link
    assert {c.choice.comm_sms for c in choose.allowed(every, AG, False, 0, None)} == {0}
    facts.tuned[choose.key(case)] = [["p128x192/8", 1.0, ""]]
    assert choose.candidates(case, facts)[0].choice == Choice(CONFIGS["p128x192"], 8)  # measured: no guess goes before
    a, b = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta"), torch.empty(8192, 2048, device="meta")
    shown = pk.ops.explain(AG, a, b.bfloat16(), world_size=2, comm_sms=0, config="c128x256")
    assert "-> c128x256, communicator warps" in shown


def test_tiles_whose_sums_would_spill_are_no_candidates() -> None:
    facts = choose.Facts("a GPU", 132, "", "", {})
    plain = Case(RS, 2, 16384, 4096, 4096)
    for case, there in ((plain, True), (replace(plain, scaled=True), False), (replace(plain, out_bits=32), False)):
        names = [c.choice.tile.name for c in choose.candidates(case, facts) if c.choice.tile is not None]
        assert ("p128x192.t" in names) == there
        assert "c128x256" in names
    gathered = choose.candidates(replace(plain, operator=AG, scaled=True), facts)
    assert "p128x192.t" in [c.choice.tile.name for c in gathered if c.choice.tile is not None]


MEASURED_FUSED = [  # two H200s, microseconds: operator, m, n, k of a rank's product, communicating SMs, pk
    (AG, 8192, 4096, 8192, 0, 731), (AG, 8192, 2048, 8192, 0, 374), (AG, 16384, 2048, 4096, 0, 382),
    (AG, 4096, 2048, 4096, 0, 101), (AG, 8192, 7168, 4096, 0, 640), (AG, 2048, 4096, 8192, 0, 182),
    (AG, 8192, 4096, 8192, 4, 701), (AG, 2048, 4096, 8192, 4, 227), (RS, 8192, 8192, 4096, 0, 758),
    (RS, 8192, 4096, 4096, 0, 376), (RS, 16384, 4096, 2048, 0, 411), (RS, 4096, 4096, 2048, 0, 108),
    (RS, 8192, 14336, 2048, 0, 714), (RS, 2048, 8192, 4096, 0, 193), (AR, 8192, 8192, 4096, 0, 801),
    (AR, 4096, 4096, 2048, 0, 142),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "m", "n", "k", "comm", "us"), MEASURED_FUSED)
def test_the_fused_kernels_estimate(operator: str, m: int, n: int, k: int, comm: int, us: float) -> None:
    assert 0.95 < estimate.fused_us(Case(operator, 2, m, n, k), CONFIGS["c128x256"], comm) / us < 1.12


def test_the_best_number_of_communicating_sms_is_chosen() -> None:
    facts = choose.Facts("a GPU", 132, "", "", {})
    for m, n, k, best in ((8192, 4096, 8192, 4), (8192, 2048, 8192, 0), (2048, 4096, 8192, 0)):  # as measured
        assert choose.candidates(Case(AG, 2, m, n, k), facts)[0].choice.comm_sms == best
