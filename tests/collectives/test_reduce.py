"""``pk.reduce`` and ``pk.all_reduce`` in the simulator: exact bits at every world size, dtype, shape and schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pk
from pk.ir.types import DType, bfloat16, float16, float32
from pk.kernel import Kernel
from pk.sim import SimTensor, simulate
from pk.sim.values import STORAGE, decode, encode, poisoned
from tests.collectives import kernels
from tests.sim import build

DTYPES = pytest.mark.parametrize("dtype", [bfloat16, float16, float32], ids=str)
COMBINE = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def random(seed: int, dtype: DType, *shape: int) -> SimTensor:
    rng = np.random.default_rng(seed)
    return SimTensor(encode(rng.standard_normal(shape, dtype=np.float32), dtype), dtype)


def empty(dtype: DType, *shape: int) -> SimTensor:
    return SimTensor(poisoned(shape, dtype), dtype)


def combined(tensors: list[SimTensor], op: str = "sum") -> np.ndarray:
    """The storage that a reduction must leave: float32, in rank order, rounded once."""
    total = decode(tensors[0].array, tensors[0].dtype).astype(np.float32)
    for t in tensors[1:]:
        total = COMBINE[op](total, decode(t.array, t.dtype))
    return encode(total, tensors[0].dtype)


def run(kernel: Kernel, args: list[dict[str, Any]], seed: int = 0, multicast: bool = False, **constants: Any) -> None:
    """Simulate ``kernel``, specialised for rank 0's tensors, with ``args`` of every rank."""
    tensors = {name: t for name, t in args[0].items() if isinstance(t, SimTensor)}
    specs = {name: pk.spec(t.dtype, t.array.ndim) for name, t in tensors.items()}
    simulate(kernel.specialise(**specs, **constants).ir, args, seed=seed, multicast=multicast)


@DTYPES
@pytest.mark.parametrize("world", range(1, 9))
def test_right_at_every_world_size(world: int, dtype: DType) -> None:
    xs = [random(r, dtype, 19, 75) for r in range(world)]
    want = combined(xs)
    args = [{"x": x, "out": empty(dtype, 19, 75)} for x in xs]
    run(kernels.reduce_2d, args, seed=world, R=8, C=32)
    assert all(np.array_equal(mine["out"].array, want) for mine in args)
    run(kernels.all_reduce_2d, [{"x": x} for x in xs], seed=world, R=4, C=24)
    assert all(np.array_equal(x.array, want) for x in xs)


@DTYPES
@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize(("shape", "tile"), [
    ((1, 1), (1, 8)), ((1, 1000), (1, 128)), ((300, 300), (256, 256)), ((33, 17), (16, 16)), ((5, 264), (64, 8)),
])  # fmt: skip
def test_shapes_and_ops(shape: tuple[int, int], tile: tuple[int, int], op: str, dtype: DType) -> None:
    xs = [random(7 * r, dtype, *shape) for r in range(3)]
    args = [{"x": x, "out": empty(dtype, *shape)} for x in xs]
    run(kernels.reduce_2d, args, R=tile[0], C=tile[1], OP=op)
    assert all(np.array_equal(mine["out"].array, combined(xs, op)) for mine in args)
    want = combined(xs, op)
    run(kernels.all_reduce_2d, [{"x": x} for x in xs], R=tile[0], C=tile[1], OP=op)
    assert all(np.array_equal(x.array, want) for x in xs)


@DTYPES
def test_vectors_and_four_dimensions(dtype: DType) -> None:
    xs = [random(r, dtype, 1001) for r in range(4)]
    args = [{"x": x, "out": empty(dtype, 1001)} for x in xs]
    run(kernels.reduce_1d, args, B=96)
    assert all(np.array_equal(mine["out"].array, combined(xs)) for mine in args)
    xs = [random(r, dtype, 3, 2, 21, 30) for r in range(3)]
    args = [{"x": x, "out": empty(dtype, 2, 21, 30)} for x in xs]
    run(kernels.reduce_4d, args, R=16, C=16)
    assert all(np.array_equal(mine["out"].array, combined(xs)[r]) for r, mine in enumerate(args))


@pytest.mark.parametrize(("dy", "dx"), [(0, 0), (3, 5), (-2, -7), (100, 0)])
def test_outside_the_source_is_zero(dy: int, dx: int) -> None:
    xs = [random(r, float32, 20, 40) for r in range(2)]
    args = [{"x": x, "out": empty(float32, 23, 41), "dy": dy, "dx": dx} for x in xs]
    run(kernels.reduce_shifted, args)
    total, want = combined(xs), np.zeros((23, 41), np.float32)
    for row in range(23):
        for col in range(41):
            if 0 <= row + dy < 20 and 0 <= col + dx < 40:
                want[row, col] = total[row + dy, col + dx]
    assert all(np.array_equal(mine["out"].array, want) for mine in args)


def test_strided_and_permuted_views() -> None:
    whole = [random(r, bfloat16, 12, 6, 64) for r in range(3)]
    xs = [SimTensor(w.array.transpose(1, 0, 2)[2], bfloat16) for w in whole]  # (12, 64), rows 6 * 64 apart
    args = [{"x": x, "out": SimTensor(poisoned((12, 128), bfloat16)[:, 32:96], bfloat16)} for x in xs]
    run(kernels.reduce_2d, args, R=8, C=16)
    assert all(np.array_equal(mine["out"].array, combined(xs)) for mine in args)


def test_nan_wins() -> None:
    xs = [random(r, float32, 4, 8) for r in range(2)]
    xs[1].array[2, 3] = np.nan
    for op in COMBINE:
        args = [{"x": x, "out": empty(float32, 4, 8)} for x in xs]
        run(kernels.reduce_2d, args, R=4, C=8, OP=op)
        assert np.isnan(args[0]["out"].array).sum() == 1


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_consumer_reduces_what_storers_have_signalled(world: int) -> None:
    for seed in range(4):
        xs = [random(r, bfloat16, 100, 136) for r in range(world)]
        args = [{"x": x, "out": empty(bfloat16, 100, 136)} for x in xs]
        run(kernels.reduce_in_consumer, args, seed=seed)
        assert all(np.array_equal(mine["out"].array, combined(xs)) for mine in args)


def test_results_do_not_depend_on_the_schedule_but_in_the_network() -> None:
    xs = [random(r, float32, 16, 64) for r in range(8)]
    seen: dict[bool, set[bytes]] = {False: set(), True: set()}
    for multicast, results in seen.items():
        for seed in range(6):
            args = [{"x": x, "out": empty(float32, 16, 64)} for x in xs]
            run(kernels.reduce_2d, args, seed=seed, multicast=multicast, R=4, C=64)
            want = sum(x.array.astype(np.float64) for x in xs)
            assert np.abs(args[0]["out"].array - want).max() < 1e-5
            results.add(b"".join(mine["out"].array.tobytes() for mine in args))
    assert len(seen[False]) == 1
    assert len(seen[True]) > 1  # the switch adds in any order: float32 sums, but not always the same ones


def test_a_run_time_group_only_orders_the_tasks() -> None:
    for group in (-3, 1, 2, 100):
        seen = SimTensor(np.ones((97, 130), STORAGE[float32]), float32)
        run(kernels.tiles_in_groups, [{"seen": seen, "group": group}])
        assert (seen.array == 2).all()


def test_without_its_wait_a_sum_misses_terms() -> None:
    from tests.collectives.test_examples import example

    kernel = example("03_matmul_all_reduce").matmul_all_reduce
    small = {"BM": 128, "BN": 64, "P": 64, "COMM": 1}
    program = kernel.specialise(**{n: pk.spec(bfloat16, 2) for n in "abc"}, **small).ir
    for mutant, right in ((program, True), (build.without(program, "wait"), False)):
        outcomes = set()
        for seed in range(6):
            pairs = [(random(r, bfloat16, 130, 40), random(50 + r, bfloat16, 40, 136)) for r in range(3)]
            args = [{"a": a, "b": b, "c": empty(bfloat16, 130, 136)} for a, b in pairs]
            simulate(mutant, args, seed=seed, sms=3)
            want = sum(decode(a.array, bfloat16).astype(np.float64) @ decode(b.array, bfloat16) for a, b in pairs)
            errors = [np.linalg.norm(decode(mine["c"].array, bfloat16) - want) / np.linalg.norm(want) for mine in args]
            outcomes.add(max(errors, key=lambda e: np.inf if np.isnan(e) else e) < 1e-2)
        assert outcomes == {True} if right else False in outcomes
