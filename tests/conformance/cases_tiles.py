"""Cases of functions, masks, reductions, and of loads and stores between registers and tensors."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, pi

import numpy as np
import torch

from tests.conformance.case import (
    BF16,
    F16,
    F32,
    I32,
    MOVED,
    UNTOUCHED,
    WORLDS,
    Arg,
    Arguments,
    Array,
    Case,
    Want,
    Within,
    blank,
    integers,
    normals,
    short,
)
from tests.conformance.kernels import tiles as k

ULP = 2.0**-23


def _functions(x: Array) -> tuple[Array, Array]:
    """Values in float64 and allowed errors of ``functions_of``: ulps as the language promises, one for rounding."""
    a = x.astype(np.float64)
    p = (np.abs(x) + np.float32(0.001)).astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-a))
    gelu = 0.5 * a * (1 + np.vectorize(erf, otypes=[np.float64])(a / np.sqrt(2)))
    tanh = 0.5 * a * (1 + np.tanh(np.sqrt(2 / pi) * (a + 0.044715 * a**3)))
    values = [
        np.exp2(a), np.exp(a), np.log2(p), np.log(p), np.sqrt(p), 1 / np.sqrt(p), np.tanh(a), sigmoid, a * sigmoid,
        gelu, tanh,
    ]  # fmt: skip
    ulps = [2, 2, 2, 2, 0.5, 2, 2, 4, 4, 0, 0]
    slack = [np.abs(v) * ULP * u + 2.0**-126 for v, u in zip(values, ulps, strict=True)]
    slack[9] = slack[10] = 1e-6 * (1 + np.abs(a))
    return np.stack(values), np.stack(slack)


def _function_case(name: str, kernel: object, shape: tuple[int, ...], dtype: torch.dtype, **constants: int) -> Case:
    def make(rank: int, world: int) -> Arguments:
        x = normals(shape, dtype, name) * np.float32(3 if dtype == F32 else 1)
        return {"x": Arg(x, dtype), "out": blank((k.FUNCTIONS, *shape), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": Within(*_functions(m["x"].value))} for m in ranks]

    return Case(name, kernel, make, meaning, dict(constants), worlds=(1,))  # type: ignore[arg-type]


def _masks(x: Array, y: Array) -> Array:
    f = np.float32
    rows, cols = x.shape
    row, col = np.arange(rows)[:, None], np.arange(cols)[None, :]
    whole = np.maximum(row, col) + np.minimum(row, 3) * 2 - np.abs(row - col)
    return np.stack([
        np.where(x < y, x, y), np.where(x <= y, f(1), f(0)), np.where(x > y, x, f(2)), np.where(x >= y, f(1), y),
        np.where((x == y) | (x > 1), x, f(0)), np.where((x != y) & (y < 0.5), x, y), np.where(~(x < y), x, -y),
        np.where(col <= row, x, f(-np.inf)), np.where((col % 3 == 1) | (row // 2 == 4), x, f(0)),
        x + row.astype(f) * f(0.5), x * (col - row).astype(f), whole.astype(f),
        ((x + f(0.1)).astype(np.float64) * (y - f(0.7)) + f(0.1)).astype(f),
    ])  # fmt: skip


def _mask_case(dtype: torch.dtype, tile: tuple[int, int]) -> Case:
    name, shape = f"masks.{short(dtype)}.{tile[0]}x{tile[1]}", (tile[0] * 2 - 3, tile[1] + 9)

    def make(rank: int, world: int) -> Arguments:
        x, y = integers(shape, -3, 3, name, "x") * 0.5, integers(shape, -3, 3, name, "y") * 0.5
        out = blank((k.MASKS, *shape), F32)
        return {"x": Arg(x.astype(np.float32), dtype), "y": Arg(y.astype(np.float32), dtype), "out": out}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": _masks(m["x"].value, m["y"].value)} for m in ranks]

    return Case(name, k.masks, make, meaning, {"R": tile[0], "C": tile[1]}, worlds=(1,))


def _reductions(tile: tuple[int, int], whole: bool, dtype: torch.dtype = F32) -> Case:
    (r, c), blocks = tile, 2
    shape = (r * blocks, c)
    name = f"reductions.{short(dtype)}.{r}x{c}.{'whole' if whole else 'normal'}"

    def make(rank: int, world: int) -> Arguments:
        x = integers(shape, -9, 9, name) if whole or dtype == I32 else normals(shape, dtype, name)
        out = I32 if dtype == I32 else F32
        x = x.astype(np.int32) if dtype == I32 else x
        return {"x": Arg(x, dtype), "rows": blank((3, shape[0], 1), out), "cols": blank((3, blocks, c), out)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            x = mine["x"].value.astype(np.float64).reshape(blocks, r, c)
            size = np.abs(x)
            results: dict[str, Want] = {}
            for key, axis, shaped in (("rows", 2, (1, shape[0], 1)), ("cols", 1, (1, blocks, c))):
                values = [f(x, axis=axis).reshape(shaped) for f in (np.sum, np.max, np.min)]
                slack = [size.sum(axis=axis).reshape(shaped) * ULP * 10, values[1] * 0, values[2] * 0]
                value = np.concatenate(values)
                results[key] = value if whole or dtype == I32 else Within(value, np.concatenate(slack), same=True)
            found.append(results)
        return found

    return Case(name, k.reductions, make, meaning, {"R": r, "C": c}, worlds=(1,))


def _softmax(dtype: torch.dtype, cols: int) -> Case:
    name, shape = f"softmax.{short(dtype)}.{cols}", (150, cols)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name), dtype), "y": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            e = np.exp(mine["x"].value.astype(np.float64))
            y = e / e.sum(axis=1, keepdims=True)
            found.append({"y": Within(y, y * (float(torch.finfo(dtype).eps) + 20 * ULP))})
        return found

    return Case(name, k.softmax, make, meaning, worlds=(1,))


def _choices(where: str) -> Case:
    bound, x = 0.35, normals((9,), F32, "choices")
    rows = normals((2, 64), BF16, "choices", "rows")

    def make(rank: int, world: int) -> Arguments:
        y = blank((9 * k.FUNCTIONS, 64), BF16)
        return {"x": Arg(x, F32), "rows": Arg(rows, BF16), "y": y}

    values = _functions(x)[0].T  # none of them is near the bound
    assert np.abs(values - bound).min() > 1e-3
    wanted: list[dict[str, Want]] = [{"y": rows[(values > bound).astype(int)].reshape(-1, 64)}]
    return Case(
        f"scalar_choices.{where}",
        k.scalar_choices,
        make,
        lambda ranks: wanted,
        {"WHERE": where},
        {"bound": bound},
        (1,),
    )


def _whole() -> Case:
    shape = (23, 90)

    def make(rank: int, world: int) -> Arguments:
        x, y = (integers(shape, -20, 20, "whole", which).astype(np.int32) for which in "xy")
        return {"x": Arg(x, I32), "y": Arg(y, I32), "out": blank((k.WHOLE, *shape), I32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            a, b = mine["x"].value, mine["y"].value
            results = [
                a + b, a - b, a * b, np.minimum(a, b), np.maximum(a, b), -a, np.abs(b), a // 3, a % 3, a // -4, a % -4,
                np.where(a < b, 1, 0), np.where(a <= b, a, 0), np.where(a > b, a, 5), np.where(a >= b, 5, 1),
                np.where(a == b, a, b), np.where(a != b, 1, a), 5 - a, np.trunc(a * 0.5),
                np.where((a > 0) | ~(b > 0), a, b),
            ]  # fmt: skip
            found.append({"out": np.stack(results)})
        return found

    return Case("whole", k.whole, make, meaning, worlds=(1,))


def _halves() -> Case:
    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals((13, 1024), F32, "halves"), F32), "y": blank((13, 1024), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        x = ranks[0]["x"].value.reshape(13, 2, 2, 256)
        return [{"y": x[:, :, ::-1].reshape(13, 1024) + np.float32(1)}]

    return Case("halves", k.halves, make, meaning, worlds=(1,))


# -------------------------------------------------------------------------------------------- registers and tensors
def _windows(dtype: torch.dtype, tile: tuple[int, int], keep: int) -> Case:
    name, shape = f"windows.{short(dtype)}.{tile[0]}x{tile[1]}.{keep}", (tile[0] + 21, tile[1] + 13)
    other = 3.0

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name), dtype), "y": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            x, y = mine["x"].value, np.full_like(mine["x"].value, other)
            y[:-1, :-1] = x[1:, 1:]
            dropped = np.arange(shape[0]) % tile[0] >= keep
            found.append({"y": np.where(dropped[:, None], mine["y"].value, y)})
        return found

    constants = {"R": tile[0], "C": tile[1], "OTHER": int(other) if dtype == I32 else other}
    return Case(name, k.windows, make, meaning, constants, {"keep": keep}, worlds=(1,))


def _moved(
    name: str, kernel: object, shape: tuple[int, ...], dtype: torch.dtype,
    sent: Callable[[list[Array]], list[Array]], lead: bool, parallel: str = "y", worlds: tuple[int, ...] = WORLDS,
    **constants: object,
) -> Case:  # fmt: skip
    """x -> y; ``lead``: y has one more dimension, of the world size; ``parallel``: which are symmetric."""

    def make(rank: int, world: int) -> Arguments:
        x = Arg(normals(shape, dtype, name, rank), dtype, "x" in parallel)
        return {"x": x, "y": blank((world, *shape) if lead else shape, dtype, "y" in parallel)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": y} for y in sent([mine["x"].value for mine in ranks])]

    return Case(name, kernel, make, meaning, constants, worlds=worlds)  # type: ignore[arg-type]


def _to_all(xs: list[Array]) -> list[Array]:
    return [np.stack(xs)] * len(xs)


def _rights_to_all(xs: list[Array]) -> list[Array]:
    return [np.stack([*xs[1:], xs[0]])] * len(xs)


def _to_right(xs: list[Array]) -> list[Array]:
    world, found = len(xs), []
    for me in range(world):
        y = np.full((world, *xs[0].shape), np.nan if xs[0].dtype != np.int32 else UNTOUCHED, xs[0].dtype)
        y[(me - 1) % world] = xs[(me - 1) % world]
        found.append(y)
    return found


def _reversed(xs: list[Array]) -> list[Array]:
    return [x[::-1] for x in xs]


def _rights_to_left(xs: list[Array]) -> list[Array]:
    world, found = len(xs), []
    for me in range(world):
        y = np.full((world, *xs[0].shape), np.nan if xs[0].dtype != np.int32 else UNTOUCHED, xs[0].dtype)
        source = (me + 1) % world  # whose left neighbour I am
        y[source] = xs[(source + 1) % world]
        found.append(y)
    return found


def _addressed(dtype: torch.dtype) -> Case:
    name, order = f"addressed.{short(dtype)}", np.asarray([3, 0, 0, 4, 1, 7], np.int32)  # 7 lies outside

    def make(rank: int, world: int) -> Arguments:
        x = Arg(normals((5 * 16, 32), dtype, name), dtype)
        return {"index": Arg(order, I32), "x": x, "y": blank((6 * 16, 32), dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            x = np.concatenate([mine["x"].value.reshape(5, 16, 32), np.zeros((3, 16, 32), np.float32)])
            found.append({"y": x[order].reshape(96, 32)})
        return found

    return Case(name, k.addressed, make, meaning, worlds=(1, 2))


CASES = [
    *[_function_case(f"functions.{short(d)}", k.functions, (40, 150), d) for d in (F32, BF16)],
    _function_case("functions_in_consumer.float32", k.functions_in_consumer, (70, 100), F32),
    _function_case("scalar_functions.float32", k.scalar_functions, (20,), F32),
    *[_mask_case(F32, tile) for tile in ((16, 64), (8, 256), (64, 8))],
    _mask_case(BF16, (16, 32)),
    *[
        _reductions(tile, whole)
        for tile in ((16, 64), (64, 128), (1, 512), (128, 16), (4, 1024))
        for whole in (True, False)
    ],
    *[_reductions((16, 64), True, dtype) for dtype in (BF16, F16, I32)],
    *[_softmax(dtype, cols) for dtype, cols in ((F32, 128), (BF16, 77))],
    *[_windows(dtype, (16, 32), keep) for dtype in MOVED for keep in (100, 5)],
    *[_windows(BF16, tile, 1000) for tile in ((16, 16), (64, 64), (128, 128), (1, 256), (256, 16))],
    *[_moved(f"windows_nd.{short(d)}.3", k.windows_nd, (2, 3, 50), d, _to_all, True) for d in MOVED],
    *[
        _moved(f"consumer_windows.{short(d)}", k.consumer_windows, (70, 50), d, lambda xs: xs, False, "", (1,))
        for d in MOVED
    ],
    *[_moved(f"peers.{short(d)}.all", k.peers, (20, 50), d, _rights_to_all, True, "xy") for d in MOVED],
    *[_moved(f"peers.{short(d)}.left", k.peers, (20, 50), d, _rights_to_left, True, "xy", TO="left") for d in MOVED],
    *[
        _moved(f"elements.{short(d)}.{where}", k.elements, (10,), d, _rights_to_all, True, "xy", WHERE=where)
        for d in MOVED
        for where in (("storer", "shared", "consumer", "team") if d in (F32, I32) else ("storer",))
    ],
    _addressed(BF16),
    *[_choices(where) for where in ("loader", "shared")],
    _whole(),
    _halves(),
    *[
        _moved(f"windows_4d.{short(d)}", k.windows_4d, (2, 3, 13, 50), d, _reversed, False, "", (1,))
        for d in (BF16, F32)
    ],
    *[_moved(f"elements_nd.{short(d)}.2", k.elements_nd, (3, 5), d, _to_right, True) for d in (BF16, F32, I32)],
    *[_moved(f"elements_nd.{short(d)}.3", k.elements_nd, (2, 3, 4), d, _to_all, True) for d in (BF16, F32, I32)],
    *[_moved(f"elements_4d.{short(d)}", k.elements_4d, (2, 2, 3, 4), d, list, False, "", (1,)) for d in (F16, I32)],
]
