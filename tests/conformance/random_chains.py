"""Random chains of register-tile operations: the lines of a consumer, and the same in NumPy.

NumPy computes on arrays of tiles, (row block, column block, R, C), zeros beyond the edges of the tensor, as a load
gives.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conformance.case import Array

Step = Callable[[dict[str, Array]], Array]


def blocked(x: Array, tile: tuple[int, int]) -> Array:
    """(rows, cols) -> (row blocks, column blocks, R, C), padded with zeros."""
    (rows, cols), (r, c) = x.shape, tile
    padded = np.pad(x, ((0, -rows % r), (0, -cols % c)))
    return padded.reshape(padded.shape[0] // r, r, padded.shape[1] // c, c).swapaxes(1, 2)


def joined(tiles: Array, shape: tuple[int, int]) -> Array:
    """The reverse, cropped to ``shape``."""
    nm, nn, r, c = tiles.shape
    return np.ascontiguousarray(tiles.swapaxes(1, 2).reshape(nm * r, nn * c)[: shape[0], : shape[1]])


@dataclass
class Chain:
    """``lines`` set the name ``result`` from ``inputs``; ``run`` does the same to float32 arrays of tiles."""

    lines: list[str]
    steps: list[tuple[str, Step]]
    result: str

    def run(self, tiles: dict[str, Array]) -> Array:
        """What ``result`` holds, given the tiles of the inputs by name."""
        space = dict(tiles)
        with np.errstate(all="ignore"):
            for name, step in self.steps:
                space[name] = np.asarray(step(space), np.float32)
        return space[self.result]


def parity(tiles: Array) -> Array:
    """(row blocks, column blocks, 1, 1): whether m + n is even."""
    m, n = np.ogrid[: tiles.shape[0], : tiles.shape[1]]
    return ((m + n) % 2 == 0)[:, :, None, None]


def unary(gen: random.Random, x: str, whole: bool) -> tuple[str, Step]:
    """One operation on ``x``: an expression of the language, and NumPy's."""
    c = float(gen.randint(-3, 3)) if whole else round(gen.uniform(-2, 2), 3)
    f = np.float32(c)
    options: list[tuple[str, Step]] = [
        (f"-{x}", lambda s: -s[x]),
        (f"abs({x})", lambda s: np.abs(s[x])),
        (f"{x} + {c}", lambda s: s[x] + f),
        (f"{c} - {x}", lambda s: f - s[x]),
        (f"{x} * {c}", lambda s: s[x] * f),
        (f"pk.max({x}, {c})", lambda s: np.maximum(s[x], f)),
        (f"pk.min({c}, {x})", lambda s: np.minimum(s[x], f)),
        (f"{x} * alpha", lambda s: s[x] * s["alpha"]),
        (f"{x} + shift", lambda s: s[x] + s["shift"]),
    ]
    return gen.choice(options)


def across(gen: random.Random, x: str, y: str, tile: tuple[int, int]) -> tuple[str, Step]:
    """One operation that looks across a tile: a reduction that is broadcast again, or a mask of columns or rows."""
    (r, c), at = tile, gen.randint(0, 60)
    seven = np.float32(7)
    options: list[tuple[str, Step]] = [
        (f"{x} - pk.max({y}, axis=1)", lambda s: s[x] - s[y].max(axis=3, keepdims=True)),
        (f"pk.min({y}, axis=1) + {x}", lambda s: s[y].min(axis=3, keepdims=True) + s[x]),
        (f"{x} + pk.max({y}, axis=0)", lambda s: s[x] + s[y].max(axis=2, keepdims=True)),
        (
            f"pk.where(n * {c} + pk.iota((1, {c})) < {at}, {x}, 7.0)",
            lambda s: np.where(_columns(s[x]) < at, s[x], seven),
        ),
        (f"pk.where(m * {r} + pk.iota(({r}, 1)) >= {at}, {x}, {y})", lambda s: np.where(_rows(s[x]) >= at, s[x], s[y])),
    ]
    return gen.choice(options)


def _columns(tiles: Array) -> Array:
    return np.arange(tiles.shape[1] * tiles.shape[3]).reshape(1, tiles.shape[1], 1, tiles.shape[3])


def _rows(tiles: Array) -> Array:
    return np.arange(tiles.shape[0] * tiles.shape[2]).reshape(tiles.shape[0], 1, tiles.shape[2], 1)


def binary(gen: random.Random, x: str, y: str, whole: bool) -> tuple[str, Step]:
    """One operation on ``x`` and ``y``."""
    options: list[tuple[str, Step]] = [
        (f"{x} + {y}", lambda s: s[x] + s[y]),
        (f"{x} - {y}", lambda s: s[x] - s[y]),
        (f"{x} * {y}", lambda s: s[x] * s[y]),
        (f"pk.max({x}, {y})", lambda s: np.maximum(s[x], s[y])),
        (f"pk.min({x}, {y})", lambda s: np.minimum(s[x], s[y])),
        (f"{x} * {y} + {x}", lambda s: s[x] * s[y] + s[x]),
        (f"pk.where({x} < {y}, {y}, {x} + 1.0)", lambda s: np.where(s[x] < s[y], s[y], s[x] + np.float32(1))),
    ]
    if not whole:
        options.append((f"{x} / (abs({y}) + 1.0)", lambda s: s[x] / (np.abs(s[y]) + np.float32(1))))
    return gen.choice(options)


def chain(
    gen: random.Random, inputs: list[str], whole: bool, length: int, scalars: dict[str, Any], tile: tuple[int, int]
) -> Chain:
    """A chain of ``length`` operations; with ``whole`` numbers stay whole, and the result within -8..8."""
    made = Chain([], [(n, _constant(v)) for n, v in scalars.items()], inputs[0])
    names, previous = list(inputs), inputs[0]
    for i in range(length):
        name = f"v{i}"
        other = gen.choice(names)
        if gen.random() < 0.15:
            (a, run_a), (b, run_b) = unary(gen, previous, whole), binary(gen, previous, other, whole)
            made.lines += [
                f"{name} = {previous}",
                "if (m + n) % 2 == 0:",
                f"    {name} = {a}",
                "else:",
                f"    {name} = {b}",
            ]
            step: Step = _branch(run_a, run_b, previous)
        elif gen.random() < 0.15:
            text, run = unary(gen, name, whole)
            turns = gen.randint(0, 2)
            made.lines += [f"{name} = {previous}", f"for _ in pk.range({turns}):", f"    {name} = {text}"]
            step = _loop(run, previous, name, turns)
        elif gen.random() < 0.15:
            text, step = across(gen, previous, other, tile)
            made.lines.append(f"{name} = {text}")
        else:
            text, step = unary(gen, previous, whole) if gen.random() < 0.4 else binary(gen, previous, other, whole)
            made.lines.append(f"{name} = {text}")
        made.steps.append((name, step))
        names.append(name)
        previous = name
    made.result = previous
    if whole:
        made.lines.append(f"last = pk.max(pk.min({previous}, 8.0), -8.0)")
        made.steps.append(("last", _clipped(previous)))
        made.result = "last"
    return made


def _constant(value: float) -> Step:
    return lambda s: np.float32(value)


def _clipped(x: str) -> Step:
    return lambda s: np.clip(s[x], np.float32(-8), np.float32(8))


def _branch(run_a: Step, run_b: Step, x: str) -> Step:
    return lambda s: np.where(parity(s[x]), run_a(s), run_b(s))


def _loop(run: Step, start: str, name: str, turns: int) -> Step:
    def step(space: dict[str, Array]) -> Array:
        local = {**space, name: space[start]}
        for _ in range(turns):
            local[name] = np.asarray(run(local), np.float32)
        return local[name]

    return step
