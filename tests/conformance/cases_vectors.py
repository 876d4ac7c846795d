"""Cases of gather_async, scatter_async, vector loads, stores, signals and waits, and fetch_add."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.conformance.case import BF16, F32, I32, MOVED, Arg, Arguments, Case, Want, blank, generator, normals, short
from tests.conformance.kernels import vectors as k


def places(n: int, rank: int, world: int, *key: object) -> Any:
    """Where each of ``rank``'s n elements goes: a piece of one permutation of all world * n places."""
    return generator("places", n, world, *key).permutation(world * n)[rank * n : (rank + 1) * n].astype(np.int32)


def _rows(dtype: torch.dtype, n: int, cols: int, r: int, c: int) -> Case:
    name = f"rows.{short(dtype)}.{n}x{cols}.{r}x{c}"

    def make(rank: int, world: int) -> Arguments:
        of = generator("of", name, rank).integers(-2, n + 2, n).astype(np.int32)  # some do not exist
        return {
            "x": Arg(normals((n, cols), dtype, name, rank), dtype), "of": Arg(of, I32),
            "to": Arg(places(n, rank, world, name), I32), "out": blank((n, cols), dtype, parallel=True),
        }  # fmt: skip

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        world = len(ranks)
        outs = [np.zeros_like(r["x"].value) for r in ranks]
        for mine in ranks:
            for of, to in zip(mine["of"].value, mine["to"].value, strict=True):
                if 0 <= of < n:
                    outs[to % world][to // world] = mine["x"].value[of]
        return [{"out": out} for out in outs]

    return Case(name, k.rows, make, meaning, {"R": r, "C": c})


def _pull(dtype: torch.dtype, n: int, cols: int) -> Case:
    name = f"pull.{short(dtype)}.{n}x{cols}"

    def make(rank: int, world: int) -> Arguments:
        of = generator("of", name, rank).integers(0, world * n, n).astype(np.int32)
        x = Arg(normals((n, cols), dtype, name, rank), dtype, parallel=True)
        return {"x": x, "of": Arg(of, I32), "out": blank((n, cols), dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        whole = np.stack([r["x"].value for r in ranks], axis=1).reshape(-1, cols)  # row * world + rank
        return [{"out": whole[r["of"].value]} for r in ranks]

    return Case(name, k.pull, make, meaning)


def _elements(role: str, n: int, r: int) -> Case:
    name = f"elements.{role}.{n}.{r}"

    def make(rank: int, world: int) -> Arguments:
        return {
            "at": Arg(places(n, rank, world, name), I32),
            "out": blank((n,), I32, parallel=True),
            "seen": blank((n,), I32),
        }

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        world = len(ranks)
        outs = [np.zeros(n, np.int32) for _ in ranks]
        for rank, mine in enumerate(ranks):
            for i, to in enumerate(mine["at"].value):
                outs[to % world][to // world] = rank * n + i + 1000 * (i // r)
        return [{"out": out, "seen": 2 * out} for out in outs]

    return Case(name, k.elements, make, meaning, {"R": r, "ROLE": role})


def _listen(where: str, dtype: torch.dtype, n: int, r: int) -> Case:
    name = f"listen.{where}.{short(dtype)}.{n}.{r}"

    def make(rank: int, world: int) -> Arguments:
        at = generator("at", name, rank).integers(0, n - 1, n).astype(np.int32)
        return {"x": Arg(normals((n, 64), dtype, name, rank), dtype), "at": Arg(at, I32), "out": blank((n, 64), dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        odd = np.arange(n) % 2
        return [{"out": ranks[me]["x"].value[ranks[me - 1]["at"].value + odd]} for me in range(len(ranks))]

    return Case(name, k.listen, make, meaning, {"R": r, "WHERE": where})


CASES = [
    *[_rows(dtype, 70, 80, 32, 64) for dtype in MOVED],
    _rows(BF16, 45, 137, 128, 32),  # a ragged edge: 274 bytes a row
    _rows(F32, 33, 21, 5, 8),
    _pull(BF16, 70, 80),
    *[_elements(role, 70, 32) for role in ("storer", "consumer", "team")],
    _elements("storer", 130, 128),
    _elements("storer", 9, 7),
    *[_listen(where, BF16, 70, 32) for where in ("loader", "shared")],
    _listen("shared", F32, 41, 40),
]
