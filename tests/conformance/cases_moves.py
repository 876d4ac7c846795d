"""Cases of ``load_async``, ``store_async`` and ``store_add_async``: dtypes, tiles, tails, dimensions, destinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from tests.conformance.case import (
    ADDED,
    BF16,
    F32,
    I32,
    MOVED,
    Arg,
    Arguments,
    Array,
    Case,
    Want,
    Within,
    blank,
    integers,
    normals,
    rounded,
    short,
)
from tests.conformance.kernels import moves as k

# (rows, cols) of a tile; the sizes that do not fit shared memory twice get one stage
TILES_16 = ((16, 16), (16, 256), (256, 16), (64, 64), (128, 128), (256, 256), (8, 8), (64, 24), (512, 32), (1, 128))
LARGEST = {1: (256, 256), 2: (256, 256), 4: (256, 128)}


def shapes(tile: tuple[int, int]) -> tuple[int, int]:
    """A tensor of a few tiles with tails in both dimensions."""
    return tile[0] * 2 - tile[0] // 2 + 1, tile[1] * 2 - tile[1] // 4 + 3


def size(dtype: torch.dtype) -> int:
    """Bytes of an element."""
    return int(torch.empty(0, dtype=dtype).element_size())


def tiles(dtype: torch.dtype) -> list[tuple[int, int]]:
    """The tiles that a dtype is tried with: all for bfloat16, three for the others."""
    if dtype == BF16:
        return list(TILES_16)
    return [(16, 16), (64, 64), LARGEST[size(dtype)]]


def stages(tile: tuple[int, int], dtype: torch.dtype) -> int:
    """Two if they fit."""
    return 2 if 2 * tile[0] * tile[1] * size(dtype) <= 220_000 else 1


# ------------------------------------------------------------------------------------------------------- copies
def _copied(name: str = "y", change: Callable[[Array], Array] = lambda x: x) -> Callable[..., list[dict[str, Want]]]:
    return lambda ranks: [{name: change(mine["x"].value)} for mine in ranks]


def _copy(
    name: str,
    kernel: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    change: Callable[[Array], Array] = lambda x: x,
    worlds: tuple[int, ...] = (1, 2),
    **constants: object,
) -> Case:
    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "y": blank(shape, dtype)}

    return Case(name, kernel, make, _copied("y", change), constants, worlds=worlds)  # type: ignore[arg-type]


def copies() -> list[Case]:
    """Within a rank, in tensors of one to four dimensions."""
    found = []
    for dtype in MOVED:
        d = short(dtype)
        widths = (64, 256) if dtype != BF16 else (8, 64, 256, 512)
        found += [_copy(f"copy_1d.{d}.{c}", k.copy_1d, (3 * c - 16,), dtype, C=c) for c in widths]
        for tile in tiles(dtype):
            label = f"copy_2d.{d}.{tile[0]}x{tile[1]}"
            found.append(_copy(label, k.copy_2d, shapes(tile), dtype, R=tile[0], C=tile[1], STAGES=stages(tile, dtype)))
        found.append(_copy(f"copy_3d.{d}", k.copy_3d, (3, 70, 90), dtype, R=32, C=64))
        found.append(_copy(f"copy_4d.{d}", k.copy_4d, (2, 3, 37, 50), dtype, lambda x: x[::-1].copy(), R=16, C=32))
        found.append(_copy(f"rows_1d.{d}", k.rows_1d, (5, 150), dtype, lambda x: x[::-1].copy(), C=64))
    found.append(_copy("copy_2d.deep", k.copy_2d, (100, 700), BF16, R=32, C=64, STAGES=5))
    found.append(_copy("copy_2d.one_stage", k.copy_2d, (100, 300), F32, R=32, C=32, STAGES=1))
    found.append(_copy("copy_2d.one_element", k.copy_2d, (1, 1), BF16, R=16, C=16))
    found += [_shifted(dtype, down) for dtype in (BF16, I32) for down in (-200, -5, 0, 3, 40)]
    return found


def _shifted(dtype: torch.dtype, down: int) -> Case:
    unit, shape = 16 // size(dtype), (45, 80)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, "shifted", rank), dtype), "y": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        results: list[dict[str, Want]] = []
        for mine in ranks:
            x, y = mine["x"].value, np.zeros_like(mine["x"].value)
            for i in range(shape[0]):
                if 0 <= i - down < shape[0]:
                    y[i, : shape[1] - unit] = x[i - down, unit:]
            results.append({"y": y})
        return results

    return Case(f"shifted.{short(dtype)}.{down}", k.shifted, make, meaning, {"UNIT": unit}, {"down": down}, worlds=(1,))


# -------------------------------------------------------------------------------------------------------- peers
def _targets(to: str, rank: int, world: int) -> set[int]:
    near = {(rank + 1 + i) % world for i in range(min(2, world))}
    return {
        "all": set(range(world)),
        "me": {rank},
        "right": {(rank + 1) % world},
        "near": near,
        "mirror": {world - 1 - rank},
    }[to]


def _push(name: str, kernel: object, shape: tuple[int, ...], dtype: torch.dtype, to: str, **constants: object) -> Case:
    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "out": blank((world, *shape), dtype, parallel=True)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        outs = [mine["out"].value.copy() for mine in ranks]
        for rank, mine in enumerate(ranks):
            for target in _targets(to, rank, len(ranks)):
                outs[target][rank] = mine["x"].value
        return [{"out": out} for out in outs]

    return Case(name, kernel, make, meaning, {**constants, "TO": to})  # type: ignore[arg-type]


def pushes() -> list[Case]:
    """To this rank's copy, to one rank's, to some, to the whole ``Parallel``."""
    found = []
    for dtype in MOVED:
        d = short(dtype)
        found += [
            *[_push(f"push_1d.{d}.{to}", k.push_1d, (300,), dtype, to, C=128) for to in ("all", "right")],
            *[_push(f"push_2d.{d}.{to}", k.push_2d, (70, 90), dtype, to, R=32, C=64) for to in ("all", "me", "near")],
            *[_push(f"push_3d.{d}.{to}", k.push_3d, (2, 37, 50), dtype, to, R=16, C=32) for to in ("all", "mirror")],
        ]
    few = ("push_2d.float8", "push_2d.int32", "push_2d.float16", "push_2d.float32")  # in every world with "all"
    found = [
        dataclasses.replace(case, worlds=(1, 3))
        if case.name.startswith(few) and not case.name.endswith("all")
        else case
        for case in found
    ]
    for tile in ((16, 16), (256, 64), (128, 256), (256, 256)):
        label = f"push_2d.bfloat16.all.{tile[0]}x{tile[1]}"
        big = _push(label, k.push_2d, (260, 270), BF16, "all", R=tile[0], C=tile[1], STAGES=stages(tile, BF16))
        found.append(dataclasses.replace(big, worlds=(2,)))
    return found


def _pull(name: str, kernel: object, shape: tuple[int, ...], dtype: torch.dtype, **constants: object) -> Case:
    every = len(shape) == 2

    def make(rank: int, world: int) -> Arguments:
        out = (world, *shape) if every else shape
        return {"x": Arg(normals(shape, dtype, name, rank), dtype, parallel=True), "out": blank(out, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        whole = np.stack([mine["x"].value for mine in ranks])
        return [{"out": whole if every else whole[(rank + 1) % len(ranks)]} for rank in range(len(ranks))]

    return Case(name, kernel, make, meaning, constants)  # type: ignore[arg-type]


def pulls() -> list[Case]:
    """``load_async`` from a peer."""
    found = []
    for dtype in MOVED:
        found.append(_pull(f"pull_1d.{short(dtype)}", k.pull_1d, (300,), dtype, C=64))
        found.append(_pull(f"pull_2d.{short(dtype)}", k.pull_2d, (70, 90), dtype, R=32, C=64))
    return found


def _neighbour(dtype: torch.dtype) -> Case:
    shape, name = (150, 200), f"neighbour_sum.{short(dtype)}"

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(integers(shape, -8, 8, name, rank), dtype), "out": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": m["x"].value + ranks[rank - 1]["x"].value} for rank, m in enumerate(ranks)]

    return Case(name, k.neighbour_sum, make, meaning)


def loads_of_storers() -> list[Case]:
    """``load_async`` by the role that stores and signals."""
    return [_neighbour(dtype) for dtype in (BF16, F32)]


# --------------------------------------------------------------------------------------------------------- adds
def _unit(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) / 2


def _sum(start: Array, terms: list[Array], dtype: torch.dtype, whole: bool) -> Want:
    """``start`` and all terms, in any order, rounded after each; exact if they are small whole numbers."""
    total = start.astype(np.float64) + sum(t.astype(np.float64) for t in terms)
    if whole:
        return rounded(total, dtype)
    size = np.abs(start).astype(np.float64) + sum(np.abs(t).astype(np.float64) for t in terms)
    return Within(total, size * _unit(dtype) * (len(terms) + 1))


def _numbers(whole: bool, shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> Array:
    return integers(shape, -8, 8, *key) if whole else normals(shape, dtype, *key)


def _add(name: str, shape: tuple[int, ...], dtype: torch.dtype, to: str, whole: bool, **constants: object) -> Case:
    def make(rank: int, world: int) -> Arguments:
        x, start = _numbers(whole, shape, dtype, name, rank), _numbers(whole, shape, dtype, name, "start", rank)
        return {"x": Arg(x, dtype), "out": Arg(start, dtype, parallel=True)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        terms = [mine["x"].value for mine in ranks]
        return [
            {"out": _sum(mine["out"].value, terms, dtype, whole)} if to == "all" or rank == 0 else {}
            for rank, mine in enumerate(ranks)
        ]

    return Case(name, k.add_2d, make, meaning, {**constants, "TO": to})


def _add_3d(dtype: torch.dtype) -> Case:
    name, (rows, cols), depth = f"add_3d.{short(dtype)}", (37, 50), 3

    def make(rank: int, world: int) -> Arguments:
        return {
            "x": Arg(integers((world, rows, cols), -8, 8, name, rank), dtype),
            "out": Arg(integers((depth, rows, cols), -8, 8, name, "start", rank), dtype, parallel=True),
        }

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [
            {"out": _sum(mine["out"].value, [r["x"].value[me] for r in ranks], dtype, whole=True)}
            for me, mine in enumerate(ranks)
        ]

    return Case(name, k.add_3d, make, meaning, {"R": 16, "C": 32})


def _add_local(name: str, kernel: object, shape: tuple[int, ...], dtype: torch.dtype, times: int, **tile: int) -> Case:
    def make(rank: int, world: int) -> Arguments:
        x, y = integers(shape, -8, 8, name, rank), integers(shape, -8, 8, name, "start", rank)
        return {"x": Arg(x, dtype), "y": Arg(y, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": m["y"].value + times * m["x"].value} for m in ranks]

    return Case(name, kernel, make, meaning, dict(tile), worlds=(1, 2))  # type: ignore[arg-type]


def adds() -> list[Case]:
    """Whole numbers, whose sums are exact in any order, and normal ones, within a rounding for each term."""
    found = []
    for dtype in ADDED:
        d = short(dtype)
        found.append(_add_local(f"add_1d.{d}", k.add_1d, (300,), dtype, 2, C=128))
        for to in ("all", "zero"):
            for whole in (True, False):
                kind = "whole" if whole else "normal"
                found.append(_add(f"add_2d.{d}.{to}.{kind}", (70, 90), dtype, to, whole, R=32, C=64))
        found.append(_add_3d(dtype))
        found.append(_add_local(f"add_4d.{d}", k.add_4d, (2, 2, 20, 40), dtype, 1, R=16, C=32))
    for tile in ((16, 16), (256, 128)):
        label = f"add_2d.bfloat16.{tile[0]}x{tile[1]}"
        big = _add(label, (tile[0] + 4, tile[1] + 12), BF16, "all", True, R=tile[0], C=tile[1])
        found.append(dataclasses.replace(big, worlds=(1, 3)))
    return found


CASES = [*copies(), *pushes(), *pulls(), *loads_of_storers(), *adds()]
