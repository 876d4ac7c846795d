"""Kernels on index vectors as cubins: bulk copies of rows by every lane, nothing in local memory, nothing spilled."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pk
from pk.runtime.compile import sass
from tests import vector_kernels
from tests.codegen.test_compile import clean
from tests.test_moe import load

HALF, INT, FLOAT = torch.bfloat16, torch.int32, torch.float32
SPECS: dict[str, dict[str, Any]] = {
    "gather_rows": {"x": (HALF, 2), "rows": (INT, 1), "y": (HALF, 2)},
    "exchange_rows": {
        "x": (HALF, 2),
        "to": (INT, 1),
        "y": (HALF, 2),
        "source": (INT, 1),
        "seen": (INT, 1),
        "tickets": (INT, 1),
    },
    "double_rows": {"x": (HALF, 2), "rows": (INT, 1), "y": (HALF, 2)},
    "segments": {"x": (HALF, 2), "first": (INT, 1), "count": (INT, 1), "y": (HALF, 2)},
    "last_adds": {"x": (INT, 2), "total": (INT, 1)},
}
MOE: dict[str, dict[str, Any]] = {
    "moe_dispatch_matmul": {
        "x": (HALF, 2), "perm": (INT, 1), "expert": (INT, 1), "counts": (INT, 2), "w": (HALF, 3), "y": (HALF, 2),
        "origin": (INT, 1), "base_of": (INT, 2), "total_of": (INT, 2), "E": 16, "TOPK": 8,
    },
    "moe_matmul_return": {
        "y": (HALF, 2), "w": (HALF, 3), "back": (HALF, 2), "origin": (INT, 1), "base_of": (INT, 2),
        "total_of": (INT, 2),
    },
    "moe_weighted_sum": {"back": (HALF, 3), "weight": (FLOAT, 2), "out": (HALF, 2)},
}  # fmt: skip


def program(module: Any, name: str, given: dict[str, Any]) -> Any:
    """Kernel ``name`` of ``module``, specialised."""
    arguments = {k: pk.spec(*v) if isinstance(v, tuple) else v for k, v in given.items()}
    return getattr(module, name).specialise(**arguments)


@pytest.mark.parametrize("name", SPECS)
def test_kernels_of_the_tests(name: str) -> None:
    clean(program(vector_kernels, name, SPECS[name]).source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32, torch.float8_e4m3fn], ids=str)
def test_rows_of_every_type(dtype: torch.dtype) -> None:
    given = {"x": (dtype, 2), "rows": (INT, 1), "y": (dtype, 2)}
    clean(program(vector_kernels, "gather_rows", given).source)


@pytest.mark.parametrize("name", MOE)
def test_the_mixture_of_experts(name: str) -> None:
    clean(program(load(), name, MOE[name]).source)


@pytest.mark.parametrize("experts", [6, 256])
def test_the_plan_of_few_and_many_experts(experts: int) -> None:
    clean(program(load(), "moe_dispatch_matmul", {**MOE["moe_dispatch_matmul"], "E": experts}).source)


def test_rows_are_bulk_copies_without_a_map() -> None:
    source = program(vector_kernels, "gather_rows", SPECS["gather_rows"]).source
    code = sass(clean(source).cubin)
    assert re.search(r"\bUBLKCP\.S\.G\b", code) and re.search(r"\bUBLKCP\.G\.S\b", code), "bulk copies"
    assert not re.search(r"\bUTMALDG|\bUTMASTG", code)
    assert source.by_rows == ("x", "y")
    assert not any(f.kind in ("map", "maps") for f in source.fields)


def test_the_dispatch_reaches_peers_by_pointer() -> None:
    source = program(load(), "moe_dispatch_matmul", MOE["moe_dispatch_matmul"]).source
    peers = {f.key for f in source.fields if f.kind == "pointers"}
    assert peers == {"recv", "origin", "table"}
    assert source.remote  # origin is the caller's
    assert {"y", "origin", "base_of", "total_of"} <= set(source.outputs)
