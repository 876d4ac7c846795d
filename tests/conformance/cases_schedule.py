"""Cases of scheduling options, ``while``, choices between tensors, several communicators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests import schedule_kernels as shared
from tests.conformance.case import (
    BF16,
    F32,
    I32,
    WORLDS,
    Arg,
    Arguments,
    Array,
    Case,
    Want,
    blank,
    integers,
    normals,
    untouched,
)
from tests.conformance.kernels import schedule as k


def _multiply(name: str, **options: object) -> Case:
    m, n, depth = 330, 150, 133

    def make(rank: int, world: int) -> Arguments:
        a, b = Arg(integers((m, depth), -3, 3, "a"), BF16), Arg(integers((depth, n), -3, 3, "b"), BF16)
        return {"a": a, "b": b, "c": blank((m, n), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"c": m["a"].value @ m["b"].value} for m in ranks]

    return Case(f"scheduled.{name}", k.multiply, make, meaning, dict(options), worlds=(1, 2))


def _steps(x: int) -> int:
    steps = 0
    while x > 1:
        x, steps = (x // 2 if x % 2 == 0 else 3 * x + 1), steps + 1
    return steps


def _collatz(where: str) -> Case:
    x = np.asarray([0, 1, 2, 3, 7, 27, 6, 97], np.int32)

    def make(rank: int, world: int) -> Arguments:
        return {"x": Arg(x, I32), "y": blank(x.shape, I32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": np.asarray([_steps(int(v)) for v in x], np.int32)}] * len(ranks)

    return Case(f"collatz.{where}", k.collatz, make, meaning, {"WHERE": where}, worlds=(1,))


SHAPE = (150, 96)


def _shared(
    name: str, kernel: object, dynamic: bool, outs: Callable[[int], dict[str, tuple[tuple[int, ...], bool]]],
    value: Callable[[list[Array], int], dict[str, Want]], lead: bool = False, second: bool = False,
    worlds: tuple[int, ...] = WORLDS,
) -> Case:  # fmt: skip
    """A kernel of ``tests/schedule_kernels.py``; ``outs``: shapes of its outputs, and whether they are symmetric."""

    def make(rank: int, world: int) -> Arguments:
        x = normals((1, *SHAPE) if lead else SHAPE, BF16, name, rank)
        args = {"a": Arg(x, BF16), "b": Arg(-x, BF16)} if second else {"x": Arg(x, BF16)}
        return args | {n: blank(shape, BF16, parallel) for n, (shape, parallel) in outs(world).items()}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        xs = [next(iter(m.values())).value.reshape(SHAPE) for m in ranks]
        return [value(xs, me) for me in range(len(ranks))]

    label = f"{name}.dynamic" if dynamic else name
    return Case(label, kernel, make, meaning, {"DYNAMIC": dynamic}, worlds=worlds)  # type: ignore[arg-type]


def _doubled(x: Array) -> Array:
    y = untouched((6, *SHAPE), BF16)
    y[[0, 1, 2, 4]] = x
    return y


def _kernels(dynamic: bool) -> list[Case]:
    return [
        _shared("copy_halves", shared.copy_halves, dynamic, lambda w: {"out": ((2, *SHAPE), False)},
                lambda xs, me: {"out": np.stack([xs[me], -xs[me]])}, second=True, worlds=(1, 2)),
        _shared("ring_gather", shared.ring_gather, dynamic, lambda w: {"out": ((w, *SHAPE), False)},
                lambda xs, me: {"out": np.stack(xs)}, lead=True),
        _shared("doubling", shared.doubling, dynamic, lambda w: {"out": ((6, *SHAPE), False)},
                lambda xs, me: {"out": _doubled(xs[me])}, worlds=(1, 2)),
        _shared("two_communicators", shared.two_communicators, dynamic,
                lambda w: {"out": ((w, *SHAPE), True), "twice": ((w, *SHAPE), True), "mine": (SHAPE, False)},
                lambda xs, me: {"out": np.stack(xs), "twice": np.stack(xs), "mine": xs[me]}),
    ]  # fmt: skip


CASES = [
    _multiply("plain"),
    _multiply("dynamic", DYNAMIC=True),
    _multiply("cluster", CLUSTER=2),
    _multiply("pingpong", G=2, PINGPONG=True),
    _multiply("stagger", BM=128, G=2, STAGGER=True),
    _multiply("dynamic_pingpong", G=2, PINGPONG=True, DYNAMIC=True),
    *[_collatz(where) for where in ("storer", "shared", "team", "consumer")],
    *_kernels(False),
    *_kernels(True),
]
