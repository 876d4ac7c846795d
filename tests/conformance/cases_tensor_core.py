"""Cases of the other forms of ``mma``: whole numbers, exact in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from tests.conformance.case import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
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
from tests.conformance.kernels import tensor_core as k


def _case(
    name: str, kernel: object, shapes: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], value: Callable[[Array, Array], Array], **constants: int,
) -> Case:  # fmt: skip
    a, b, c = dtypes

    def make(rank: int, world: int) -> Arguments:
        x, y = integers(shapes[0], -3, 3, name, "a"), integers(shapes[1], -3, 3, name, "b")
        return {"a": Arg(x, a), "b": Arg(y, b), "c": blank(shapes[2], c)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [
            {"c": value(m["a"].value.astype(np.float64), m["b"].value.astype(np.float64)).astype(np.float32)}
            for m in ranks
        ]

    return Case(name, kernel, make, meaning, dict(constants), worlds=(1,))  # type: ignore[arg-type]


def _nt(a: torch.dtype, b: torch.dtype, tile: tuple[int, int, int], groups: int = 1) -> Case:
    bm, bn, bk = tile
    shapes = (bm + 9, 2 * bk + 5), (bn + 4, 2 * bk + 5), (bm + 9, bn + 4)
    name = f"multiply_nt.{short(a)}.{short(b)}.{bm}x{bn}x{bk}.{groups}"
    return _case(name, k.multiply_nt, shapes, (a, b, F32), lambda x, y: x @ y.T, BM=bm, BN=bn, BK=bk, G=groups)


def _tf32() -> Case:
    """Normal numbers: float32 operands lose all but ten bits of their mantissas."""
    shape, name = (72, 75), "multiply_nt.float32.normal"

    def make(rank: int, world: int) -> Arguments:
        a, b = (Arg(normals(shape, F32, name, which), F32) for which in "ab")
        return {"a": a, "b": b, "c": blank((72, 72), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            a, b = mine["a"].value.astype(np.float64), mine["b"].value.astype(np.float64)
            found.append({"c": Within(a @ b.T, np.abs(a) @ np.abs(b).T * 2.0**-9)})
        return found

    return Case(name, k.multiply_nt, make, meaning, worlds=(1,))


def _overwritten(x: Array, y: Array) -> Array:
    steps = [np.maximum(x[:, i : i + 64] @ y[i : i + 64], 0) for i in range(0, x.shape[1], 64)]
    return sum(steps)


def _private(x: Array, y: Array) -> Array:
    return (x @ y + x) @ y


def _transposed(dtype: torch.dtype, tile: tuple[int, int], loads: bool) -> Case:
    name = f"transposed.{'load' if loads else 'store'}.{short(dtype)}.{tile[0]}x{tile[1]}"
    shape = (tile[0] + 8, tile[1] + 9)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name), dtype), "y": blank(shape[::-1], dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": m["x"].value.T} for m in ranks]

    return Case(name, k.transposed, make, meaning, {"R": tile[0], "C": tile[1], "LOADS": loads}, worlds=(1,))


def _ones(x: Array, y: Array) -> Array:
    padded = np.pad(2 * x + 1, ((0, 0), (0, -x.shape[1] % 64)), constant_values=1)
    return padded[:, : len(y)] @ y


def _cases() -> list[Case]:
    found = [_nt(a, b, (64, 64, 64)) for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    found += [
        _nt(F32, F32, (64, 64, 32)),
        _nt(E4M3, E4M3, (128, 128, 128), 2),
        _nt(F32, F32, (128, 64, 64), 2),
        _tf32(),
    ]
    for dtype in (BF16, F16):
        d, same = short(dtype), (dtype, dtype, F32)
        for m, groups in ((64, 1), (128, 2)):
            shapes = (m + 9, 133), (133, 70), (m + 9, 70)
            found.append(_case(f"from_registers.{d}.{groups}", k.from_registers, shapes, same, _ones, BM=m, G=groups))
        found.append(_case(f"overwrite.{d}", k.overwrite, ((70, 150), (150, 70), (70, 70)), same, _overwritten))
    # The inner result must be exact in the narrow type: products of numbers up to 3 over 64 terms need more bits.
    found.append(_case("private.float32_out", k.private, ((150, 64), (64, 64), (150, 64)), (F16, F16, F32), _private))
    found.append(_case("private.two", k.private, ((150, 64), (64, 64), (150, 64)), (F16, F16, F32), _private, G=2))
    for dtype, tile in itertools.product(
        (BF16, F16, F32), ((64, 64), (64, 128), (128, 32), (64, 8), (64, 24), (16, 32))
    ):
        found.append(_transposed(dtype, tile, False))
        if tile[1] % 64 == 0 or tile[0] == 16:
            found.append(_transposed(dtype, tile, True))
    found += [_transposed(dtype, (c, r), True) for dtype in (BF16, F32) for r, c in ((64, 8), (64, 24), (128, 32))]
    return found


CASES = _cases()
