"""Messages show what somebody passed, in short, and where, without pk's own frames."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import errors
from pk.runtime import processes


@pk.kernel
def copied(x: pk.Global, y: pk.Global, n: int = 1, MODE: pk.constexpr = "plain"):
    for i in pk.tasks(n):
        pk.store(y, pk.load(x, (i, 0), (1, 8)), (i, 0))


Y = torch.zeros(8, 8)


# ------------------------------------------------------------------------------------------------------ short values
class Odd:
    """Something whose text has many lines."""

    def __repr__(self) -> str:
        return "Odd(\n  1,\n)" * 100


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5, "float 2.5"),
        ([1, 2], "list [1, 2]"),
        ([0.5] * 100_000, "list [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, ...] of length 100000"),
        (np.zeros((64, 32)), "ndarray of shape (64, 32), float64"),
        (torch.zeros(64, 32), "Tensor of shape (64, 32), torch.float32"),
        (torch.tensor(2.0), "Tensor tensor(2.)"),
        ([torch.zeros(3)], "list [Tensor of shape (3,), torch.float32]"),
        (None, "NoneType None"),
        (torch.float64, "dtype torch.float64"),
        (10**6000, "int <an int of 19932 bits>"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_values_in_messages(value: Any, text: str) -> None:
    assert errors.shown(value) == text


def test_every_value_fits_a_line() -> None:
    for value in ("a" * 10_000, b"x" * 10_000, Odd(), dict.fromkeys(range(1000)), [[[[0] * 9] * 9] * 9] * 9):
        assert len(errors.shown(value)) < 200
        assert "\n" not in errors.shown(value)


LONG = [float(i) for i in range(100_000)]
CALLS: dict[str, Any] = {
    "tensor": lambda: copied(LONG, Y),
    "int": lambda: copied(Y, Y, LONG),
    "constexpr": lambda: copied(Y, Y, MODE=LONG),
    "sms": lambda: copied(Y, Y, sms=LONG),
    "specialise": lambda: copied.specialise(LONG),
    "spec": lambda: pk.spec(LONG, LONG),
    "empty": lambda: pk.empty(LONG, torch.float32),
    "symmetric": lambda: pk.symmetric(LONG),
    "spawn fn": lambda: pk.spawn(LONG, 2),
    "spawn args": lambda: pk.spawn(print, 2, args=str(LONG)),
    "spawn backend": lambda: pk.spawn(print, 2, backend=str(LONG)),
    "world size": lambda: pk.spawn(print, LONG),
    "too many ranks": lambda: pk.spawn(print, 10**6000),
    "check": lambda: pk.check(LONG),
    "schedules": lambda: pk.check(copied, Y, Y, schedules=LONG),
    "group": lambda: copied(Y, Y, group=LONG),
    "kernel": lambda: pk.kernel(LONG),
    "activation": lambda: pk.ops.matmul(Y.bfloat16(), Y.bfloat16(), activation=str(LONG)),
    "config": lambda: pk.ops.matmul(Y.bfloat16(), Y.bfloat16(), config=str(LONG)),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_message_shows_all_of_a_long_value(name: str) -> None:
    with pytest.raises(errors.PkError) as caught:
        CALLS[name]()
    assert len(str(caught.value)) < 1000, str(caught.value)[:300]


@pk.kernel
def captures(y: pk.Global):
    for i in pk.tasks(1):
        pk.store(y, pk.load(y, (0, 0), (1, 8)) + TABLE, (0, 0))


TABLE = tuple(range(10_000)), torch.zeros(100)


def test_captured_values_are_short_too() -> None:
    with pytest.raises(errors.WrongOperand) as caught:
        captures(Y)
    assert str(caught.value).startswith("`+` on tuple ((0, 1, 2, 3, 4, 5, ...), Tensor of shape (100,), torch.float32)")


def test_arrays_of_numpy_become_tensors() -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        copied(np.zeros((64, 64)), Y)
    assert str(caught.value) == (
        "`x` of kernel `copied` is ndarray of shape (64, 64), float64, and must be a torch.Tensor.\n"
        "  Pass `torch.from_numpy(x)`."
    )
    with pytest.raises(errors.ArgumentError, match=r"Pass `torch\.from_numpy\(tensor\)`"):
        pk.symmetric(np.zeros(3))
    with pytest.raises(errors.ArgumentError, match=r"Pass a tensor, such as `torch\.as_tensor\(x\)`"):
        copied([1.0], Y)


# ------------------------------------------------------------------------------------------------- the user's frames
@pk.kernel
def misplaced(x: pk.Global, y: pk.Global):
    for i in pk.tasks(1):
        pk.store(y, pk.load(x, (i, 0), (1, 8)), (0, 0, 0))


def launches(rank: int) -> None:
    misplaced(Y, Y)


def divides(rank: int) -> float:
    return 1 / (rank - rank)


def test_a_failed_rank_shows_the_way_into_pk() -> None:
    with pytest.raises(errors.RankError) as caught:
        pk.spawn(launches, 2, "sim")
    text = str(caught.value)
    assert text.count("the coordinate of `y` has 3 entries") == 1
    own, _, shown = text.partition("\n  | called at (most recent call last):\n")
    assert own.startswith(f"rank {caught.value.rank} raised WrongCoordinate: the coordinate of `y` has 3 entries, and ")
    assert shown.count("  |   File ") == 1
    assert "in launches\n  |     misplaced(Y, Y)" in shown
    assert isinstance(caught.value.__cause__, errors.WrongCoordinate)
    printed = "".join(traceback.format_exception(caught.value.__cause__))
    assert "/pk/kernel.py" not in printed


def test_a_failed_process_does_too() -> None:
    with pytest.raises(errors.WrongCoordinate) as caught:
        launches(0)
    kind, error, what, details, _ = pickle.loads(processes._failure(caught.value))
    assert (kind, str(error)) == ("error", str(caught.value))
    assert what == f"raised WrongCoordinate: {error}"
    assert "in launches\n    misplaced(Y, Y)" in details
    assert "/pk/kernel.py" not in details
    assert str(error) not in details


def test_other_errors_show_everything() -> None:
    with pytest.raises(errors.RankError) as caught:
        pk.spawn(divides, 1, "sim")
    lines = str(caught.value).splitlines()
    assert lines[1] == "  | Traceback (most recent call last):"
    assert lines[-1] == "  | ZeroDivisionError: division by zero"


# ------------------------------------------------------------------------------------------ what else may be written
def test_decorators_with_parentheses() -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        pk.kernel()
    assert str(caught.value) == (
        "@pk.kernel() is given no function.\n"
        "  Write @pk.kernel alone on the line before `def`; constants of a kernel are pk.constexpr parameters."
    )
    with pytest.raises(errors.ArgumentError, match=r"^@pk\.kernel\(stages=3\) has options"):
        pk.kernel(stages=3)
    with pytest.raises(errors.ArgumentError, match=r"^@pk\.function\(\) is given no function"):
        pk.function()


@pk.kernel
def swapped(y: pk.Global):
    for i in pk.tasks(1):
        pk.store(pk.load(y, (0, 0), (1, 8)), y, (0, 0))


@pk.kernel
def swapped_number(y: pk.Global):
    for i in pk.tasks(1):
        pk.store(2.0, y, (0, 0))


@pk.kernel
def swapped_bulk(y: pk.Global, LOAD: pk.constexpr):
    p = pk.pipeline(1, t=pk.shared((8, 8), y.dtype))
    for i in pk.tasks(1):
        with pk.loader(), p.fill() as s:
            if LOAD:
                pk.load_async(y, s.t, (0, 0))
            else:
                pk.load_async(s.t, y, (0, 0))
        with pk.storer(), p.drain() as s:
            pk.store_async(s.t, y, (0, 0))


@pk.kernel
def swapped_shared(y: pk.Global):
    own = pk.shared((64, 64), y.dtype)
    for i in pk.tasks(1):
        with pk.consumer(warpgroups=1):
            pk.store(pk.load(y, (0, 0), (64, 64)), own)


@pk.kernel
def stepped(y: pk.Global):
    for i in pk.tasks(1):
        for j in range(0, 10, 2):
            pk.store(y, 1.0, (0, j))


@pytest.mark.parametrize(
    ("call", "what", "advice"),
    [
        (lambda: swapped(Y), "pk.store to a register tile", "swapped: write pk.store(tensor, tile, coord)."),
        (lambda: swapped_number(Y), "pk.store to float 2.0 of", "swapped: write pk.store(tensor, tile, coord)."),
        (
            lambda: swapped_bulk(Y, LOAD=False), "pk.store_async to a shared tile",
            "swapped: write pk.store_async(tensor, tile, coord).",
        ),
        (
            lambda: swapped_bulk(Y, LOAD=True), "pk.load_async to the global tensor `y` from a shared tile",
            "swapped: write pk.load_async(tile, tensor, coord).",
        ),
        (lambda: swapped_shared(Y), "pk.store to a register tile", "write pk.store(shared tile, register tile)."),
        (lambda: stepped(Y), "a range with a step", "write `for j in range(5): ... j * 2` for range(0, 10, 2)"),
    ],
)  # fmt: skip
def test_mistakes_that_say_what_to_write(call: Any, what: str, advice: str) -> None:
    with pytest.raises(errors.WrongOperand) as caught:
        call()
    assert str(caught.value).startswith(what)
    assert advice in str(caught.value)
