"""Kernels as users write them, through the front end, on the simulator without a group around it."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

import pytest

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import DType, bfloat16, float16
from tests import kernels
from tests.sim import build
from tests.sim.test_kernels import run_all_gather, run_reduce_scatter

SMALL = {"BM": 128, "BN": 64, "BK": 32, "P": 32}
RUN = {
    "matmul_reduce_scatter": run_reduce_scatter,
    "matmul_reduce_scatter_ordered": run_reduce_scatter,
    "all_gather_matmul": run_all_gather,
}


def written(name: str, dtype: DType = bfloat16, **constants: Any) -> ir.Kernel:
    kernel, dims = kernels.KERNELS[name]
    specs = {tensor: kernels.pk.spec(dtype, ndim) for tensor, ndim in dims.items()}
    return kernel.specialise(**specs, **constants).ir


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_right_at_every_world_size(name: str, dtype: DType, world: int) -> None:
    assert RUN[name](written(name, dtype, **SMALL), dtype, world, 150, 72, 40)[0] < 1e-2


@pytest.mark.parametrize("name", RUN)
def test_right_under_many_schedules(name: str) -> None:
    kernel = written(name, **SMALL)
    for seed in range(10):
        assert RUN[name](kernel, bfloat16, 3, 150, 72, 40, seed, sms=2 + seed % 3)[0] < 1e-2


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (65, 264, 72), (200, 24, 136)])
def test_default_tiles(name: str, m: int, n: int, k: int) -> None:
    assert RUN[name](written(name), bfloat16, 2, m, n, k)[0] < 1e-2


@pytest.mark.parametrize("name", RUN)
def test_a_missing_wait_is_a_wrong_result(name: str) -> None:
    mutant = build.without(written(name, **SMALL), "wait")
    assert not all(RUN[name](mutant, bfloat16, 2, 150, 72, 24, seed)[0] < 1e-2 for seed in range(20))


@pytest.mark.parametrize("name", RUN)
def test_a_missing_signal_is_a_deadlock_at_the_line_that_waits(name: str) -> None:
    kernel = written(name, **SMALL)
    mutant = build.without(kernel, "signal_all" if name == "matmul_reduce_scatter" else "signal")
    with pytest.raises(errors.DeadlockError) as caught:
        RUN[name](mutant, bfloat16, 2, 150, 72, 24)
    text = str(caught.value)
    waited = next(s for s in _ops(kernel.compute) if s.op == "wait")
    signals = waited.operands[0]
    assert isinstance(signals, ir.Signal)
    assert f"{waited.span.text.strip()}\n    ^" in text
    assert f'File "{waited.span.file}", line {waited.span.line}' in text
    assert f"wait of {signals.signals}[" in text
    assert f"Find who should signal `{signals.signals}`" in text


def _ops(block: ir.Block) -> list[ir.Do]:
    found: list[ir.Do] = []
    build.edit(block, lambda s: (found.append(s) if isinstance(s, ir.Do) else None, (s,))[1])
    return found


def test_1024_cubed_on_four_ranks_is_quick_and_small() -> None:
    kernel = written("matmul_reduce_scatter")
    start = time.perf_counter()
    error, report, _ = run_reduce_scatter(kernel, bfloat16, 4, 256, 1024, 1024)
    assert time.perf_counter() - start < 20  # 0.6 s on two idle cores
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 1024**2  # KiB
    assert error < 1e-2
    assert report.loads == 4 * 4 * 2 * 4 * 16 * 2
    assert replace(report) == run_reduce_scatter(kernel, bfloat16, 4, 256, 1024, 1024)[1]
