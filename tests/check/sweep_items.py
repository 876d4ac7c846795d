"""Every correct kernel of the repository, with a small problem for any number of ranks: what ``sweep`` checks.

Tiers: 0 examples and operators, 1 kernels of the tests, 2 every kernel of the conformance suite and every form of it
that a name or a switch chooses, 3 its other cases, 4 its random programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import pk
from pk.ir.text import text
from pk.ir.types import int32
from pk.ops import kernels as ops
from pk.ops import parallel_kernels as fused
from pk.sim.values import POISON
from tests import schedule_kernels
from tests.conformance import random_programs
from tests.conformance.case import BF16, F32, I32, Arg, Arguments, Case, blank, generator
from tests.conformance.cases import CASES
from tests.mutants import subjects, subjects_ops
from tests.mutants.subject import Make, Subject, example
from tests.mutants.subjects import GEMM, MOE_EL, MOE_F, MOE_H, MOE_TOPK, Routing, random, small
from tests.mutants.subjects_tests import SUBJECTS as OF_TESTS

WORLDS = tuple(range(1, 9))
TOKENS = 17  # of rank 0, in the mixture of experts; one more on each rank
TWO = (1, 2)  # of kernels whose ranks have nothing to do with each other
Values = Callable[[int], dict[str, Any]]


def _nothing(world: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, eq=False)
class Item:
    """A kernel, and its arguments on ``world`` ranks; ``sms`` blocks each.

    ``ignored``: kinds of findings that are true of it, and meant.
    """

    name: str
    kernel: pk.Kernel
    make: Make
    tier: int
    sms: int = 2
    worlds: tuple[int, ...] = WORLDS
    scalars: Values = _nothing
    constants: Values = _nothing
    ignored: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


def _const(values: dict[str, Any]) -> Values:
    return lambda world: values


# ---------------------------------------------------------------------------------------------- of the mutants
ALONE = ("ops.matmul", "ops.matmul_split", "06.attention", "08.moe_weighted_sum")
FOR_EVERY_WORLD = ("08.moe_dispatch_matmul", "08.moe_matmul_return")  # made below, for any world


def _of_subject(subject: Subject, tier: int) -> Item:
    problem = subject.problems[0]
    world = {"WORLD"} & set(subject.kernel.signature.constants)
    constants: Values = lambda w: subject.constants | dict.fromkeys(world, w)  # noqa: E731
    alone = subject.name in ALONE or all(p.world == 1 for p in subject.problems)
    return Item(
        subject.name, subject.kernel, problem.make, tier, problem.sms, TWO if alone else WORLDS,
        _const(problem.scalars), constants,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ mixture of experts
class Routes(Routing):
    """The tables of the example for any number of ranks, and any choice of experts."""

    def __init__(self, world: int) -> None:
        self.world, self.experts = world, MOE_EL * world
        self.tokens = [TOKENS + r for r in range(world)]
        self.slots = max(self.tokens) * MOE_TOPK
        self.rows = sum(self.tokens) * MOE_TOPK + MOE_EL * 128
        self.ids = [
            np.argsort(generator("routes", world, r).random((n, self.experts)), axis=1)[:, :MOE_TOPK]
            for r, n in enumerate(self.tokens)
        ]


def _dispatch(rank: int, world: int) -> Arguments:
    r = Routes(world)
    order, expert = r.sending(rank)
    counts = np.bincount(expert, minlength=r.experts).astype(np.int32)[None]
    return {
        "x": small(r.tokens[rank], MOE_H, key=("x", rank)), "perm": Arg(order, I32), "expert": Arg(expert, I32),
        "counts": Arg(counts, I32), "w": small(MOE_EL, MOE_H, MOE_F, key=("w", rank)),
        "y": blank((r.rows, MOE_F), BF16), "origin": blank((r.rows,), I32, parallel=True),
        "base_of": blank((r.experts, 1), I32), "total_of": blank((1, r.experts), I32),
    }  # fmt: skip


def _return(rank: int, world: int) -> Arguments:
    """Rows of ``origin`` that no token fills are memory that nobody has written, as in the example."""
    r = Routes(world)
    base, total = r.tables()
    origin = r.origin(rank)
    return {
        "y": small(r.rows, MOE_F, key=("y", rank)), "w": small(MOE_EL, MOE_F, MOE_H, key=("w2", rank)),
        "back": blank((r.slots, MOE_H), BF16, parallel=True),
        "origin": Arg(np.where(origin < 0, POISON[int32], origin).astype(np.int32), I32, parallel=True),
        "base_of": Arg(base, I32), "total_of": Arg(total, I32),
    }  # fmt: skip


def _moe() -> list[Item]:
    eight = example("08_moe")
    rows = {"BH": 16, "ROWS": 16, "COMM": 1, "TOPK": MOE_TOPK}
    return [
        Item(
            "08.moe_dispatch_matmul", eight.moe_dispatch_matmul, _dispatch, 0, 3,
            scalars=lambda world: {"slots": Routes(world).slots},
            constants=lambda world: GEMM | rows | {"E": Routes(world).experts},
        ),
        Item(
            "08.moe_matmul_return", eight.moe_matmul_return, _return, 0, 2,
            constants=_const({"BM": 128, "BN": 32, "BK": 16, "STAGES": 2}),
        ),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------- more forms of the operators
M, N, K = 136, 48, 40
TILES = {"BM": 128, "BN": 32, "BK": 16, "P": 16, "STAGES": 2}


def _vectors(kernel: pk.Kernel, rows: tuple[int, ...]) -> Arguments:
    """What the epilogue multiplies and adds, under the names that ``kernel`` has for it."""
    given = {
        "row_scale": random(*rows, key="row", dtype=F32), "scale": random(1, N, key="col", dtype=F32),
        "bias": random(1, N, key="bias", dtype=F32),
    }  # fmt: skip
    known = kernel.signature.tensors
    return {name if name in known else f"col_{name}": value for name, value in given.items()}


def _gathered(rank: int, world: int) -> Arguments:
    whole = blank((world, M, K), BF16, parallel=True)
    return subjects.gather(rank, world) | {"whole": whole} | _vectors(fused.all_gather_matmul, (world, M, 1))


def _scattered(rank: int, world: int) -> Arguments:
    a, b = small(world, M, K, key=rank), small(K, N, key=rank)
    return {"a": a, "b": b, "c": blank((M, N), BF16)} | _vectors(fused.matmul_reduce_scatter_ordered, (world, M, 1))


def _reduced(rank: int, world: int) -> Arguments:
    a, b = small(264, K, key=rank), small(K, N, key=rank)
    vectors = _vectors(fused.matmul_all_reduce_ordered, (264, 1))
    return {"a": a, "b": b, "c": blank((264, N), BF16, parallel=True)} | vectors


def _reduced_to_ordinary(rank: int, world: int) -> Arguments:
    given = _reduced(rank, world)
    del given["c"]
    return given | {"out": blank((264, N), BF16)}


def _operators() -> list[Item]:
    one, epilogue = TILES | {"COMM": 1, "BC": 16}, {"ACTIVATION": "relu"}
    gather, scatter = fused.all_gather_matmul, fused.matmul_reduce_scatter_ordered
    reduce_ = fused.matmul_all_reduce_ordered
    return [
        Item("ops.all_gather_matmul+", gather, _gathered, 0, 3, constants=_const(one | epilogue)),
        Item("ops.matmul_reduce_scatter_ordered+", scatter, _scattered, 0, constants=_const(TILES | epilogue)),
        Item("ops.matmul_all_reduce_ordered+", reduce_, _reduced, 0, constants=_const(TILES | epilogue)),
        Item(
            "ops.matmul_all_reduce_ordered+out", reduce_, _reduced_to_ordinary, 0,
            constants=_const(TILES | epilogue | {"PR": 32}),
        ),
        Item(
            "ops.matmul_all_reduce_ordered+cols", reduce_, _reduced, 0,
            constants=_const(TILES | epilogue | {"BY_COLS": True}),
        ),
        Item(
            "ops.matmul+pingpong", ops.matmul, subjects._matmul, 0, worlds=TWO,
            constants=_const(TILES | {"BM": 64, "PINGPONG": True}),
        ),
        Item(
            "ops.matmul+cluster", ops.matmul, subjects._matmul, 0, worlds=TWO,
            constants=_const(TILES | {"BM": 64, "CLUSTER": 2, "WARPGROUPS": 1}),
        ),
    ]  # fmt: skip


def _causal() -> Item:
    ring = example("07_ring_attention").ring_attention
    constants = {"D": 64, "KV": 32, "BQ": 64, "WG": 1, "STAGGER": False, "COMM": 1, "CAUSAL": True}
    return Item(
        "07.ring_attention+causal", ring, subjects._ring_attention, 0, 3, scalars=_const({"scale": 0.18}),
        constants=_const(constants),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- schedules
def _halves(rank: int, world: int) -> Arguments:
    return {"a": random(72, 80), "b": random(72, 80, key="b"), "out": blank((2, 72, 80), BF16)}


def _ring(rank: int, world: int) -> Arguments:
    return {"x": random(1, 72, 80, key=rank), "out": blank((world, 72, 80), BF16)}


def _doubling(rank: int, world: int) -> Arguments:
    return {"x": random(200, 40, key=rank), "out": blank((5, 200, 40), BF16)}


def _three_classes(rank: int, world: int) -> Arguments:
    pushed = (world, 72, 40)
    return {
        "x": random(72, 40, key=rank), "out": blank(pushed, BF16, True), "twice": blank(pushed, BF16, True),
        "mine": blank((72, 40), BF16),
    }  # fmt: skip


def _scheduled() -> list[Item]:
    k = schedule_kernels
    made = [
        Item("schedule.copy_halves", k.copy_halves, _halves, 1, worlds=TWO),
        Item("schedule.ring_gather", k.ring_gather, _ring, 1),
        Item("schedule.doubling", k.doubling, _doubling, 1, worlds=TWO),
        Item("schedule.two_communicators", k.two_communicators, _three_classes, 1, 4),
    ]
    dynamic = _const({"DYNAMIC": True})
    return [*made, *[replace(item, name=f"{item.name}+dynamic", constants=dynamic) for item in made]]


# ------------------------------------------------------------------------------------------------- conformance
def _of_case(case: Case, tier: int, ignored: frozenset[str] = frozenset()) -> Item:
    program = case.ir()
    meets = program.signals or program.scratch or "rank" in text(program) or "world" in text(program)
    every = case.worlds != (1,) and len(case.worlds) > 1 and meets
    return Item(
        f"conformance.{case.name}", case.kernel, lambda rank, world: case.arguments(world)[rank], tier,
        max(2, 2 * len(program.communicators)), WORLDS if every else case.worlds[:1],
        _const(case.scalars), _const(case.constants), ignored,
    )  # fmt: skip


def of_program(seed: int) -> Item:
    """A random program of the conformance suite.  It may signal what it then does not wait for."""
    return _of_case(random_programs.case(seed), 4, frozenset({"lost-signal"}))


def everything(programs: int = 0) -> Iterator[Item]:
    """All items; of the random programs ``programs``."""
    for subject in (*subjects.SUBJECTS, *subjects_ops.SUBJECTS):
        if subject.name not in FOR_EVERY_WORLD:
            yield _of_subject(subject, 0)
    yield from (*_moe(), *_operators(), _causal())
    forms = {s.name.removeprefix("conformance.") for s in OF_TESTS}
    yield from (_of_subject(s, 1) for s in OF_TESTS if not s.name.startswith("conformance."))
    yield from _scheduled()
    yield from (_of_case(case, 2 if name in forms else 3) for name, case in CASES.items())
    yield from (of_program(seed) for seed in range(min(programs, random_programs.COUNT)))
