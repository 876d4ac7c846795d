"""The kernels that the tests share, with small problems; and those of the conformance suite, with its cases."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from pk.ir.text import text
from tests import kernels, tensor_core, vector_kernels
from tests.collectives import kernels as moves
from tests.conformance.case import BF16, F32, I32, Arg, Arguments, Case, blank, generator
from tests.conformance.cases import CASES
from tests.gpu import passing
from tests.mutants.subject import Make, Problem, Subject
from tests.mutants.subjects import GEMM, gather, random, small, two_three
from tests.tiles import kernels as tiles


def ints(values: object) -> Arg:
    """A table."""
    return Arg(np.asarray(values, np.int32), I32)


# --------------------------------------------------------------------------------------------------- index vectors
ROWS = [3, -1, 39, 12, 12, -1, 0, 25, 7, 31, -1, 18, 2, 38, 5, 9, 21]


def _rows(rank: int, world: int) -> Arguments:
    return {"x": random(40, 40), "rows": ints(ROWS), "y": blank((len(ROWS), 40), BF16)}


def _exchange(rank: int, world: int) -> Arguments:
    n = 13
    to = generator("exchange", world).permutation(world * n)[rank * n : (rank + 1) * n]
    return {
        "x": random(n, 40, key=rank), "to": ints(to), "y": blank((n, 40), BF16, True),
        "source": blank((n,), I32, True), "seen": blank((n,), I32), "tickets": blank((1,), I32),
    }  # fmt: skip


def _segments(rank: int, world: int) -> Arguments:
    first, count = [3, 0, 44, 10], [20, 44, 0, 1]
    return {"x": random(44, 40), "first": ints(first), "count": ints(count), "y": blank((4 * 44, 40), BF16)}


def _adds(rank: int, world: int) -> Arguments:
    return {"x": ints(generator("adds", rank).integers(-50, 50, (5, 64))), "total": blank((64,), I32)}


def _vectors() -> list[Subject]:
    v, rc, one = vector_kernels, {"R": 4, "C": 32}, lambda make: (Problem(1, make),)
    return [
        Subject("vectors.gather_rows", v.gather_rows, one(_rows), rc),
        Subject("vectors.exchange_rows", v.exchange_rows, (*two_three(_exchange, 3), Problem(2, _exchange, 1)), rc),
        Subject("vectors.double_rows", v.double_rows, one(_rows), rc),
        Subject("vectors.segments", v.segments, one(_segments), {"BM": 8, "BN": 32}),
        Subject("vectors.last_adds", v.last_adds, (Problem(2, _adds),)),
    ]


# ------------------------------------------------------------------------------------------------- moves and sums
def _pair(x: tuple[int, ...], out: tuple[int, ...], pull: bool) -> Make:
    """``x`` is read from every rank (``pull``), or ``out`` written on every rank."""

    def make(rank: int, world: int) -> Arguments:
        shapes = [tuple(world if n == 0 else n for n in shape) for shape in (x, out)]  # 0 stands for the world
        return {"x": small(*shapes[0], key=rank, parallel=pull), "out": blank(shapes[1], BF16, not pull)}

    return make


def _local(rank: int, world: int) -> Arguments:
    return {"x": random(40, 56, key=rank), "out": blank((40, 56), BF16)}


def _added(x: tuple[int, ...]) -> Make:
    def make(rank: int, world: int) -> Arguments:
        return {"x": small(*x, key=rank), "out": small(*x, key=(rank, "out"), parallel=True)}

    return make


def _in_place(rank: int, world: int) -> Arguments:
    return {"x": random(24, 56, key=rank, parallel=True)}


def _seen(rank: int, world: int) -> Arguments:
    return {"seen": small(40, 56, dtype=F32)}


def _moves() -> list[Subject]:
    k, rc = moves, {"R": 16, "C": 32}
    return [
        Subject("moves.reduce_2d", k.reduce_2d, two_three(_pair((24, 56), (24, 56), True)), rc),
        Subject("moves.reduce_1d", k.reduce_1d, two_three(_pair((88,), (88,), True)), {"B": 32}),
        Subject("moves.reduce_4d", k.reduce_4d, two_three(_pair((0, 2, 24, 56), (2, 24, 56), True)), rc),
        Subject(
            "moves.reduce_shifted",
            k.reduce_shifted,
            two_three(_pair((20, 40), (23, 48), True), scalars={"dy": 3, "dx": -5}),
        ),
        Subject("moves.all_reduce_2d", k.all_reduce_2d, two_three(_in_place), rc),
        Subject("moves.reduce_in_consumer", k.reduce_in_consumer, two_three(_local), {"B": 16}),
        Subject("moves.broadcast", k.broadcast, two_three(_pair((40, 56), (0, 40, 56), False)), rc),
        Subject("moves.broadcast_add", k.broadcast, two_three(_added((40, 56))), rc | {"ADD": True}),
        Subject("moves.copy", k.copy, two_three(_pair((2, 40, 56), (2, 40, 56), False)), rc),
        Subject("moves.copy_add", k.copy, two_three(_added((2, 2, 20, 56))), rc | {"TO": "add"}),
        Subject("moves.copy_vector", k.copy_vector, two_three(_pair((200,), (200,), False)), {"B": 32}),
        Subject("moves.copy_vector_add", k.copy_vector, two_three(_added((200,))), {"B": 32, "ADD": True}),
        Subject("moves.tiles_in_groups", k.tiles_in_groups, (Problem(1, _seen, scalars={"group": 2}),), {"B": 16}),
        Subject("moves.pass_on", passing.pass_on, two_three(_passing), {"B": 16}),
    ]


def _passing(rank: int, world: int) -> Arguments:
    return {"x": random(40, 56, key=rank), "y": blank((40, 56), BF16, True)}


# ----------------------------------------------------------------------------------------------------- tensor core
def _product(rank: int, world: int) -> Arguments:
    return {"a": small(136, 72), "b": small(72, 40), "c": blank((136, 40), F32)}


def _private(rank: int, world: int) -> Arguments:
    return {"a": small(136, 40), "b": small(40, 40), "c": blank((136, 40), F32), "d": blank((40, 136), F32)}


def _recurrence(rank: int, world: int) -> Arguments:
    return {"x": small(136, 32), "y": small(4 * 32, 32), "z": small(4 * 32, 32, key="z"), "c": blank((136, 32), F32)}


def _gradients(rank: int, world: int) -> Arguments:
    q, k = (136, 128), (384, 128)
    return {
        "q": small(*q, key="q"), "k": small(*k, key="k"), "g": small(*q, key="g"), "dk": blank(k, F32),
        "dq": blank(q, F32),
    }  # fmt: skip


def _tensor_core() -> list[Subject]:
    t, one = tensor_core, lambda make: (Problem(1, make),)
    mm = {"BM": 64, "BN": 32, "BK": 32, "WG": 1}
    return [
        Subject("tensor_core.product", t.product, one(_product), mm),
        Subject("tensor_core.product_registers", t.product, one(_product), mm | {"REGISTERS": True}),
        Subject("tensor_core.private", t.private, one(_private), mm),
        Subject("tensor_core.private_loaded", t.private, one(_private), mm | {"FORM": "loaded"}),
        Subject("tensor_core.recurrence", t.recurrence, one(_recurrence), mm | {"D": 32}),
        Subject("tensor_core.gradients", t.gradients, (Problem(2, _gradients),)),
    ]


# -------------------------------------------------------------------------------------------------- register tiles
def _softmax(rank: int, world: int) -> Arguments:
    return {"x": random(21, 60, dtype=F32), "y": blank((21, 60), F32)}


def _layernorm(rank: int, world: int) -> Arguments:
    w, b = random(60, key="w", dtype=F32), random(60, key="b", dtype=F32)
    return {"x": random(11, 60, dtype=F32), "weight": w, "bias": b, "y": blank((11, 60), F32)}


def _weighted(rank: int, world: int) -> Arguments:
    back, weight = random(3, 21, 40, key="b"), random(21, 3, key="w", dtype=F32)
    return {"back": back, "weight": weight, "out": blank((21, 40), BF16)}


def _reductions(rank: int, world: int) -> Arguments:
    return {"x": random(8, 24, dtype=F32), "rows": blank((8, 3), F32), "cols": blank((3, 24), F32)}


def _prefix(rank: int, world: int) -> Arguments:
    x = generator("prefix").integers(1, 9, (1, 32)).astype(np.int32)
    return {"x": Arg(x, I32), "y": blank((32, 1), I32)}


def _fragment(rank: int, world: int) -> Arguments:
    return {
        "a": small(200, 64, dtype=torch.float16), "b": small(64, 56, key="b", dtype=torch.float16),
        "y": blank((200, 56), F32), "rows": blank((200, 1), F32), "cols": blank((4, 56), F32),
    }  # fmt: skip


def _scalars(rank: int, world: int) -> Arguments:
    y = random(64, 64, key=("y", rank), dtype=F32, parallel=True)
    return {"x": random(64, 64, key=rank), "table": ints([3, 2, 1, 3]), "y": y}


def _tiles() -> list[Subject]:
    t, one = tiles, lambda make, **scalars: (Problem(1, make, scalars=scalars),)
    return [
        Subject("tiles.softmax", t.softmax, one(_softmax), {"BR": 8, "C": 64}),
        Subject("tiles.layernorm", t.layernorm, one(_layernorm, eps=1e-5), {"BR": 4, "C": 64}),
        Subject("tiles.moe_weighted_sum", t.moe_weighted_sum, one(_weighted), {"R": 8, "BH": 16}),
        Subject("tiles.reductions", t.reductions, one(_reductions), {"R": 8, "C": 24}),
        Subject("tiles.prefix_sum", t.prefix_sum, one(_prefix), {"E": 32}),
        Subject("tiles.fragment_softmax", t.fragment_softmax, (Problem(1, _fragment, 1),), {"G": 1, "N": 64}),
        Subject("tiles.scalars", t.scalars, two_three(_scalars, 1, {"n": 5})),
    ]


# ----------------------------------------------------------------------------------------------------- conformance
PREFERRED = {"loops.6.4", "loop_state.7", "shifted.bfloat16.3", "copy_2d.bfloat16.64x64", "copy_1d.bfloat16.64"}
"""Cases that say more than the first one of their kernel."""


def _arguments(case: Case, rank: int, world: int) -> Arguments:
    return case.arguments(world)[rank]


def _near_the_bound(rank: int, world: int) -> Arguments:
    """silu(1) < 0.8412 < gelu(1) by tanh < 0.84127 < gelu(1)."""
    return {"x": Arg(np.ones(1, np.float32), F32), "rows": random(2, 64), "y": blank((11, 64), BF16)}


def _long(rank: int, world: int) -> Arguments:
    at = generator("long", rank).integers(0, 139, 140).astype(np.int32)
    return {"x": random(140, 64, key=rank), "at": Arg(at, I32), "out": blank((140, 64), BF16)}


MORE = {
    "scalar_choices": Problem(1, _near_the_bound, 1, {"bound": 0.84127}),
    "listen": Problem(2, _long),
    "loops": Problem(3, partial(_arguments, CASES["loops.6.4"]), 1, CASES["loops.6.4"].scalars),
}
"""Problems that tell apart what a case of the suite does not."""


def _conformance() -> list[Subject]:
    """Every kernel of the conformance suite, and every form of it that a name or a switch chooses."""
    chosen: dict[tuple[object, ...], Case] = {}
    for case in sorted(CASES.values(), key=lambda case: case.name not in PREFERRED):
        form = tuple(sorted((k, v) for k, v in case.constants.items() if isinstance(v, str | bool)))
        chosen.setdefault((case.kernel.name, form), case)
    return [_of_case(case) for case in chosen.values()]


def _of_case(case: Case) -> Subject:
    """Its own problem, the largest of the same program, and both on as few SMs as possible, so that rings wrap."""
    worlds = [w for w in (2, 3) if w in case.worlds] if _meets(case) else case.worlds[:1]
    alike = [c for c in CASES.values() if c.kernel is case.kernel and c.ir() == case.ir()]
    few = 2 * len(case.ir().communicators)
    problems = [Problem(w, partial(_arguments, case), few or 2, case.scalars) for w in worlds]
    problems += [Problem(worlds[0], partial(_arguments, c), few or 1, c.scalars) for c in (case, max(alike, key=_size))]
    problems += [problem for name, problem in MORE.items() if case.name.startswith(name)]
    return Subject(f"conformance.{case.name}", case.kernel, tuple(problems), case.constants)


def _size(case: Case) -> int:
    return sum(a.value.size for a in case.make(0, 2).values())


def _meets(case: Case) -> bool:
    """Whether its ranks have to do with each other."""
    program = case.ir()
    return any(word in text(program) for word in ("parallel", "rank", "world", "signals"))


SUBJECTS = [
    Subject("kernels.all_gather_matmul", kernels.all_gather_matmul, two_three(gather, 3), GEMM | {"COMM": 1, "BC": 16}),
    *_vectors(),
    *_moves(),
    *_tensor_core(),
    *_tiles(),
    *_conformance(),
]
