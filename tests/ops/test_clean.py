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
from tests.ops.random_problems import FP8, PARALLEL, Problem, call, check

SAMPLE = 2  # schedules in the suite
GRADIENTS = ("a", "b", "bias")
VECTORS = {"dtype": FP8, "scale_a": "each", "scale_b": "each", "activation": "relu", "out": "new"}
# Not launched by an operator: what the examples show, checked below with its own arguments.
ALONE = {kernels.matmul_reduce_scatter}


def _problems() -> dict[str, Problem]:
    many = {o: Problem(o, 2, 1, 136, 48, 80, bias="alike", options={"config": "c128x64"}) for o in PARALLEL}
    few = {o: Problem(o, 2, 2, 8, 144, 272, bias="alike", options={"config": "t64x16.d128.k2"}) for o in PARALLEL}
    found = {
        "matmul": Problem("matmul", 1, 1, 200, 136, 80, bias="alike", wanted=GRADIENTS),
        "matmul-few": Problem("matmul", 1, 2, 8, 136, 520, a_layout="padded", options={"config": "t64x8.d128.k2"}),
        "gather-again": replace(
            many["all_gather_matmul"], options={"config": "c64x128", "save_gathered": False, "comm_sms": 1},
            rows=72, wanted=GRADIENTS,
        ),
        "scatter-right-only": replace(many["matmul_reduce_scatter"], wanted=("b",)),
        "symmetric-out": replace(many["matmul_all_reduce"], out="symmetric", rows=300),
    }  # fmt: skip
    for o in PARALLEL:
        found[f"{o}"] = replace(many[o], wanted=GRADIENTS)
        found[f"{o}-scaled"] = replace(many[o], **VECTORS, b_layout="nk", world=3, rows=72)
        found[f"{o}-few"] = replace(few[o], wanted=GRADIENTS)
        found[f"{o}-few-scaled"] = replace(few[o], **VECTORS, b_layout="nk", world=3)
        found[f"{o}-pingpong"] = replace(many[o], options={"config": "p128x160"}, n=336)
    return found


PROBLEMS = _problems()
QUICK = ("matmul-few", "scatter-right-only", *(f"{o}-few-scaled" for o in PARALLEL), *(f"{o}-scaled" for o in PARALLEL))
_seen: dict[str, set[Any]] = {}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--schedules")
        metafunc.parametrize("name", PROBLEMS if every else QUICK)


def checked(p: Problem, schedules: int) -> list[pk.checking.Check]:
    """The launches of the call, forward and backward; the values must be right too."""
    with checking(schedules) as checks:
        found = pk.spawn(call, p.world, "sim", (p,))
    check(p, found)
    return checks.done


def test_operators(name: str, request: pytest.FixtureRequest) -> None:
    done = checked(PROBLEMS[name], request.config.getoption("--schedules") or SAMPLE)
    assert done
    for made in done:
        made.raise_if_found()
    backward = 1 + len(set(PROBLEMS[name].wanted) & {"a", "b"})
    assert len(done) >= backward, [made.kernel for made in done]


def test_a_kernel_of_no_operator(request: pytest.FixtureRequest) -> None:
    a = [torch.randn(3, 72, 40).bfloat16() for _ in range(3)]
    b = [torch.randn(40, 48).bfloat16() for _ in range(3)]
    c = torch.empty(72, 48, dtype=torch.bfloat16, device="meta")
    want = [sum(x[r].double() @ w.double() for x, w in zip(a, b, strict=True)) for r in range(3)]
    made = pk.check(
        kernels.matmul_reduce_scatter, a, b, c, world_size=3, schedules=request.config.getoption("--schedules") or 10,
        BM=128, BN=32, BK=16, P=16, STAGES=2,
    )  # fmt: skip
    made.raise_if_found()
    assert want


def test_every_kernel_is_launched() -> None:
    modules = [importlib.import_module(f"pk.ops.{m.name}") for m in pkgutil.iter_modules(pk.ops.__path__)]
    every = {value.name for module in modules for value in vars(module).values() if isinstance(value, pk.Kernel)}
    launched = {made.kernel for name in PROBLEMS if PROBLEMS[name].world < 4 for made in _launches(name)}
    assert every - {k.name for k in ALONE} <= launched


def _launches(name: str) -> list[pk.checking.Check]:
    return checked(PROBLEMS[name], 1)
