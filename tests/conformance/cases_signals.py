"""Cases of signal, signal_all, wait and barrier, from every role, and of scratch and communicators."""

from __future__ import annotations

import numpy as np
import torch

from tests.conformance.case import (
    ADDED,
    BF16,
    E4M3,
    F16,
    F32,
    MOVED,
    Arg,
    Arguments,
    Case,
    Want,
    blank,
    integers,
    normals,
    rounded,
    short,
)
from tests.conformance.kernels import signals as k


def _relay(dtype: torch.dtype, where: str) -> Case:
    name, shape = f"relay.{short(dtype)}.{where}", (70, 160)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "out": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": ranks[me - 1]["x"].value} for me in range(len(ranks))]

    return Case(name, k.relay, make, meaning, {"WAIT": where})


def _credits(dtype: torch.dtype, steps: int) -> Case:
    name, shape = f"credits.{short(dtype)}.{steps}", (steps, 64, 32)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "out": blank(shape, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": ranks[me - 1]["x"].value * 2} for me in range(len(ranks))]

    return Case(name, k.credits, make, meaning)


def _meet(role: str, how: str, dtype: torch.dtype = BF16) -> Case:
    name, shape = f"meet.{short(dtype)}.{role}.{how}", (40, 80)

    def make(rank: int, world: int) -> Arguments:
        whole = (world, *shape)
        return {"x": Arg(normals(whole, dtype, name, rank), dtype), "out": blank(whole, dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": np.stack([theirs["x"].value[me] for theirs in ranks])} for me in range(len(ranks))]

    return Case(name, k.meet, make, meaning, {"ROLE": role, "HOW": how})


def _gather(dtype: torch.dtype, sms: int) -> Case:
    name, shape = f"gather.{short(dtype)}.{sms}", (70, 96)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "out": blank((world, *shape), dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": np.stack([theirs["x"].value for theirs in ranks])}] * len(ranks)

    return Case(name, k.gather, make, meaning, {"SMS": sms})


def _gather_by_warps(dtype: torch.dtype) -> Case:
    name, shape = f"gather_by_warps.{short(dtype)}", (70, 96)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(normals(shape, dtype, name, rank), dtype), "out": blank((world, *shape), dtype)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": np.stack([theirs["x"].value for theirs in ranks])}] * len(ranks)

    return Case(name, k.gather_by_warps, make, meaning)


def _first_then_add(dtype: torch.dtype) -> Case:
    name, shape = f"first_then_add.{short(dtype)}", (70, 90)

    def make(rank: int, world: int) -> Arguments:
        x = integers((world, *shape), -8, 8, name, rank)
        return {"x": Arg(x, dtype), "out": blank(shape, dtype, parallel=True)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"out": rounded(sum(t["x"].value[me] for t in ranks), dtype)} for me in range(len(ranks))]

    return Case(name, k.first_then_add, make, meaning)


CASES = [
    *[_relay(dtype, "loader") for dtype in MOVED],
    _relay(BF16, "shared"),
    *[_credits(dtype, 7) for dtype in (BF16, F16, F32)],
    _credits(BF16, 1),
    *[_meet(role, how) for role in ("storer", "consumer", "team") for how in ("barrier", "signal_all", "signal")],
    *[_gather(dtype, 2) for dtype in MOVED],
    _gather(BF16, 100),
    *[_gather_by_warps(dtype) for dtype in (BF16, E4M3, F32)],
    *[_first_then_add(dtype) for dtype in ADDED],
]
