"""The numbered examples in the simulator: right at world sizes 1 to 8, with sizes that divide nothing."""

from __future__ import annotations

import importlib.util
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pk
from pk.kernel import Kernel

FOLDER = Path(__file__).parents[2] / "examples"
LIMIT = 1e-2


@cache
def example(name: str) -> ModuleType:
    """``examples/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


WORLDS = pytest.mark.parametrize("world", range(1, 9))


@WORLDS
def test_all_gather_matmul(world: int) -> None:
    e = example("02_all_gather_matmul")
    size = (world, 137 * world, 264, 200, torch.bfloat16)
    for rank, got in enumerate(pk.spawn(e.run, world, "sim", size)):
        assert error(got, e.reference(rank, *size)) <= LIMIT


@WORLDS
def test_matmul_all_reduce(world: int) -> None:
    e = example("03_matmul_all_reduce")
    size = (world, 333, 264, 40 * world, torch.float16)
    want, ranks = e.reference(*size), pk.spawn(e.run, world, "sim", size)
    for name in e.KERNELS:
        assert max(error(copies[name], want) for copies in ranks) <= LIMIT
        assert all(torch.equal(copies[name], ranks[0][name]) for copies in ranks)


@WORLDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_reduce(world: int, dtype: torch.dtype) -> None:
    e = example("04_all_reduce")
    want, ranks = e.reference(world, 20_001, dtype), pk.spawn(e.run, world, "sim", (world, 20_001, dtype))
    assert set(ranks[0]) == {"one-shot", "two-shot", "push", "ring"}
    for name in ranks[0]:
        assert max(error(copies[name], want) for copies in ranks) <= LIMIT
        assert all(torch.equal(copies[name], ranks[0][name]) for copies in ranks)
    for name in ("two-shot", "push"):  # all add in rank order, in float32, and round once
        assert torch.equal(ranks[0][name], ranks[0]["one-shot"])


@WORLDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_all_to_all(world: int, dtype: torch.dtype) -> None:
    e = example("05_all_to_all")
    shape = (3 * world, 2 * world, 8 * world)
    ranks = pk.spawn(e.run, world, "sim", (world, shape, dtype))
    for name, want in e.reference(world, shape, dtype).items():
        worst = max(error(got[name], w) for got, w in zip(ranks, want, strict=True))
        assert worst <= (LIMIT if "reduce" in name else 0), name


@pytest.mark.parametrize("name", [p.stem for p in sorted(FOLDER.glob("0[2-5]_*.py"))])
def test_kernels_are_short_and_compile(name: str) -> None:
    from pk.runtime.compile import compile

    found = [k for k in vars(example(name)).values() if isinstance(k, Kernel)]
    assert found
    for kernel in found:
        text = inspect.getsource(kernel.fn)
        assert len(text.splitlines()) <= 60
        ndims = {"ring": {"x": 3, "out": 3}, "gather_kernel": {"out": 3}, "scatter_kernel": {"x": 3},
                 "exchange_kernel": {"x": 4, "out": 4}, "all_gather_matmul": {"c": 3}}.get(kernel.name, {})  # fmt: skip
        program = kernel.specialise(**{n: pk.spec(torch.bfloat16, d) for n, d in ndims.items()})
        resources = compile(program.source).resources
        assert resources.spill_bytes == 0, kernel.name
        assert not re.search(r"multimem", program.source.text)
