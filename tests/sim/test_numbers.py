"""Numbers that the device has no room or no meaning for: ints beyond 32 bits, and int tiles divided by zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pk
from pk import errors

MOST = 2**31 - 1


@pk.kernel
def hashed(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        h = (n * 1103515245 + 12345) // 65536
        pk.store(y, h, (0, 0))


@pk.kernel
def hashed_tile(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, (pk.full((1, 8), 1, pk.int32) * n * 1103515245 + 12345) // 65536, (0, 0))


@pk.kernel
def negated(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, -n, (0, 0))


@pk.kernel
def absolute(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, abs(n), (0, 0))


@pk.kernel
def added(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, n + y.cols, (0, 0))


@pk.kernel
def divided(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, n // (y.rows - 2), (0, 0))


@pk.kernel
def compared(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        if n * n > 5:
            pk.store(y, 1, (0, 0))


@pk.kernel
def tile_index(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, pk.load(y, (0, n), (1, 8)), (0, 0))


@pk.kernel
def element(y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, pk.load(y, pk.at(0, n * 8), (1, 8)), (0, 0))


@pk.kernel
def in_the_prologue(y: pk.Global, n: int):
    m = n * n
    for _ in pk.tasks(1):
        if m > 5:
            pk.store(y, 1, (0, 0))


@pk.kernel
def counter(y: pk.Global, n: int):
    total = pk.signals()
    for _ in pk.tasks(1):
        pk.signal(total, (), 0, n)
        pk.wait(total, (), n)
        pk.signal(total, (), 0, n)
        pk.wait(total, (), n + (n - 1))
        pk.store(y, pk.fetch_add(total, (), 0), (0, 0))


@pytest.mark.parametrize(
    ("kernel", "n", "value", "caret"),
    [
        (hashed, 12345, 12345 * 1103515245, "n * 1103515245"),
        (negated, -(2**31), 2**31, "-n"),
        (absolute, -(2**31), 2**31, "abs(n)"),
        (added, MOST, MOST + 16, "n + y.cols"),
        (divided, -(2**31), 2**31, "n // (y.rows - 2)"),
        (compared, 70000, 70000**2, "n * n"),
        (tile_index, 2**29, 2**32, "pk.load(y, (0, n), (1, 8))"),
        (element, 2**29, 2**32, "n * 8"),
        (in_the_prologue, -70000, 70000**2, "n * n"),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_a_scalar_that_does_not_fit(kernel: Any, n: int, value: int, caret: str) -> None:
    y = torch.zeros(1, 16, dtype=torch.int32)
    with pytest.raises(errors.SimulationError) as caught:
        kernel(y, n)
    text = str(caught.value)
    assert text.startswith(f"{value} does not fit the 32 bits of an int"), text
    lines = text.splitlines()
    line, marks = lines[2], lines[3]
    assert line[marks.index("^") : marks.rindex("^") + 1] == caret
    assert "in rank 0, block" in lines[4]
    (finding,) = pk.check(kernel, y, n, world_size=1, schedules=1, shrink=False).findings
    assert finding.kind == "failed"
    assert f"{value} does not fit" in finding.message


def test_scalars_that_just_fit() -> None:
    y = torch.zeros(1, 16, dtype=torch.int32)
    added(y, MOST - 16)
    assert int(y[0, 0]) == MOST
    negated(y, MOST)
    assert int(y[0, 0]) == -MOST
    tile_index(y, (2**31 - 8) // 8)
    hashed(y, 1)
    assert int(y[0, 0]) == (1103515245 + 12345) // 65536


def test_a_counter_that_does_not_fit() -> None:
    y = torch.zeros(1, 16, dtype=torch.int32)
    with pytest.raises(errors.SimulationError, match=f"{2**31} does not fit"):
        counter(y, 2**30)


@pk.kernel
def shifted(x: pk.Global, y: pk.Global, n: int):
    for _ in pk.tasks(1):
        pk.store(y, pk.load(x, pk.at(0, (n - 10000000) * 128), (1, 8)), (0, 0))


def test_what_the_compiler_makes_of_a_product_need_not_fit() -> None:
    """(n - c) * 128 is n * 128 - c * 128 in the IR: the whole fits, a part of it does not."""
    x, y = ints(1, 8), torch.zeros(1, 16, dtype=torch.int32)
    shifted(x, y, 20000000)
    with pytest.raises(errors.SimulationError, match="2560000000 does not fit"):
        shifted(x, y, 30000000)


@pk.kernel
def apart(x: pk.Global, y: pk.Global, n: int, m: int):
    for _ in pk.tasks(1):
        pk.store(y, pk.load(x, (0, n * 4 - m), (1, 8)), (0, 0))


def test_tile_indices_whose_parts_are_large() -> None:
    x, y = ints(1, 16, start=0), torch.zeros(1, 16, dtype=torch.int32)
    apart(x, y, 2**28, 2**30 - 1)  # n * 32 - m * 8 in the IR
    assert y[0, :8].tolist() == list(range(8, 16))


def test_int32_tiles_wrap_around() -> None:
    y = torch.zeros(1, 8, dtype=torch.int32)
    hashed_tile(y, 12345)
    wrapped = (12345 * 1103515245 + 12345 + 2**31) % 2**32 - 2**31
    assert y.tolist() == [[wrapped // 65536] * 8]


# ---------------------------------------------------------------------------------------------------- division by zero
@pk.kernel
def by_scalar(y: pk.Global, d: int):
    for _ in pk.tasks(1):
        pk.store(y, (pk.iota((1, 8)) + 5) // d, (0, 0))


@pk.kernel
def remainders(y: pk.Global, d: int):
    for _ in pk.tasks(1):
        pk.store(y, (pk.iota((1, 8)) + 5) % d, (0, 0))


@pk.kernel
def quotients(x: pk.Global, d: pk.Global, y: pk.Global):
    for i, j in pk.tasks(pk.cdiv(x.rows, 16), pk.cdiv(x.cols, 32)):
        pk.store(y, pk.load(x, (i, j), (16, 32)) // pk.load(d, (i, j), (16, 32)), (i, j))


@pk.kernel
def shares(x: pk.Global, y: pk.Global, C: pk.constexpr = 64):
    """Rows as parts of their sums, and of columns that are counted from the end."""
    for i in pk.tasks(pk.cdiv(x.rows, 16)):
        t = pk.load(x, (i, 0), (16, C))
        s = pk.sum(t, axis=1)
        u = t * 100 // s
        u = u + t // (x.cols - pk.iota((1, C)))
        pk.store(y, u, (i, 0))


@pk.kernel
def masked(x: pk.Global, d: pk.Global, y: pk.Global, SAFE: pk.constexpr):
    for i in pk.tasks(pk.cdiv(x.rows, 16)):
        by = pk.load(d, (i, 0), (16, 32))
        if SAFE:
            by = pk.where(by == 0, 1, by)
        pk.store(y, pk.where(by == 0, 0, pk.load(x, (i, 0), (16, 32)) % by), (i, 0))


@pk.kernel
def lanes(index: pk.Global, x: pk.Global, y: pk.Global, R: pk.constexpr = 32):
    ring = pk.pipeline(1, t=pk.shared((R, 16), y.dtype))
    for i in pk.tasks(pk.cdiv(index.shape[0], R)):
        with pk.loader():
            by = pk.load(index, i, (R,), other=0)
            with ring.fill() as s:
                pk.gather_async(s.t, x, pk.where(by > 0, 8 // by, -1), 0)
        with pk.storer(), ring.drain() as s:
            pk.scatter_async(y, s.t, i * R + pk.iota((R,)), 0)


def ints(*shape: int, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.int32).view(shape)


def failing(call: Callable[[], Any], where: str) -> None:
    with pytest.raises(errors.SimulationError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith(f"division by zero: element [{where}] of the divisor is 0"), text
    assert "^^^" in text
    assert "in rank 0, block" in text


def test_tiles_divided_by_zero() -> None:
    y = torch.zeros(1, 8, dtype=torch.int32)
    failing(lambda: by_scalar(y, 0), "0, 0")
    failing(lambda: remainders(y, 0), "0, 0")
    by_scalar(y, -2)
    assert y.tolist() == [[-3, -3, -4, -4, -5, -5, -6, -6]]
    (finding,) = pk.check(by_scalar, y, 0, world_size=1, schedules=1, shrink=False).findings
    assert finding.kind == "failed"


def test_zero_that_is_written() -> None:
    with pytest.raises(errors.WrongOperand, match="`%` divides by zero"):
        by_constant(torch.zeros(1, 8, dtype=torch.int32))


@pk.kernel
def by_constant(y: pk.Global):
    for _ in pk.tasks(1):
        pk.store(y, pk.iota((1, 8)) % 0, (0, 0))


def test_zeros_outside_a_tensor_are_no_mistake() -> None:
    x, d, y = ints(37, 50), ints(37, 50) % 7 + 1, torch.zeros(37, 50, dtype=torch.int32)
    quotients(x, d, y)
    assert torch.equal(y, x // d)
    d[36, 49] = 0
    failing(lambda: quotients(x, d, y), "4, 17")
    shares(x, y)
    left = 50 - torch.arange(50, dtype=torch.int32)
    assert torch.equal(y, x * 100 // x.sum(1, keepdim=True, dtype=torch.int32) + x // left)
    x[20] = 0
    failing(lambda: shares(x, y), "4, 0")


def test_a_zero_behind_a_mask_is_one() -> None:
    x, d, y = ints(16, 32), ints(16, 32, start=0), torch.zeros(16, 32, dtype=torch.int32)
    failing(lambda: masked(x, d, y, SAFE=False), "0, 0")
    masked(x, d, y, SAFE=True)
    assert torch.equal(y, x % d.clamp(min=1))


def test_lanes_outside_a_tensor() -> None:
    x, y = ints(16, 16), torch.zeros(50, 16, dtype=torch.int32)
    lanes(ints(50), x, y)
    assert torch.equal(y, x[8 // ints(50)])
    with pytest.raises(errors.SimulationError, match=r"element \[3\] of the divisor is 0"):
        lanes(ints(50) - 4, x, y)
