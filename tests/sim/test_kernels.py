"""Whole kernels under many schedules, against float64; and mutants of them, which must not survive."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import DType, bfloat16, float16
from pk.sim import Report, SimTensor, simulate
from pk.sim.values import decode, encode, poisoned
from tests.sim import build

DTYPES = pytest.mark.parametrize("dtype", [bfloat16, float16], ids=str)


def random(rng: np.random.Generator, dtype: DType, *shape: int) -> SimTensor:
    return SimTensor(encode(rng.standard_normal(shape, dtype=np.float32), dtype), dtype)


def values(t: SimTensor) -> np.ndarray:
    return decode(t.array, t.dtype).astype(np.float64)


def error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest relative error of a rank; NaN if anything is NaN."""
    return max(
        (float(np.linalg.norm(g - w) / np.linalg.norm(w)) for g, w in zip(got, want, strict=True)),
        key=lambda e: np.inf if np.isnan(e) else e,
    )


def run_reduce_scatter(
    kernel: ir.Kernel, dtype: DType, world: int, m: int, n: int, k: int, seed: int = 0, sms: int | None = None
) -> tuple[float, Report, list[np.ndarray]]:
    rng = np.random.default_rng(m + n + k)
    args: list[dict] = []
    total = np.zeros((world, m, n))
    for _ in range(world):
        a, b = random(rng, dtype, world, m, k), random(rng, dtype, k, n)
        total += values(a) @ values(b)
        args.append({"a": a, "b": b, "c": SimTensor(poisoned((m, n), dtype), dtype)})
    report = simulate(kernel, args, seed=seed, sms=sms)
    got = [values(mine["c"]) for mine in args]
    return error(got, list(total)), report, got


def run_all_gather(
    kernel: ir.Kernel, dtype: DType, world: int, m: int, n: int, k: int, seed: int = 0, sms: int | None = None
) -> tuple[float, Report, list[np.ndarray]]:
    rng = np.random.default_rng(m + n + k)
    args: list[dict] = [
        {
            "x": random(rng, dtype, m, k),
            "b": random(rng, dtype, k, n),
            "c": SimTensor(poisoned((world, m, n), dtype), dtype),
        }
        for _ in range(world)
    ]
    whole = np.stack([values(mine["x"]) for mine in args])
    report = simulate(kernel, args, seed=seed, sms=sms)
    got = [values(mine["c"]) for mine in args]
    return error(got, [whole @ values(mine["b"]) for mine in args]), report, got


CASES: dict[str, tuple[Callable[..., ir.Kernel], Callable[..., tuple[float, Report, list[np.ndarray]]]]] = {
    "reduce_scatter": (build.reduce_scatter, run_reduce_scatter),
    "reduce_scatter_ordered": (build.reduce_scatter_ordered, run_reduce_scatter),
    "all_gather": (build.all_gather, run_all_gather),
}
KERNELS = pytest.mark.parametrize("name", CASES)


@KERNELS
@DTYPES
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_right_at_every_world_size(name: str, dtype: DType, world: int) -> None:
    make, run = CASES[name]
    assert run(make(dtype), dtype, world, 40, 72, 40)[0] < 1e-2


@KERNELS
@DTYPES
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 8), (32, 64, 16), (33, 65, 17), (70, 24, 100), (5, 136, 1)])
def test_tails(name: str, dtype: DType, m: int, n: int, k: int) -> None:
    make, run = CASES[name]
    for seed in range(3):
        assert run(make(dtype), dtype, 3, m, n, k, seed)[0] < 1e-2


@KERNELS
@pytest.mark.parametrize("sms", [2, 3, 7])
def test_right_under_many_schedules(name: str, sms: int) -> None:
    make, run = CASES[name]
    kernel = make()
    for seed in range(15):
        assert run(kernel, bfloat16, 2, 40, 72, 24, seed, sms)[0] < 1e-2


def test_one_block_does_everything() -> None:
    assert run_reduce_scatter(build.reduce_scatter(), bfloat16, 3, 70, 72, 40, sms=1)[0] < 1e-2


def test_the_ordered_sum_does_not_depend_on_the_schedule() -> None:
    kernel = build.reduce_scatter_ordered()
    results = [run_reduce_scatter(kernel, bfloat16, 4, 40, 72, 40, seed)[2] for seed in range(6)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_the_added_sum_does_depend_on_it() -> None:
    kernel = build.reduce_scatter()
    results = [run_reduce_scatter(kernel, bfloat16, 4, 40, 72, 40, seed)[2] for seed in range(6)]
    assert not all(np.array_equal(results[0], other) for other in results[1:])  # bf16 rounds at every addition


def test_same_seed_same_schedule() -> None:
    kernel = build.reduce_scatter()
    _, first, c = run_reduce_scatter(kernel, bfloat16, 3, 40, 72, 40, seed=5)
    _, again, d = run_reduce_scatter(kernel, bfloat16, 3, 40, 72, 40, seed=5)
    assert first == again
    assert np.array_equal(c, d)
    digests = {run_reduce_scatter(kernel, bfloat16, 3, 40, 72, 40, seed)[1].digest for seed in range(8)}
    assert len(digests) == 8


def test_the_report_counts() -> None:
    world, m, n, k = 3, 40, 72, 40
    report = run_reduce_scatter(build.reduce_scatter(), bfloat16, world, m, n, k)[1]
    tiles = 2 * 2  # of one owner: 40 x 72 in tiles of 32 x 64
    assert report.loads == world * world * tiles * 3 * 2  # 3 steps of k, a and b
    assert report.stores == world * world * tiles * 2  # 2 pieces
    assert report.signals == world * tiles * world
    assert report.messages == world * (world - 1) * tiles * 2 + world * tiles * (world - 1)
    assert report.max_in_flight > 0
    assert report.steps > report.loads + 2 * report.stores + report.signals
    assert "matmul_reduce_scatter: 3 ranks x 4 SMs, seed 0" in str(report)


# ---------------------------------------------------------------------------------------------- mutants
def survives(name: str, mutant: ir.Kernel, world: int = 2) -> bool:
    run = CASES[name][1]
    return all(run(mutant, bfloat16, world, 40, 72, 24, seed)[0] < 1e-2 for seed in range(20))


@KERNELS
def test_a_missing_wait_is_a_wrong_result(name: str) -> None:
    assert survives(name, CASES[name][0]())
    assert not survives(name, build.without(CASES[name][0](), "wait"))


def test_an_early_signal_is_a_wrong_result() -> None:
    def first(s: ir.Statement) -> tuple[ir.Statement, ...]:
        if isinstance(s, ir.Do) and s.op == "store_async":
            return build.do("signal", *early), s
        return () if isinstance(s, ir.Do) and s.op == "signal" else (s,)

    kernel = build.all_gather()
    early = (
        build.counter("ready", build.RANK, build.var("m")),
        build.op("%", build.op("+", build.RANK, 1), build.WORLD),
        1,
    )
    assert kernel.communicator is not None
    body = build.edit(kernel.communicator.body, first)
    mutant = build.replace(kernel, communicators=(build.replace(kernel.communicator, body=body),))
    assert not survives("all_gather", mutant)


def test_a_count_lowered_by_one_is_a_wrong_result() -> None:
    def lower(s: ir.Statement) -> tuple[ir.Statement, ...]:
        if isinstance(s, ir.Do) and s.op == "wait":
            return (build.replace(s, operands=(s.operands[0], build.op("-", s.operands[1], 1))),)
        return (s,)

    for name in ("all_gather", "reduce_scatter_ordered"):
        kernel = CASES[name][0]()
        assert not survives(name, build.replace(kernel, compute=build.edit(kernel.compute, lower)), world=3)


def test_a_missing_signal_is_a_deadlock_that_says_who_waits_for_what() -> None:
    mutant = build.without(build.reduce_scatter(), "signal_all")
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(mutant, bfloat16, 2, 20, 40, 16, seed=1, sms=1)
    error = caught.value
    text = str(error)
    lines = text.splitlines()
    steps = error.steps
    assert lines[:6] == [
        f"kernel `matmul_reduce_scatter` deadlocks: 2 of 6 roles wait for ever (seed 1, step {steps})",
        '  File "user.py", line 30, in kernel',
        "    pk.wait(begun, (owner, m, n), 1)",
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "      rank 0, block 0, storer at task turn=1, m=0, n=0: wait of begun[1, 0, 0] needs 1, sees 0",
        "      rank 1, block 0, storer at task turn=1, m=0, n=0: wait of begun[0, 0, 0] needs 1, sees 0",
    ]
    assert lines[6:] == [
        "  nobody signals begun[1, 0, 0] of rank 0: the kernel has no signal to `begun`",
        "  Find who should signal `begun` and why it does not, or wait for less.",
    ]
    assert {(b.rank, b.role, b.index, b.seen, b.needed) for b in error.blocked} == {
        (0, "storer", (1, 0, 0), 0, 1),
        (1, "storer", (0, 0, 0), 0, 1),
    }


def test_a_deadlock_lists_blocked_pipelines_after_the_signals() -> None:
    mutant = build.without(build.reduce_scatter(), "signal_all")
    with pytest.raises(errors.DeadlockError) as caught:
        run_reduce_scatter(mutant, bfloat16, 4, 200, 200, 64)
    text = str(caught.value)
    first = text.index("wait of begun[")
    assert first < text.index("fill of output[")
    assert first < text.index("fill of inputs[")
    assert "... and 8 more here" in text  # 16 storers are stuck at 16 counters, 8 of them are shown
    assert "like it on other blocks)" in text  # roles in one state are listed once
