"""Windows: clipping at every edge, strides, adds, and what an observer sees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pk.ir.nodes import NOWHERE
from pk.ir.types import bfloat16, float32, int32
from pk.sim.memory import Access, Buffer, Memory, Who, fit
from pk.sim.values import decode, encode

WHO = Who(0, 0, "storer")


def buffer(array: np.ndarray, dtype=int32) -> Buffer:
    return Buffer("x", 0, -1, array, dtype)


@pytest.mark.parametrize("strided", [False, True])
def test_reads_and_writes_clip_in_every_dimension(strided: bool) -> None:
    base = np.arange(1, 2 * 3 * 10 + 1, dtype=np.int32).reshape(2, 3, 10)
    x = base[:, :, ::2] if strided else base[:, :, :5].copy()
    memory, shape = Memory(), (2, 4)  # one leading element, 2 rows, 4 columns
    for origin in itertools.product(range(-2, 4), range(-3, 5), range(-5, 7)):
        want = np.zeros(shape, np.int32)
        after = x.copy()
        for r, c in np.ndindex(shape):
            at = (origin[0], origin[1] + r, origin[2] + c)
            if all(0 <= i < n for i, n in zip(at, x.shape, strict=True)):
                want[r, c] = x[at]
                after[at] = -(r * 4 + c + 1)
        got = memory.access(WHO, 0, "read", buffer(x), NOWHERE, origin, shape)
        assert got.shape == shape
        assert np.array_equal(got, want)
        target = buffer(x.copy())
        tile = -np.arange(1, 9, dtype=np.int32).reshape(shape)
        memory.access(WHO, 0, "write", target, NOWHERE, origin, shape, tile)
        assert np.array_equal(target.array, after)


def test_writes_go_through_strides() -> None:
    base = np.zeros((4, 6), np.int32)
    Memory().access(WHO, 0, "write", buffer(base[::2, 1::2]), NOWHERE, (1, 1), (1, 2), np.array([[7, 8]], np.int32))
    assert base[2].tolist() == [0, 0, 0, 7, 0, 8]
    assert base.sum() == 15


def test_add_rounds_each_time() -> None:
    one = encode(np.ones((1, 4), np.float32), bfloat16)
    tiny = encode(np.full((1, 4), 2.0**-9, np.float32), bfloat16)  # below half a unit in the last place of 1
    memory, narrow = Memory(), buffer(one.copy(), bfloat16)
    wide = buffer(np.ones((1, 4), np.float32), float32)
    for _ in range(8):
        memory.access(WHO, 0, "add", narrow, NOWHERE, (0, 1), (1, 4), tiny)
        memory.access(WHO, 0, "add", wide, NOWHERE, (0, 0), (1, 4), decode(tiny, bfloat16))
    assert decode(narrow.array, bfloat16).tolist() == [[1, 1, 1, 1]]
    assert wide.array.tolist() == [[1 + 2.0**-6] * 4]


def test_tiles_line_up_with_the_trailing_dimensions() -> None:
    assert fit((2, 3), 4) == (1, 1, 2, 3)
    assert fit((1, 3), 1) == (3,)
    x = np.arange(5, dtype=np.int32)
    assert Memory().access(WHO, 0, "read", buffer(x), NOWHERE, (3,), (1, 3)).tolist() == [[3, 4, 0]]


def test_the_observer_sees_clipped_windows_and_nothing_outside() -> None:
    seen: list[Access] = []
    memory, x = Memory(seen.append), buffer(np.zeros((4, 4), np.int32))
    memory.access(WHO, 3, "read", x, NOWHERE, (-1, 2), (2, 4))
    memory.access(WHO, 4, "add", x, NOWHERE, (9, 0), (2, 4), np.ones((2, 4), np.int32))
    memory.access(WHO, 5, "write", x, NOWHERE, values=np.ones((4, 4), np.int32))
    assert [(a.actor, a.kind, a.window) for a in seen] == [
        (3, "read", ((0, 1), (2, 4))),
        (5, "write", ((0, 4), (0, 4))),
    ]
    assert seen[0].who == WHO
    assert seen[0].buffer is x
