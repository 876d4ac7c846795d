"""Cases of scalars, loops, branches, helpers and task loops."""

from __future__ import annotations

import numpy as np

from tests.conformance.case import BF16, F32, Arg, Arguments, Case, Want, blank, normals
from tests.conformance.kernels import control as k


def _clamp(x: int, low: int, high: int = 7) -> int:
    return min(max(x, low), high)


def _scalars(i: int, j: int, f: float) -> Case:
    shape = (k.SCALARS, 64, 16)

    def make(rank: int, world: int) -> Arguments:
        return {"out": blank(shape, F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        found: list[dict[str, Want]] = []
        for me, world in ((r, len(ranks)) for r in range(len(ranks))):
            single = np.float32(f)
            values = [
                i + j, i - j, i * j, i // j, i % j, i // 3, i % -3, -i, abs(i), -(-i // 5),
                min(i, j, 2), max(i, j, 2), min(i, j), i // 2, i - i // 2, _clamp(i, 2), _clamp(j, 0, 3),
                (i < j) + (i <= j) + (i == j) * 4, (i > j) * 2 + (i >= j) + (i != j) * 8, me, world, (me + 1) % world,
                1 if i < 0 and j > 0 else 2, 1 if i < 0 or not j > 5 else 2, 3 * i + 1, 64, 16 * k.SCALARS,
                single * np.float32(2), single - np.float32(i), (i + 7) // j * j + i % j,
            ]  # fmt: skip
            found.append({"out": np.broadcast_to(np.asarray(values, np.float32)[:, None, None], shape)})
        return found

    return Case(f"scalars.{i}.{j}", k.scalars, make, meaning, scalars={"i": i, "j": j, "f": f}, worlds=(1, 3))


def _loops(n: int, constant: int) -> Case:
    def make(rank: int, world: int) -> Arguments:
        return {"out": blank((64, 16), F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        world, total = len(ranks), 0.0
        for x in range(n):
            for y in range(x, n + 1):
                total += x * 10 + y if (x + y) % 3 == 0 else -1 if y > x else 0.5
        total += 1 + 5 + 9 + 11 * n + sum((1 + step) % world * 1000 for step in range(2))
        total += constant if constant > 3 else 0
        return [{"out": np.full((64, 16), total, np.float32)}] * world

    return Case(f"loops.{n}.{constant}", k.loops, make, meaning, {"B": constant}, {"n": n}, worlds=(1, 2, 8))


def _visits(group: int, shape: tuple[int, int, int]) -> Case:
    def make(rank: int, world: int) -> Arguments:
        out = np.zeros(shape, np.float32)
        return {"ones": Arg(np.ones((16, 16), np.float32), F32), "out": Arg(out, F32)}

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        # The ranks 0, 1, ... of the second loop are taken modulo the world size, but every one is a task.
        out = np.ones(shape, np.float32)
        for m in range(0, -(-shape[1] // 16), 2):
            out[0, m * 16 : m * 16 + 16, :16] += shape[0]
        return [{"out": out}] * len(ranks)

    label = "x".join(map(str, shape))
    return Case(f"visits.{group}.{label}", k.visits, make, meaning, {"GROUP": group}, worlds=(1, 3))


def _optional(given: bool) -> Case:
    def make(rank: int, world: int) -> Arguments:
        shape = (70, 40)
        bias = {"bias": Arg(normals(shape, BF16, "bias"), BF16)} if given else {}
        return {"x": Arg(normals(shape, BF16, "optional"), BF16), "y": blank(shape, BF16)} | bias

    def meaning(ranks: list[Arguments]) -> list[dict[str, Want]]:
        return [{"y": m["x"].value + (m["bias"].value if given else 0)} for m in ranks]

    return Case(f"optional.{given}", k.optional, make, meaning, {} if given else {"bias": None}, worlds=(1,))


CASES = [
    *[
        _scalars(i, j, f)
        for i, j, f in ((7, 3, 0.1), (-7, 3, -2.5), (7, -3, 1e-3), (-9, -4, 3.0), (0, 5, 7.25), (4, 4, 1))
    ],
    *[_loops(n, constant) for n in (0, 1, 6) for constant in (2, 4)],
    *[_visits(group, shape) for group in (1, 3, 8) for shape in ((2, 100, 60), (1, 16, 16), (3, 170, 40))],
    _optional(True),
    _optional(False),
]
