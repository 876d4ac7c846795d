"""What TMA moves between ranks: every dtype, tiles from 16 x 16 to 256 x 256, vectors, 2 to 4 dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pk
from pk.codegen import generate, layout
from pk.ir.types import DType, Tile, bfloat16, float8_e4m3, float8_e5m2, float16, float32, int32
from pk.runtime.tensormap import validate_box
from pk.sim import SimTensor
from pk.sim.values import decode, encode, poisoned
from tests.collectives import kernels
from tests.collectives.test_reduce import run

MOVED = (bfloat16, float16, float32, float8_e4m3, float8_e5m2, int32)
ADDED = (bfloat16, float16, float32, int32)
TILES = ((16, 16), (16, 256), (256, 16), (64, 128), (200, 48), (256, 256))


def numbers(seed: int, dtype: DType, *shape: int) -> SimTensor:
    rng = np.random.default_rng(seed)
    values = rng.integers(-1000, 1000, shape) if dtype == int32 else rng.standard_normal(shape)
    return SimTensor(encode(values.astype(np.float32), dtype), dtype)


def tensors(kernel: Any, dtype: DType, **ndim: int) -> dict[str, Any]:
    return {name: pk.spec(dtype, n) for name, n in ndim.items()}


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_to_the_next_rank(tile: tuple[int, int], dtype: DType) -> None:
    if tile == (256, 256) and dtype.bits == 32:
        tile = (128, 256)  # 256 KiB are more than a block has
    for lead in ((), (2,), (2, 3)):
        shape = (*lead, tile[0] + 3, 2 * tile[1] - 5) if len(lead) < 2 else (*lead, 33, 35)
        xs = [numbers(r, dtype, *shape) for r in range(3)]
        args = [{"x": x, "out": SimTensor(poisoned(shape, dtype), dtype)} for x in xs]
        run(kernels.copy, args, R=tile[0], C=tile[1])
        assert all(np.array_equal(args[(r + 1) % 3]["out"].array, xs[r].array) for r in range(3))


@pytest.mark.parametrize("dtype", ADDED, ids=str)
def test_adds(dtype: DType) -> None:
    xs = [numbers(r, dtype, 70, 90) for r in range(2)]
    outs = [numbers(10 + r, dtype, 70, 90) for r in range(2)]
    want = [encode(decode(outs[r].array, dtype) + decode(xs[1 - r].array, dtype), dtype) for r in range(2)]
    run(kernels.copy, [{"x": x, "out": out} for x, out in zip(xs, outs, strict=True)], R=32, C=64, TO="add")
    assert all(np.array_equal(out.array, w) for out, w in zip(outs, want, strict=True))


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("cols", [16, 48, 256, 1024, 4096])
def test_vectors(cols: int, dtype: DType) -> None:
    xs = [numbers(r, dtype, 1500) for r in range(2)]
    args = [{"x": x, "out": SimTensor(poisoned((1500,), dtype), dtype)} for x in xs]
    run(kernels.copy_vector, args, B=cols)
    assert all(np.array_equal(args[1 - r]["out"].array, xs[r].array) for r in range(2))


@pytest.mark.parametrize("world", range(1, 9))
def test_to_every_rank_at_once(world: int) -> None:
    for multicast in (False, True):
        xs = [numbers(r, float16, 40, 70) for r in range(world)]
        args = [{"x": x, "out": SimTensor(poisoned((world, 40, 70), float16), float16)} for x in xs]
        run(kernels.broadcast, args, multicast=multicast, R=32, C=32)
        assert all(np.array_equal(mine["out"].array[r], x.array) for mine in args for r, x in enumerate(xs))
        xs = [numbers(r, float32, 40, 70) for r in range(world)]
        args = [{"x": x, "out": SimTensor(np.zeros((40, 70), np.float32), float32)} for x in xs]
        run(kernels.broadcast, args, multicast=multicast, R=32, C=32, ADD=True)
        total = sum(x.array.astype(np.float64) for x in xs)
        assert all(np.abs(mine["out"].array - total).max() < 1e-5 for mine in args)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("shape", [*TILES, (1, 16), (4, 512), (2, 8192), (7, 48), (16,), (2048,), (4096,)], ids=str)
def test_every_tile_has_boxes_that_tma_takes(shape: tuple[int, ...], dtype: DType) -> None:
    tile = Tile(shape, dtype, "shared")
    for ndim in range(max(len(shape), 1), 5):
        box = layout.box(tile, ndim)
        validate_box("x", dtype.name, box, layout.swizzle(tile))
        panels = tile.cols // box[-1]
        assert panels * box[-1] == tile.cols
        # TMA's place in shared memory: a multiple of 128 bytes for every box
        assert panels == 1 or tile.rows * box[-1] * dtype.itemsize % 128 == 0


def test_every_dtype_and_shape_compiles() -> None:
    from pk.runtime.compile import compile

    for dtype in MOVED:
        for ndim in (2, 3, 4):
            specs = tensors(kernels.copy, dtype, x=ndim, out=ndim)
            assert compile(generate(kernels.copy.specialise(**specs, R=256, C=16).ir)).resources.spill_bytes == 0
        for cols in (16, 48, 2048):
            specs = tensors(kernels.copy_vector, dtype, x=1, out=1)
            compile(generate(kernels.copy_vector.specialise(**specs, B=cols, ADD=dtype in ADDED).ir))
