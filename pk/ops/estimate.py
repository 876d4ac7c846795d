"""Closed-form times of the tensor-parallel operators, in microseconds: pk's kernels and the library.

A fused kernel takes as long as the longer of its product, on the SMs that compute, and of the bytes that cross the
link, and what neither hides: the ranks' meeting, the last tile's way.  The library adds its parts up.

Constants are those of two H200s (NVLink, no multicast).  NCCL's are fitted to eleven measured problems, see
``tests/ops/test_choose.py``; where the estimates of two candidates are close, :func:`pk.ops.tune` decides better.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pk.ops import cublas, model
from pk.ops.model import CONFIGS, DRAM, Config, Problem

if TYPE_CHECKING:
    from pk.ops.fused import Request

LINK = 345.0  # bytes a nanosecond, each way
LINK_OF_SM = 30.0  # the same, that one SM moves in full messages, whose signals wait for its stores
FULL_ROWS = 128  # of a full message, 32 KiB
HOP_US = 1.3  # of a signal to a peer
MEET_US = 4 * HOP_US  # of a launch that waits for its peers to begin, and for them to be done with its memory
HELD = {"all_gather_matmul": 0.15, "matmul_reduce_scatter": 0.24, "matmul_all_reduce": 0.3}
"""Of the time that the link needs, what it takes from the product: the clock falls, and memory has more to do.  Sums
that go by pieces of 32 columns cost 3 times as much: 64 bytes of a row at a time, and the storer has twice as many.
"""
TURNED = 1.025  # measured over estimate of sums in turned tiles, by two ranks that share a GPU
HELD_BY_SMS = 0.04  # where SMs of their own move the rows
PASS_US = 3.0  # of a small kernel beside the bytes that it moves
NCCL: dict[str, tuple[float, float]] = {
    "all_gather_matmul": (25.0, 255.0), "matmul_reduce_scatter": (25.0, 205.0), "matmul_all_reduce": (25.0, 242.0),
}  # fmt: skip
"""Microseconds of a collective between two ranks that moves nothing, and bytes a nanosecond on the bus."""
NCCL_LEAST_US = 9.0  # of a collective of a few bytes; it grows to the above by twice the time that the link needs
NCCL_RANK_US = 3.0  # for each further rank
FEW_ROWS_LATE = 1.6  # measured over estimate of the all-gather for a few rows: products wait for rows, stage by stage


@dataclass(frozen=True, slots=True)
class Case:
    """What decides a choice.  ``m``, ``n``, ``k``: of the product that a rank computes; ``layout`` of b: "kn", "nk"."""

    operator: str
    world: int
    m: int
    n: int
    k: int
    bits: int = 16
    out_bits: int = 16
    layout: str = "kn"
    bias: bool = False
    activation: bool = False
    scaled: bool = False
    sms: int = model.SMS

    @property
    def block(self) -> int:
        """Rows of the product that belong to one rank."""
        return -(-self.m // self.world)

    @property
    def link_bytes(self) -> int:
        """That must enter and leave each GPU."""
        if self.operator == "all_gather_matmul":
            return (self.world - 1) * self.block * self.k * self.bits // 8
        rounds = 2 if self.operator == "matmul_all_reduce" else 1
        return rounds * (self.world - 1) * self.m * self.n * self.out_bits // 8 // self.world

    @property
    def out_bytes(self) -> int:
        """Of this rank's result."""
        rows = self.block if self.operator == "matmul_reduce_scatter" else self.m
        return rows * self.n * self.out_bits // 8

    def problem(self, sms: int) -> Problem:
        """The product on so many SMs."""
        return Problem(self.m, self.n, self.k, self.bits, self.out_bits, max(1, sms), self.layout)


def case_of(q: Request, sms: int) -> Case:
    """The case that ``q`` is."""
    p, scaled = q.computed, q.scale_a is not None or q.scale_b is not None
    return Case(
        q.operator, q.world, p.m, p.n, p.k, p.bits, p.out_bits, p.layout, q.bias is not None, q.activation != "none",
        scaled, sms,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- parts
def link_us(case: Case, sms: int, rows: int = FULL_ROWS) -> float:
    """Of the bytes that cross, moved by ``sms`` SMs in messages of so many rows; small messages move fewer bytes."""
    full = min(1.0, rows / FULL_ROWS)
    return case.link_bytes / 1e3 / min(LINK, LINK_OF_SM * full * max(sms, 1))


def best_product_us(case: Case) -> float:
    """Of the product alone, on all SMs."""
    return model.ranking(case.problem(case.sms))[0][1]


def floor_us(case: Case) -> float:
    """No kernel is quicker: the product, or the link."""
    return max(best_product_us(case), link_us(case, case.sms))


def _tiled_us(case: Case, tile: Config, sms: int) -> float:
    """Of the product by ``tile``, whose tiles end where a rank's rows end."""
    whole = case.problem(sms)
    if case.operator == "matmul_all_reduce" or case.world == 1:
        return model.microseconds(tile, whole)
    rows, blocks = tile.result_tile[0], -(-case.block // tile.result_tile[0])
    return model.microseconds(tile, replace(whole, m=min(blocks * rows, case.block + rows) * case.world))


def _longer(x: float, y: float, power: int = 6) -> float:
    """The maximum, and a little more where they are alike."""
    return float((x**power + y**power) ** (1 / power))


def fused_us(case: Case, tile: Config, comm_sms: int) -> float:
    """Of pk's kernel with ``tile``; ``comm_sms`` of the SMs communicate (all-gather only; 0: a warp of each)."""
    if case.world == 1 or tile.few:
        return _few_us(case, tile) if tile.few else _tiled_us(case, tile, case.sms)
    if case.operator == "all_gather_matmul":
        sms = case.sms - comm_sms
        product = _tiled_us(case, tile, sms)
        rows, cols = tile.result_tile
        link = link_us(case, comm_sms, min(case.block, rows)) if comm_sms else link_us(case, case.sms)
        tiles = -(-case.block // rows) * case.world * -(-case.n // cols)
        last = product / -(-tiles // max(1, sms))  # the last wave of tiles needs all rows
        late = FEW_ROWS_LATE if case.m <= cublas.FEW_ROWS else 1.0
        held = (HELD_BY_SMS if comm_sms else HELD[case.operator]) * link_us(case, case.sms)
        return late * (_longer(product, link + HOP_US + last, 16) + held + MEET_US)
    product, link = _tiled_us(case, tile, case.sms), link_us(case, case.sms)
    held = HELD[case.operator] * (64 / min(64, tile.rows if tile.swap else tile.piece)) ** 1.5
    total = (_longer(product, link + HOP_US) + held * link + MEET_US) * (TURNED if tile.swap else 1.0)
    if case.operator == "matmul_all_reduce":
        total += 2 * HOP_US  # the finished tile's way, and its copy by a communicator warp
    return total


def _few_us(case: Case, tile: Config) -> float:
    """Of pk's kernels for a few rows, which compute one wave of tiles: what they send comes after the product."""
    product = model.microseconds(tile, case.problem(case.sms))
    if case.operator == "all_gather_matmul":
        return FEW_ROWS_LATE * (_longer(product, link_us(case, case.sms) + 2 * HOP_US) + MEET_US)
    sent = case.link_bytes if case.operator != "matmul_all_reduce" else case.link_bytes * case.world // 2
    added = case.world * case.out_bytes / 1e3 / DRAM
    return product + sent / 1e3 / LINK + 2 * HOP_US + added + MEET_US


def library_us(case: Case) -> float:
    """Of the library: cuBLAS, taken to be as quick as the best of the kernel ``matmul``, and NCCL."""
    total = best_product_us(case)
    if case.bits == 16:
        total = min(total, cublas.microseconds(case.problem(case.sms)))
    if case.world > 1:
        latency, rate = NCCL[case.operator]
        latency = min(latency, NCCL_LEAST_US + 2 * link_us(case, case.sms))
        total += latency + NCCL_RANK_US * (case.world - 2) + case.link_bytes / 1e3 / rate
    gathers = case.operator == "all_gather_matmul"
    passes = case.activation + (case.bias and not gathers) + 2 * (case.scaled and case.bits == 16)
    if case.scaled and gathers and case.world > 1:
        total += NCCL[case.operator][0]  # the scales travel by themselves
    return total + _pass_us(case.out_bytes, passes)


def _pass_us(size: int, count: int) -> float:
    """``count`` times reading and writing ``size`` bytes, a kernel each."""
    return count * (PASS_US + 2 * size / 1e3 / DRAM)


def fitting(case: Case, tiles: tuple[str, ...]) -> list[Config]:
    """The tiles that do not mostly lie outside a rank's rows; never empty."""
    found = [CONFIGS[name] for name in tiles if CONFIGS[name].result_tile[0] < 2 * max(case.block, 64)]
    return found or [min((CONFIGS[name] for name in tiles), key=lambda c: c.rows)]


@functools.lru_cache(maxsize=4096)
def comm_counts(operator: str, world: int, sms: int) -> tuple[int, ...]:
    """Numbers of communicating SMs that are worth a look (0: a warp of each); one where there is nothing to choose."""
    if operator != "all_gather_matmul":
        return (0,)
    return tuple(count for count in (0, 1, 2, 4, 8, 16) if count <= max(1, sms // 8)) if world > 1 else (1,)


__all__ = [
    "Case", "best_product_us", "case_of", "comm_counts", "fitting", "floor_us", "fused_us", "library_us",
    "link_us",
]  # fmt: skip
