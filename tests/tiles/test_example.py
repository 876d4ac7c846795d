"""The fused all-reduce + residual + RMSNorm example, on the simulator and as a cubin."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pk
from tests.codegen.test_compile import clean

PATH = Path(__file__).resolve().parents[2] / "examples" / "09_all_reduce_rmsnorm.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("all_reduce_rmsnorm", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = example()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_right_and_the_same_on_every_rank(world: int, dtype: torch.dtype) -> None:
    tokens, hidden = 11, 256
    results = pk.spawn(EXAMPLE.run, world, "sim", (world, tokens, hidden, dtype))
    want = EXAMPLE.reference(world, tokens, hidden, dtype)
    for got in results:
        for mine, first, right in zip(got, results[0], want, strict=True):
            assert torch.equal(mine, first)
            assert (mine.double() - right).norm() <= 5e-3 * right.norm()


@pytest.mark.parametrize(("hidden", "rows"), [(8192, 2), (1024, 8), (5120, 1)])
def test_compiles(hidden: int, rows: int) -> None:
    clean(EXAMPLE.all_reduce_rmsnorm.specialise(H=hidden, BR=rows).source)
