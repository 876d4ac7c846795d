"""Every kernel that an operator launches, as the operator launches it, is clean in the checker: forward and backward.

A sample runs with the suite; ``pytest tests/ops/test_clean.py --schedules=50`` checks each under so many.  The kernels
alone, with small tiles and on 1 to 8 ranks, are those of ``python -m tests.check.sweep --only ops.``.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk.checking import checking
from pk.ops import kernels
from pk.sim import simulate
from pk.sim.checker import Checker
from pk.simulate import substituted
from tests.ops.random_problems import FP8, PARALLEL, Problem, call, check

SAMPLE = 1  # schedules in the suite
GRADIENTS = ("a", "b", "bias")
VECTORS = {
    "dtype": FP8, "scale_a": "each", "scale_b": "each", "activation": "relu", "out": "new", "b_layout": "nk",
    "world": 3,
}  # fmt: skip
AG, RS, AR = PARALLEL
SUMS = {AG: "all_gather_matmul", RS: "matmul_reduce_scatter_ordered", AR: "matmul_all_reduce_ordered"}
FEW = {AG: "few_all_gather_matmul", RS: "few_matmul_reduce", AR: "few_matmul_reduce"}
# Of the backward pass, where all gradients are wanted.
BACKWARD = {AG: ["matmul_reduce_scatter_ordered", "matmul"], RS: ["all_gather_matmul", "matmul"], AR: ["matmul"] * 2}
# Launched by no operator: what the README shows, checked below with its own arguments.
ALONE = {"matmul_reduce_scatter"}
COLLECTIVES = {"exchange", "sum_parts", "sum_and_share"}  # in tests/ops/test_collectives.py


def _problems() -> dict[str, tuple[Problem, list[str]]]:
    """Problems by name, and the kernels that they launch, in order."""
    many = {o: Problem(o, 2, 1, 136, 48, 80, bias="alike", options={"config": "c128x64"}) for o in PARALLEL}
    few = {o: Problem(o, 2, 2, 8, 144, 272, bias="alike", options={"config": "t64x16.d128.k2"}) for o in PARALLEL}
    again = {"config": "c64x128", "save_gathered": False, "comm_sms": 1}
    found = {
        "matmul": (Problem("matmul", 1, 1, 200, 136, 80, bias="alike", wanted=GRADIENTS), ["matmul"] * 3),
        "matmul-few": (
            Problem("matmul", 1, 2, 8, 136, 520, a_layout="padded", options={"config": "t64x8.d128.k2"}), ["matmul"],
        ),
        "gather-again": (
            replace(many[AG], options=again, rows=72, wanted=GRADIENTS),
            [SUMS[AG], BACKWARD[AG][0], "exchange", "matmul"],
        ),
        "scatter-right-only": (replace(many[RS], wanted=("b",)), [SUMS[RS], "exchange", "matmul"]),
        "symmetric-out": (replace(many[AR], out="symmetric", rows=300), [SUMS[AR]]),
    }  # fmt: skip
    for o in PARALLEL:
        scales = ["exchange"] if o == AG else []
        found[o] = replace(many[o], wanted=GRADIENTS), [SUMS[o], *BACKWARD[o]]
        found[f"{o}-scaled"] = replace(many[o], **VECTORS, rows=72), [*scales, SUMS[o]]
        found[f"{o}-few"] = replace(few[o], wanted=GRADIENTS), [FEW[o], *BACKWARD[o]]
        found[f"{o}-few-scaled"] = replace(few[o], **VECTORS), [*scales, FEW[o]]
        found[f"{o}-pingpong"] = replace(many[o], options={"config": "p128x160"}, n=336), [SUMS[o]]
        found[f"{o}-turned"] = replace(many[o], options={"config": "p128x192.t"}, rows=200), [SUMS[o]]
        found[f"{o}-turned-scaled"] = (
            replace(found[f"{o}-scaled"][0], options={"config": "p128x192.t"}),
            [*scales, SUMS[o]],
        )
    return found


PROBLEMS = _problems()


@pytest.mark.parametrize("name", PROBLEMS)
def test_operators(name: str, request: pytest.FixtureRequest) -> None:
    """The values must be right too."""
    p, launched = PROBLEMS[name]
    schedules = request.config.getoption("--schedules") or SAMPLE
    with checking(schedules) as checks:
        found = pk.spawn(call, p.world, "sim", (p,))
    check(p, found)
    for made in checks.done:
        made.raise_if_found()
        again = made.kernel == "matmul" and p.world > 1  # the same launch on another rank
        assert made.schedules == schedules or (again and made.schedules == -(-schedules // 10))
        assert made.world_size == (1 if made.kernel == "matmul" else p.world)
    ranks = {"matmul": p.world}  # each launches its own
    assert [made.kernel for made in checks.done] == [name for name in launched for _ in range(ranks.get(name, 1))]
    assert checks.teams == {p.world}


@pytest.mark.parametrize(
    "name", [f"{RS}-pingpong", f"{RS}-scaled", f"{RS}-few", f"{AG}-few", f"{AR}-turned", "gather-again"]
)
def test_launch_after_launch(name: str) -> None:
    """A rank may be in its next launch while a peer is still in the last one: work space is used again, and right."""
    p, _ = PROBLEMS[name]
    checker = Checker()

    def by(program: Any, args: list[Any], sms: int, multicast: bool) -> None:
        simulate(program.ir, args, sms, multicast=multicast, checker=checker if len(args) > 1 else None)

    with substituted(by, everywhere=True):
        pk.spawn(twice, p.world, "sim", (p,))
    assert not [str(f) for f in checker.findings if f.kind == "race"]


def twice(rank: int, p: Problem) -> None:
    """The call, and again."""
    call(rank, p)
    call(rank, p)


def test_a_kernel_of_no_operator(request: pytest.FixtureRequest) -> None:
    a = [torch.randn(3, 72, 40).bfloat16() for _ in range(3)]
    b = [torch.randn(40, 48).bfloat16() for _ in range(3)]
    c = torch.empty(72, 48, dtype=torch.bfloat16, device="meta")
    pk.check(
        kernels.matmul_reduce_scatter, a, b, c, world_size=3, schedules=request.config.getoption("--schedules") or 5,
        BM=128, BN=32, BK=16, P=16, STAGES=2,
    ).raise_if_found()  # fmt: skip


def test_every_kernel_is_here() -> None:
    modules = [importlib.import_module(f"pk.ops.{m.name}") for m in pkgutil.iter_modules(pk.ops.__path__)]
    every = {value.name for module in modules for value in vars(module).values() if isinstance(value, pk.Kernel)}
    assert every == {name for _, launched in PROBLEMS.values() for name in launched} | ALONE | COLLECTIVES
