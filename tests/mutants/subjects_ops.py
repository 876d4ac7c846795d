"""The kernels of the tensor-parallel operators, with small problems."""

from __future__ import annotations

from functools import partial

from pk.ops import collective_kernels, few_rows, parallel_kernels
from tests.conformance.case import BF16, F32, I32, Arguments, blank
from tests.mutants.subject import Problem, Subject
from tests.mutants.subjects import GEMM, K, M, N, gather, random, small, two_three


# ------------------------------------------------------------------------------------------------------- many rows
def _sums(depth: int, rank: int, world: int) -> Arguments:
    """With little ``depth`` only the vectors' own ring keeps the next task's vectors from coming too early."""
    vectors = {"scale": small(1, N, key="s", dtype=F32), "bias": small(1, N, key="c", dtype=F32)}
    a, b = small(264, depth, key=rank), small(depth, N, key=rank)
    return {"a": a, "b": b, "c": blank((264, N), BF16, parallel=True)} | vectors


def _taken(depth: int, rank: int, world: int) -> Arguments:
    a, b = small(264, depth, key=rank), small(depth, N, key=rank)
    return {"a": a, "b": b, "out": blank((264, N), BF16)}


def _gathered(rank: int, world: int) -> Arguments:
    whole = blank((world, M, K), BF16, parallel=True)
    return gather(rank, world) | {"whole": whole, "row_scale": small(world, M, 1, key="r", dtype=F32)}


def _many() -> list[Subject]:
    k, gathers = parallel_kernels, GEMM | {"COMM": 1, "BC": 16, "PARTS": 2}
    warps = GEMM | {"COMM": 0, "BC": 16, "CHUNKS": 2}
    summing = GEMM | {"PARTS": 2}  # fewer than the other ranks of a problem
    in_place = GEMM | {"PARTS": 1, "AHEAD": 1, "IN_PLACE": True}
    sums = *two_three(partial(_sums, K), 3), Problem(2, partial(_sums, 16), 1), Problem(4, partial(_sums, K), 2)
    taken = *two_three(partial(_taken, K), 3), Problem(2, partial(_taken, 16), 1), Problem(4, partial(_taken, K), 2)
    return [
        Subject("ops.all_gather_matmul", k.all_gather_matmul, two_three(gather, 3), gathers),
        Subject("ops.all_gather_matmul_warps", k.all_gather_matmul, two_three(gather, 2), warps),
        Subject("ops.all_gather_matmul_joins", k.all_gather_matmul, two_three(gather, 3), gathers | {"JOIN": True}),
        Subject("ops.all_gather_matmul_whole", k.all_gather_matmul, two_three(_gathered, 3), gathers),
        Subject("ops.matmul_all_reduce_ordered", k.matmul_all_reduce_ordered, sums, summing),
        Subject("ops.matmul_all_reduce_to_ordinary", k.matmul_all_reduce_ordered, taken, summing | {"PR": 32}),
        Subject("ops.matmul_all_reduce_in_place", k.matmul_all_reduce_ordered, sums, in_place),
    ]


# -------------------------------------------------------------------------------------------------------- few rows
FEW = {"BN": 64, "BM": 16, "BK": 16, "P": 16, "STAGES": 2, "SPLIT": 2}
ROWS, COLS = 12, 136  # of each rank, which makes a tail with two and three


def _few_gather(depth: int, rank: int, world: int) -> Arguments:
    x, b = small(ROWS, depth, key=rank), small(depth, COLS, key=rank)
    scale = small(1, ROWS * world, key="s", dtype=F32)
    return {"x": x, "b": b, "c": blank((ROWS * world, COLS), BF16), "col_scale": scale}


def _few_sum(scatter: bool, rank: int, world: int) -> Arguments:
    a, b = small(ROWS * world, 72, key=rank), small(72, COLS, key=rank)
    bias = small(1, COLS, key="c", dtype=F32)
    return {"a": a, "b": b, "c": blank((ROWS if scatter else ROWS * world, COLS), BF16), "col_bias": bias}


def _few() -> list[Subject]:
    k, gathers = few_rows, FEW | {"STAGES": 3, "ROW_STAGES": 2, "PR": 8, "PC": 16, "SECTION": 32}
    worlds = [Problem(w, partial(_few_gather, d), s) for w, d, s in ((2, 136, 5), (3, 136, 2), (2, 16, 1))]
    sums = {
        scatter: (Problem(2, partial(_few_sum, scatter), 5), Problem(2, partial(_few_sum, scatter), 1))
        for scatter in (False, True)
    }
    return [
        Subject("ops.few_all_gather_matmul", k.few_all_gather_matmul, tuple(worlds), gathers),
        Subject("ops.few_matmul_reduce", k.few_matmul_reduce, sums[False], FEW | {"PR": 8}),
        Subject("ops.few_matmul_reduce_scatter", k.few_matmul_reduce, sums[True], FEW | {"PR": 8, "SCATTER": True}),
    ]


# ----------------------------------------------------------------------------------------------------- collectives
def _exchange(parallel: bool, rank: int, world: int) -> Arguments:
    shape = (world, 2, 12, 40)
    there = {"whole" if parallel else "out": blank(shape, I32, parallel)}
    return {"x": random(*shape, key=rank, dtype=I32), **there}


def _parts(rank: int, world: int) -> Arguments:
    return {"x": random(world, 12, 40, key=rank), "out": blank((12, 40), BF16)}


def _shared(parallel: bool, rank: int, world: int) -> Arguments:
    there = {"whole" if parallel else "out": blank((1, 152), BF16, parallel)}
    return {"x": random(1, 152, key=rank), **there}


def _collectives() -> list[Subject]:
    k, tiles, lag = collective_kernels, {"BM": 8, "BN": 16, "PER": 2}, {"lag": 2}
    found = []
    for parallel, name in ((False, ""), (True, "_symmetric")):
        moves = two_three(partial(_exchange, parallel), 3, lag)
        sums = two_three(partial(_shared, parallel), scalars=lag)
        found += [
            Subject(f"ops.exchange{name}", k.exchange, moves, tiles),
            Subject(f"ops.sum_and_share{name}", k.sum_and_share, sums, {"BN": 16}),
            Subject(f"ops.sum_and_share_senders{name}", k.sum_and_share, sums, {"BN": 16, "COMM": 1}),
        ]
    parts = two_three(_parts, scalars=lag)
    return [
        *found,
        Subject("ops.sum_parts", k.sum_parts, parts, tiles),
        Subject("ops.sum_parts_senders", k.sum_parts, parts, tiles | {"COMM": 1}),
    ]


SUBJECTS = [*_many(), *_few(), *_collectives()]
