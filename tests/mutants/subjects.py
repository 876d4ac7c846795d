"""The kernels of the operators and of the examples, with small problems."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from pk.ops import kernels as ops
from tests.conformance.case import BF16, F32, I32, Arg, Arguments, blank, generator, integers, normals
from tests.mutants.subject import Make, Problem, Subject, example

GEMM = {"BM": 128, "BN": 32, "BK": 16, "P": 16, "STAGES": 2}
M, N, K = 136, 48, 40  # two tiles, two tiles, three: each with a tail


def small(*shape: int, key: object = 0, dtype: torch.dtype = BF16, parallel: bool = False) -> Arg:
    """Whole numbers: sums are exact in any order, so that every difference is a mistake."""
    return Arg(integers(shape, -2, 2, shape, key), dtype, parallel)


def random(*shape: int, key: object = 0, dtype: torch.dtype = BF16, parallel: bool = False) -> Arg:
    """Normal numbers."""
    return Arg(normals(shape, dtype, shape, key), dtype, parallel)


# ------------------------------------------------------------------------------------------------- matrix products
def _matmul(rank: int, world: int) -> Arguments:
    return {"a": small(M, K, key=rank), "b": small(K, N, key=rank), "c": blank((M, N), BF16)}


def _split(rank: int, world: int) -> Arguments:
    """Two parts of K, a transposed output, and vectors along both edges."""
    return {
        "a": small(M, K, key=rank), "b": small(K, N, key=rank), "c": blank((N, M), BF16),
        "row_scale": small(M, 1, key="r", dtype=F32), "col_scale": small(1, N, key="s", dtype=F32),
        "col_bias": small(1, N, key="c", dtype=F32),
        "parts": blank((1, M, N), F32),
    }  # fmt: skip


def _reduce_scatter(parallel: bool) -> Make:
    def make(rank: int, world: int) -> Arguments:
        a, b = small(world, M, K, key=rank), small(K, N, key=rank)
        return {"a": a, "b": b, "c": blank((M, N), BF16, parallel)}

    return make


def gather(rank: int, world: int) -> Arguments:
    return {"x": small(M, K, key=rank), "b": small(K, N, key=rank), "c": blank((world, M, N), BF16)}


def _all_reduce(rank: int, world: int) -> Arguments:
    a, b = small(264, K, key=rank), small(K, N, key=rank)
    return {"a": a, "b": b, "c": blank((264, N), BF16, parallel=True)}


def _gemms() -> list[Subject]:
    three, both, one = example("03_matmul_all_reduce"), _reduce_scatter, GEMM | {"COMM": 1}
    gathered = example("02_all_gather_matmul").all_gather_matmul
    return [
        Subject("ops.matmul", ops.matmul, (Problem(1, _matmul),), GEMM),
        Subject("ops.matmul_split", ops.matmul, _one(_split), GEMM | {"SPLIT": 2, "C_T": True}),
        Subject("ops.matmul_reduce_scatter", ops.matmul_reduce_scatter, two_three(both(True)), GEMM),
        Subject(  # four ranks: the partial sums of a piece go round their ring
            "ops.matmul_reduce_scatter_ordered",
            ops.matmul_reduce_scatter_ordered,
            (*two_three(both(False)), Problem(4, both(False))),
            GEMM | {"PARTS": 2},
        ),
        Subject(
            "ops.matmul_reduce_scatter_turned",
            ops.matmul_reduce_scatter_ordered,
            (*two_three(both(False)), Problem(4, both(False))),
            GEMM | {"PARTS": 2, "BM": 32, "BN": 128, "TURNED": True},
        ),
        Subject(
            "ops.matmul_reduce_scatter_in_place",
            ops.matmul_reduce_scatter_ordered,
            (*two_three(both(False)), Problem(4, both(False))),
            GEMM | {"PARTS": 1, "AHEAD": 1, "IN_PLACE": True},
        ),
        Subject(
            "01.matmul_reduce_scatter",
            example("01_matmul_reduce_scatter").matmul_reduce_scatter,
            two_three(both(True)),
            GEMM,
        ),
        Subject("02.all_gather_matmul", gathered, two_three(gather, 3), one | {"BC": 16}),
        Subject("03.matmul_all_reduce", three.matmul_all_reduce, two_three(_all_reduce, 3), one),
        Subject("03.matmul_all_reduce_push", three.matmul_all_reduce_push, two_three(_all_reduce, 3), one),
    ]


def _one(make: Make) -> tuple[Problem, ...]:
    return Problem(2, make, 3), Problem(1, make, 1)


def two_three(make: Make, sms: int = 2, scalars: dict[str, Any] | None = None) -> tuple[Problem, ...]:
    return Problem(2, make, sms, scalars or {}), Problem(3, make, sms, scalars or {})


# ----------------------------------------------------------------------------------------------------- collectives
def _one_shot(rank: int, world: int) -> Arguments:
    return {"x": random(1, 88, key=rank, parallel=True), "out": blank((1, 88), BF16)}


def _two_shot(rank: int, world: int) -> Arguments:
    return {"x": random(1, 152, key=rank, parallel=True)}


def _push(rank: int, world: int) -> Arguments:
    return {"x": random(1, 152, key=rank), "out": blank((1, 152), BF16)}


def _ring(rank: int, world: int) -> Arguments:
    shape = (world, 40, 48)
    return {"x": random(*shape, key=rank), "out": blank(shape, BF16)}


def _gather_rows(rank: int, world: int) -> Arguments:
    return {"x": random(40, 56, key=rank), "out": blank((world, 40, 56), BF16, parallel=True)}


def _scatter_rows(rank: int, world: int) -> Arguments:
    return {"x": random(world, 40, 56, key=rank, parallel=True), "out": blank((40, 56), BF16)}


def _exchange(rank: int, world: int) -> Arguments:
    shape = (world, 2, 40, 56)
    return {"x": random(*shape, key=rank), "out": blank(shape, BF16, parallel=True)}


def _rmsnorm(rank: int, world: int) -> Arguments:
    shape = (13, 64)
    return {
        "x": random(*shape, key=rank, parallel=True), "residual": random(*shape, key="r"),
        "weight": random(1, 64, key="w"), "y": blank(shape, BF16, True), "residual_out": blank(shape, BF16, True),
    }  # fmt: skip


def _collectives() -> list[Subject]:
    four, five = example("04_all_reduce"), example("05_all_to_all")
    tiles = {"BM": 16, "BN": 16}
    rms = example("09_all_reduce_rmsnorm").all_reduce_rmsnorm
    return [
        Subject("04.one_shot", four.one_shot, two_three(_one_shot), {"B": 32}),
        Subject("04.two_shot", four.two_shot, two_three(_two_shot), {"B": 32}),
        Subject("04.push", four.push, two_three(_push), {"B": 32}),
        Subject("04.ring", four.ring, two_three(_ring), {"BM": 32, "BN": 32}),
        Subject("05.gather_kernel", five.gather_kernel, two_three(_gather_rows, 1), tiles),
        Subject("05.scatter_kernel", five.scatter_kernel, two_three(_scatter_rows), {"BM": 16, "BN": 32}),
        Subject("05.exchange_kernel", five.exchange_kernel, two_three(_exchange), tiles),
        Subject("09.all_reduce_rmsnorm", rms, two_three(_rmsnorm, 2, {"eps": 1e-5}), {"H": 64}),
    ]


# ------------------------------------------------------------------------------------------------------- attention
def _attention(rank: int, world: int) -> Arguments:
    q, kv = (1, 4, 144, 64), (1, 2, 176, 64)
    return {
        "q": random(*q, key="q"), "k": random(*kv, key="k"), "v": random(*kv, key="v"), "o": blank(q, BF16),
        "lse": blank((1, 4, 144, 1), F32),
    }  # fmt: skip


def _ring_attention(rank: int, world: int) -> Arguments:
    q, kv = (2, 2, 40, 64), (1, 2, 40, 64)
    names = {"q": q, "k": kv, "v": kv}
    return {n: random(*shape, key=(n, rank)) for n, shape in names.items()} | {"o": blank(q, BF16)}


def _attentions() -> list[Subject]:
    tiles = {"D": 64, "KV": 64, "BQ": 64, "WG": 1, "STAGGER": False}
    scale = {"scale": 0.18}
    ring = example("07_ring_attention").ring_attention
    worlds = (Problem(4, _ring_attention, 2, scale), Problem(3, _ring_attention, 3, scale))
    return [
        Subject("06.attention", example("06_attention").attention, (Problem(1, _attention, 2, scale),), tiles),
        Subject("07.ring_attention", ring, worlds, tiles | {"KV": 32, "COMM": 1, "CAUSAL": False}),
    ]


# ---------------------------------------------------------------------------------------------- mixture of experts
MOE_EL, MOE_TOPK, MOE_H, MOE_F = 2, 2, 40, 48


class Routing:
    """Which token goes to which expert, and where each entry lands: the tables of the example, made on the host.

    The last expert of every rank gets up to 128 rows, a whole tile; the buffers hold no row more than is needed.
    """

    def __init__(self, world: int, tokens: int) -> None:
        self.world, self.experts = world, MOE_EL * world
        self.tokens = [tokens + r for r in range(world)]
        self.slots = max(self.tokens) * MOE_TOPK
        order = generator("moe", world, tokens).permutation(sum(self.tokens))
        pairs = np.array([[1, 3] if i < min(128, sum(self.tokens) - 3) else [0, 2] for i in order])
        self.ids = np.split(pairs, np.cumsum(self.tokens)[:-1])
        _, total = self.tables()
        rows = (-(-total // 128) * 128).reshape(world, MOE_EL)
        self.rows = int(rows.sum(1).max())

    def sending(self, rank: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Entries of ``rank`` in the order in which they leave, and the expert of each."""
        flat = self.ids[rank].reshape(-1)
        order = (flat % MOE_EL * self.world + (flat // MOE_EL - rank - 1) % self.world).argsort(kind="stable")
        return order.astype(np.int32), flat[order].astype(np.int32)

    def tables(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """First row of each expert at its owner (E, 1), rows of each (1, E)."""
        total = np.bincount(np.concatenate([i.reshape(-1) for i in self.ids]), minlength=self.experts)
        base = np.zeros(self.experts, np.int32)
        for e in range(self.experts):
            base[e] = 0 if e % MOE_EL == 0 else base[e - 1] + -(-total[e - 1] // 128) * 128
        return base[:, None], total.astype(np.int32)[None]

    def origin(self, rank: int) -> np.ndarray[Any, Any]:
        """Where each row of ``rank`` came from: source * slots + entry; rows that nobody fills hold -1."""
        base, _ = self.tables()
        found, place = np.full(self.rows, -1, np.int32), base[:, 0].copy()
        for source in range(self.world):
            for entry, e in zip(*self.sending(source), strict=True):
                if e // MOE_EL == rank:
                    found[place[e]] = source * self.slots + entry
                place[e] += 1
        return found


def _dispatch(tokens: int, rank: int, world: int) -> Arguments:
    r = Routing(world, tokens)
    order, expert = r.sending(rank)
    counts = np.bincount(expert, minlength=r.experts).astype(np.int32)[None]
    return {
        "x": small(r.tokens[rank], MOE_H, key=("x", rank)), "perm": Arg(order, I32), "expert": Arg(expert, I32),
        "counts": Arg(counts, I32), "w": small(MOE_EL, MOE_H, MOE_F, key=("w", rank)),
        "y": blank((r.rows, MOE_F), BF16), "origin": blank((r.rows,), I32, parallel=True),
        "base_of": blank((r.experts, 1), I32), "total_of": blank((1, r.experts), I32),
    }  # fmt: skip


def _return(rank: int, world: int) -> Arguments:
    r = Routing(world, 80)
    base, total = r.tables()
    return {
        "y": small(r.rows, MOE_F, key=("y", rank)), "w": small(MOE_EL, MOE_F, MOE_H, key=("w2", rank)),
        "back": blank((r.slots, MOE_H), BF16, parallel=True), "origin": Arg(r.origin(rank), I32, parallel=True),
        "base_of": Arg(base, I32), "total_of": Arg(total, I32),
    }  # fmt: skip


def _weighted(rank: int, world: int) -> Arguments:
    back, weight = random(3, 21, 40, key="b"), random(21, 3, key="w", dtype=F32)
    return {"back": back, "weight": weight, "out": blank((21, 40), BF16)}


def _experts() -> list[Subject]:
    eight = example("08_moe")
    dispatch = GEMM | {"E": 2 * MOE_EL, "TOPK": MOE_TOPK, "BH": 16, "ROWS": 8, "COMM": 1}
    few, many = (Problem(2, partial(_dispatch, n), 3, {"slots": Routing(2, n).slots}) for n in (5, 80))
    back = {"BM": 128, "BN": 32, "BK": 16, "STAGES": 2}
    weighted = (Problem(1, _weighted),)
    return [
        Subject("08.moe_dispatch_matmul", eight.moe_dispatch_matmul, (few, many), dispatch),
        Subject("08.moe_matmul_return", eight.moe_matmul_return, (Problem(2, _return),), back),
        Subject("08.moe_weighted_sum", eight.moe_weighted_sum, weighted, {"R": 8, "BH": 16}),
    ]


SUBJECTS = [*_gemms(), *_collectives(), *_attentions(), *_experts()]
