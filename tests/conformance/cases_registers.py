"""Cases of what a consumer does: conversions, arithmetic, columns, loops over tiles, mma."""

from __future__ import annotations

import numpy as np
import torch

from tests.conformance.case import (
    BF16,
    E4M3,
    E5M2,
    F16,
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
    limits,
    normals,
    rounded,
    short,
)
from tests.conformance.kernels import registers as k

ALONE = (1,)


# -------------------------------------------------------------------------------------------------- conversions
def _difficult(shape: tuple[int, int], source: torch.dtype, target: torch.dtype) -> Array:
    """Normal numbers, with ties, subnormals, values near and beyond the limits of ``target``, infinities and NaN."""
    x = normals(shape, source, "difficult", source, target).copy()
    if I32 in (source, target):
        return integers(shape, -2000, 2000, "difficult") if source == I32 else rounded(x * 300, source)
    tiny, top = float(torch.finfo(target).tiny), limits(target)
    unit = float(torch.finfo(target).eps)
    special = [
        0.0, -0.0, 1 + unit / 2, 1 + 1.5 * unit, -1 - unit / 2, 1 + unit * 0.50001, tiny, tiny / 2, tiny * 0.75,
        tiny * unit, tiny * unit / 2, tiny * unit * 0.500001, -tiny / 8, top, -top, top * (1 + unit / 4),
        top * (1 + unit / 2), top * (1 + unit), -top * 2, np.inf, -np.inf, np.nan, 1e-45, 1e-38, 3e38,
    ]  # fmt: skip
    with np.errstate(over="ignore"):
        x[3, : len(special)] = rounded(np.asarray(special, np.float64).astype(np.float32), source)
    return x


def _convert(
    source: torch.dtype, target: torch.dtype, cast: bool, tile: tuple[int, int] = (64, 64), groups: int = 1
) -> Case:
    shape = (tile[0] + 13, 100)
    name = f"convert.{short(source)}.{short(target)}.{'cast' if cast else 'store'}.{tile[0]}x{tile[1]}.{groups}"

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(_difficult(shape, source, target), source), "y": blank(shape, target)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": np.trunc(m["x"].value) if target == I32 else m["x"].value} for m in ranks]

    constants = {"R": tile[0], "C": tile[1], "G": groups, "CAST": cast}
    return Case(name, k.convert, make, meaning, constants, worlds=ALONE)


def conversions() -> list[Case]:
    """float32 to everything, everything to float32, and some pairs of narrow types."""
    found = [_convert(F32, target, cast) for target in MOVED for cast in (True, False) if cast or target != I32]
    found += [_convert(source, F32, cast) for source in MOVED for cast in (True, False) if cast or source != I32]
    found += [_convert(BF16, F16, False), _convert(F16, E4M3, True), _convert(E5M2, BF16, True)]
    found += [_convert(d, d, False) for d in (BF16, F16, E4M3, E5M2, I32)]
    found += [_convert(BF16, BF16, False, tile, g) for tile, g in (((128, 128), 2), ((192, 64), 3), ((256, 32), 2))]
    return [c for i, c in enumerate(found) if c.name not in {d.name for d in found[:i]}]


# --------------------------------------------------------------------------------------------------- arithmetic
SCALE, SHIFT = 0.3712, -3


def _zeros(least: Array, a: Array, b: Array) -> Array:
    """Of two zeros, one of them negative, the negative one is the least; NumPy returns either."""
    mixed = (a == 0) & (b == 0) & (np.signbit(a) | np.signbit(b))
    return np.where(mixed, np.float32(-0.0), least)


def _arithmetic(x: Array, y: Array) -> Array:
    """What ``k.arithmetic`` stores: every operation rounded to float32, in the order written."""
    a, b, f = x.astype(np.float32), y.astype(np.float32), np.float32
    with np.errstate(all="ignore"):
        return np.stack([
            a + b, a - b, a * b, a / b,
            _zeros(np.minimum(a, b), a, b), -_zeros(np.minimum(-a, -b), -a, -b), -a, np.abs(a),
            a + f(2.5), f(1) - a, a * f(SCALE), f(3) / b, np.minimum(a, f(SCALE)), np.maximum(a, f(0.25)),
            f(0.5) * a, f(0) - b, a + f(SHIFT), (a + b) * a - b, a * b + b, a / (np.abs(b) + f(1)) - f(SCALE) * a,
        ])  # fmt: skip


def _arith(dtype: torch.dtype, special: bool, tile: tuple[int, int] = (64, 16), groups: int = 1) -> Case:
    shape = (tile[0] + 9, tile[1] + 7)
    name = f"arithmetic.{short(dtype)}.{tile[0]}x{tile[1]}.{groups}" + ".special" * special

    def numbers(which: str) -> Array:
        x = normals(shape, dtype, name, which).copy()
        if special:  # every pair of these meets
            values = np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -2.0, 3.5], np.float32)
            x[:8, :8] = values[:, None] if which == "x" else values[None, :]
        return x

    def make(rank: int, world: int) -> Arguments:
        out = blank((k.ARITHMETIC, *shape), F32)
        return {"x": Arg(numbers("x"), dtype), "y": Arg(numbers("y"), dtype), "out": out}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": _arithmetic(m["x"].value, m["y"].value)} for m in ranks]

    constants = {"R": tile[0], "C": tile[1], "G": groups}
    scalars: dict[str, int | float] = {"scale": SCALE, "shift": SHIFT}
    return Case(name, k.arithmetic, make, meaning, constants, scalars, worlds=ALONE)


def _loop_state(depth: int) -> Case:
    def make(rank: int, world: int) -> Arguments:
        x = normals((depth, 100, 40), F32, "loop", depth)
        return {"x": Arg(x, F32), "out": blank((2, 100, 40), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            x = mine["x"].value
            a, b = np.zeros((100, 40), np.float32), np.ones((100, 40), np.float32)
            for i in range(depth):
                a, b = b, a + x[i]
                if i % 3 == 2:
                    a = np.maximum(a, b)
                else:
                    b = b * np.float32(0.5)
            found.append({"out": np.stack([a, b])})
        return found

    return Case(f"loop_state.{depth}", k.loop_state, make, meaning, worlds=ALONE)


def _pieces(dtype: torch.dtype, tile: tuple[int, int], width: int) -> Case:
    shape = (tile[0] * 2, tile[1] * 2)
    name = f"pieces.{short(dtype)}.{tile[0]}x{tile[1]}.{width}"

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name), dtype), "y": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        split = (shape[0], 2, tile[1] // width, width)
        return [{"y": m["x"].value.reshape(split)[:, :, ::-1].reshape(shape)} for m in ranks]

    return Case(name, k.pieces, make, meaning, {"R": tile[0], "C": tile[1], "P": width}, worlds=ALONE)


def computations() -> list[Case]:
    """Arithmetic, columns, loop state."""
    found = [_arith(d, False) for d in (F32, BF16, F16, E4M3, E5M2)]
    found += [_arith(F32, True), _arith(F32, False, (128, 32), 2), _arith(F32, False, (192, 16), 3)]
    found += [_loop_state(depth) for depth in (0, 1, 7)]
    found += [_pieces(dtype, (16, 512), 256) for dtype in (F32, BF16, F16, I32, E4M3, E5M2)]
    return found


# ---------------------------------------------------------------------------------------------------------- mma
def _multiply(
    dtype: torch.dtype, tile: tuple[int, int, int], groups: int = 1, ta: bool = False, tb: bool = False,
    whole: bool = True, sizes: tuple[int, int, int] | None = None, out: torch.dtype = F32, piece: int = 0,
) -> Case:  # fmt: skip
    bm, bn, bk = tile
    m, n, depth = sizes or (bm + bm // 2 + 1, bn + 8, 2 * bk + bk // 2 + 1)
    name = f"multiply.{short(dtype)}.{bm}x{bn}x{bk}.{groups}{'.at' * ta}{'.bt' * tb}"
    name += f"{'' if whole else '.normal'}.{m}x{n}x{depth}.{short(out)}{f'.{piece}' if piece else ''}"

    def numbers(shape: tuple[int, int], which: str) -> Array:
        return integers(shape, -3, 3, name, which) if whole else normals(shape, dtype, name, which)

    def make(rank: int, world: int) -> Arguments:
        a = numbers((depth, m) if ta else (m, depth), "a")
        b = numbers((n, depth) if tb else (depth, n), "b")
        return {"a": Arg(a, dtype), "b": Arg(b, dtype), "c": blank((m, n), out)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for mine in ranks:
            a, b = mine["a"].value.astype(np.float64), mine["b"].value.astype(np.float64)
            a, b = (a.T if ta else a), (b.T if tb else b)
            product, size = a @ b, np.abs(a) @ np.abs(b)
            # float32 sums in any order, then one rounding to the output's dtype.  The tensor core keeps fewer bits of
            # what it adds than float32 has: 2**-21 a term covers it.
            slack = size * depth * 2.0**-21 + np.abs(product) * float(torch.finfo(out).eps)
            found.append({"c": product.astype(np.float32) if whole else Within(product, slack)})
        return found

    constants = {"BM": bm, "BN": bn, "BK": bk, "G": groups, "TA": ta, "TB": tb, "P": piece}
    return Case(name, k.multiply, make, meaning, constants, worlds=ALONE)


def multiplications() -> list[Case]:
    """Whole numbers, exact in any order; normal ones within a bound; every transposition, many tiles."""
    found = []
    for dtype in (BF16, F16):
        found += [_multiply(dtype, (64, 64, 64), ta=ta, tb=tb) for ta in (False, True) for tb in (False, True)]
        found += [_multiply(dtype, (128, 128, 64), 2, whole=False, out=dtype)]
    for tile, groups in (
        ((64, 8, 16), 1), ((64, 256, 32), 1), ((128, 64, 16), 2), ((192, 64, 64), 3), ((128, 96, 128), 1),
        ((256, 64, 64), 2), ((64, 24, 48), 1), ((128, 256, 64), 2),
    ):  # fmt: skip
        # Rows of a shared operand are multiples of 32 bytes: few columns of b can only be had as rows of b.T.
        found.append(_multiply(BF16, tile, groups, tb=tile[1] % 16 != 0, piece=0 if tile[1] < 128 else 64))
    found.append(_multiply(BF16, (64, 32, 128), 1, ta=True, tb=True, whole=False))
    found.append(_multiply(F16, (64, 64, 32), 1, sizes=(1, 8, 1)))
    found.append(_multiply(BF16, (128, 128, 32), 2, ta=True, tb=False, out=BF16, piece=32))
    return found


CASES = [*conversions(), *computations(), *multiplications()]
