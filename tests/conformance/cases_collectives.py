"""Cases of ``reduce`` and ``all_reduce``: float32 sums in rank order are exact by definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from tests.conformance.case import ADDED, BF16, F32, Arg, Arguments, Array, Case, Want, blank, normals, short
from tests.conformance.kernels import collectives as k

OPS: dict[str, Callable[[Array, Array], Array]] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


def combined(xs: list[Array], op: str) -> Array:
    """All ranks' arrays in rank order, in float32."""
    total = xs[0].astype(np.float32)
    for x in xs[1:]:
        total = OPS[op](total, x.astype(np.float32))
    return total


def _case(
    name: str, kernel: object, shape: Callable[[int], tuple[int, ...]], dtype: torch.dtype, op: str,
    result: Callable[[Array, int], Array] | None, out: str = "global", **constants: object,
) -> Case:  # fmt: skip
    """``result``: from the combination of all ranks to what rank ``me`` gets in out; None: in place, everybody."""

    def make(rank: int, world: int) -> Arguments:
        x = normals(shape(world), dtype, name, rank)
        args = {"x": Arg(x, dtype, parallel=True)}
        if result is not None:
            args["out"] = blank(result(x, rank).shape, dtype, out == "parallel")
        return args

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        total = combined([mine["x"].value for mine in ranks], op)
        return [{"x": total} if result is None else {"out": result(total, me)} for me in range(len(ranks))]

    return Case(name, kernel, make, meaning, constants)  # type: ignore[arg-type]


def _cases() -> list[Case]:
    found = []
    for dtype in ADDED:
        d = short(dtype)
        for op in OPS:
            label = f"{d}.{op}"
            flat = lambda world: (43, 150)  # noqa: E731
            found.append(_case(f"reduce_2d.{label}", k.reduce_2d, flat, dtype, op, lambda x, me: x, OP=op))
            found.append(_case(f"all_reduce_2d.{label}", k.all_reduce_2d, flat, dtype, op, None, OP=op))
        found.append(_case(f"reduce_1d.{d}", k.reduce_1d, lambda world: (1000,), dtype, "sum", lambda x, me: x))
        found.append(_case(f"all_reduce_1d.{d}", k.all_reduce_1d, lambda world: (1000,), dtype, "sum", None))
        found.append(
            _case(f"reduce_scatter.{d}", k.reduce_scatter, lambda w: (w, 20, 70), dtype, "sum", lambda x, me: x[me])
        )
        found.append(
            _case(
                f"reduce_to_peer.{d}",
                k.reduce_to_peer,
                lambda w: (2, 2, 20, 70),
                dtype,
                "max",
                lambda x, me: x,
                "parallel",
            )
        )
        found.append(_case(f"all_reduce_3d.{d}", k.all_reduce_3d, lambda w: (5, 20, 70), dtype, "min", None))
    found.append(_case("all_reduce_4d", k.all_reduce_4d, lambda w: (3, 2, 5, 70), BF16, "sum", None))
    for r, c in ((16, 16), (1, 2048), (64, 64), (128, 128), (256, 256)):
        shape = lambda world, r=r, c=c: (r + 3, c + 9)  # noqa: E731
        tiles = [
            _case(f"reduce_2d.tile.{r}x{c}", k.reduce_2d, shape, BF16, "sum", lambda x, me: x, R=r, C=c),
            _case(f"all_reduce_2d.tile.{r}x{c}", k.all_reduce_2d, shape, BF16, "sum", None, R=r, C=c),
        ]
        found += [dataclasses.replace(case, worlds=(1, 2, 3)) for case in tiles]
    found.append(
        _case("all_reduce_2d.consumer", k.all_reduce_2d, lambda world: (43, 150), F32, "sum", None, CONSUMER=True)
    )
    return found


CASES = _cases()
