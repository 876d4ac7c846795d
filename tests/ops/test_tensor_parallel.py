"""The operators on random problems against float64, forward and gradients, on 1 to 8 ranks.

A sample runs with the suite; ``pytest tests/ops/test_tensor_parallel.py --problems=100`` runs so many of each operator
and kind at each number of ranks.
"""

from __future__ import annotations

import dataclasses

import pytest

import pk
from tests.ops import random_problems
from tests.ops.random_problems import BF16, F32, FP8, PARALLEL, Problem, call, check, operands

WORLDS = range(1, 9)
CHUNK = 10  # problems of a test
KINDS = {"forward": random_problems.forward_problem, "gradient": random_problems.gradient_problem}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chunk" not in metafunc.fixturenames:
        return
    count = metafunc.config.getoption("--problems")
    cases = [(operator, world) for operator in PARALLEL for world in WORLDS] + [("matmul", 1)]
    chunks = [range(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)]
    if not count:  # large numbers of ranks take longest
        made = [(o, w, range(1 + (w < 5) + (w == 1))) for o, w in cases]
    else:
        made = [(o, w, chunk) for o, w in cases for chunk in chunks]
    names = [f"{o}-{w}-{chunk.start}" for o, w, chunk in made]
    metafunc.parametrize(("operator", "world", "chunk"), made, ids=names)


def run(p: Problem) -> float:
    """The largest error, as a share of what rounding allows."""
    print(p)  # pytest shows it if this fails
    return check(p, pk.spawn(call, p.world, "sim", (p,)))


@pytest.mark.parametrize("kind", KINDS)
def test_random(kind: str, operator: str, world: int, chunk: range) -> None:
    for seed in chunk:
        run(KINDS[kind](operator, world, seed))


# ------------------------------------------------------------------------------- what chance may not have in a sample
@pytest.mark.parametrize("operator", PARALLEL)
@pytest.mark.parametrize("empty", ["rows", "n", "k"])
def test_nothing_to_do(operator: str, empty: str) -> None:
    p = Problem(operator, 3, 1, 4, 16, 24, bias="alike", activation="gelu", wanted=("a", "b", "bias"))
    run(dataclasses.replace(p, **{empty: 0}))
    run(dataclasses.replace(p, **{empty: 0}, wanted=(), scale_a="each", scale_b="each", out="new"))
    run(dataclasses.replace(p, **{empty: 0}, options={"config": "library"}))
    run(dataclasses.replace(p, **{empty: 0}, options={"config": "t64x16.d128.k2"}, wanted=("b",)))
    if operator == "all_gather_matmul":
        run(dataclasses.replace(p, **{empty: 0}, options={"save_gathered": False}))


@pytest.mark.parametrize("operator", PARALLEL)
def test_more_tiles_than_blocks(operator: str) -> None:
    p = Problem(operator, 2, 2, 300, 520, 72, b_layout="nk", bias="alike", wanted=("a", "b", "bias"))
    run(p)
    run(dataclasses.replace(p, dtype=FP8, k=80, n=528, scale_a="each", scale_b="each", out="new", wanted=()))


@pytest.mark.parametrize("layout", ["transposed", "padded", "offset"])
@pytest.mark.parametrize("operator", PARALLEL)
def test_layouts_that_are_copied(operator: str, layout: str) -> None:
    """7 rows are no multiple of 16 bytes, so columns of ``a``, which a transposed one has, are no rows for TMA."""
    run(Problem(operator, 2, 3, 7, 40, 24, a_layout=layout, wanted=("a", "b")))


def test_few_rows_by_columns() -> None:
    """The model takes a tile for 8 rows, whose columns the tensor core does not read."""
    run(Problem("matmul", 1, 4, 8, 64, 1024, a_layout="transposed", wanted=("a", "b")))
    run(Problem("matmul", 1, 5, 1024, 64, 8, wanted=("b",)))
    run(Problem("matmul", 1, 6, 8, 64, 1001, a_layout="transposed", b_layout="kn", wanted=("a",)))


@pytest.mark.parametrize("operator", PARALLEL)
def test_a_result_as_wide_as_float32_needs(operator: str) -> None:
    p = Problem(operator, 2, 7, 16, 12, 32, b_layout="nk", out_dtype=F32)
    run(p)
    with pytest.raises(pk.errors.RankError, match=f"{operator} of 12 columns has no backward pass"):
        run(dataclasses.replace(p, wanted=("a",)))
    run(dataclasses.replace(p, wanted=("a", "b"), options={"config": "library"}))


# ------------------------------------------------------------------------------------------------ of the proof itself
@pytest.mark.parametrize("operator", PARALLEL)
@pytest.mark.parametrize("name", ["y", "a'", "b'", "bias'"])
def test_one_wrong_element_is_seen(operator: str, name: str) -> None:
    """By a few units in the last place of the largest element: of a sum over ranks, one for each of its roundings."""
    p = Problem(operator, 2, 8, 16, 64, 64, bias="alike", wanted=("a", "b", "bias"))
    found = pk.spawn(call, 2, "sim", (p,))
    assert check(p, found) > 0.2
    wrong = found[1][name] = found[1][name].clone()
    at = wrong.abs().argmax()
    wrong.view(-1)[at] *= 1 + (3 if operator == "all_gather_matmul" and name == "y" else 8) * 2.0**-7
    with pytest.raises(AssertionError, match=r"rank 1's|different results"):
        check(p, found)


def test_a_rank_left_out_is_seen() -> None:
    p = Problem("matmul_reduce_scatter", 3, 9, 16, 64, 64)
    found = pk.spawn(call, 3, "sim", (p,))
    given = operands(p, 2)
    found[0]["y"] = (found[0]["y"].double() - (given["a"].double() @ given["b"].double())[:16]).to(BF16)
    with pytest.raises(AssertionError, match="rank 0's result"):
        check(p, found)


def test_problems_differ() -> None:
    made = [KINDS[kind](o, 4, s) for kind in KINDS for o in PARALLEL for s in range(100)]
    assert {p.dtype for p in made} >= {BF16, FP8}
    for name in ("a_layout", "b_layout", "bias", "activation", "scale_a", "out", "out_dtype", "through", "wanted"):
        assert len({getattr(p, name) for p in made}) > 2 - (name == "through"), name
    assert any(0 in (p.rows, p.n, p.k) for p in made)
    assert {p.options["config"] for p in made} >= {None, "library", "c128x256", "t64x16.d128"}
