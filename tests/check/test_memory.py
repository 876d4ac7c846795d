"""Reads of memory that nobody wrote, tiles outside their tensors, and writes that an edge cuts off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk.ir import nodes as ir
from pk.ir.types import DType, bfloat16, float8_e4m3, float16, float32, int32
from pk.sim import SimTensor, simulate
from pk.sim.checker import Checker
from pk.sim.findings import Finding
from pk.sim.values import POISON, STORAGE, encode, poisoned
from pk.sim.written import Mask, forget_contents, unwritten
from tests.check import memory_kernels

FLOATS = pytest.mark.parametrize("dtype", [bfloat16, float16, float32], ids=str)


def filled(rows: int, cols: int, dtype: DType = bfloat16) -> SimTensor:
    return SimTensor(encode(np.ones((rows, cols), np.float32), dtype), dtype)


def empty(rows: int, cols: int, dtype: DType = bfloat16) -> SimTensor:
    return SimTensor(poisoned((rows, cols), dtype), dtype)


def found(
    name: str, args: list[dict[str, Any]], strict: bool = False, seed: int = 0, **constants: Any
) -> list[Finding]:
    kernel = getattr(memory_kernels, name)
    specs = {t: pk.spec(args[0][t].dtype, 2) for t in kernel.signature.tensors}
    program: ir.Kernel = kernel.specialise(**specs, **constants).ir
    checker = Checker(strict=strict)
    simulate(program, args, sms=2, seed=seed, checker=checker)
    return checker.findings


def one(findings: list[Finding], kind: str) -> Finding:
    (finding,) = findings
    assert finding.kind == kind
    return finding


# --------------------------------------------------------------------------------------------- nothing was written
@FLOATS
@pytest.mark.parametrize("seed", range(3))
def test_scratch(dtype: DType, seed: int) -> None:
    args = [{"x": filled(8, 16, dtype), "y": empty(8, 16, dtype)} for _ in range(2)]
    finding = one(found("from_scratch", args, seed=seed), "uninitialised")
    assert "the loader reads part[0:8, 0:16] of rank" in finding.message
    assert finding.message.endswith("of which nothing was ever written")
    (place,) = finding.places
    assert (place.role, place.task) == ("loader", (("m", 0),))
    assert "pk.load_async(s.t, part[pk.rank()], (m, 0))" in str(finding)
    assert not found("from_scratch", args, seed=seed, WRITE=True)


@FLOATS
def test_a_tensor_that_came_empty(dtype: DType) -> None:
    finding = one(found("copy", [{"x": empty(24, 16, dtype), "y": empty(24, 16, dtype)}]), "uninitialised")
    assert "reads x[" in finding.message
    assert not found("copy", [{"x": filled(24, 16, dtype), "y": empty(24, 16, dtype)}])


def test_a_tensor_that_another_launch_wrote() -> None:
    middle = empty(24, 16)
    assert not found("copy", [{"x": filled(24, 16), "y": middle}])
    assert not found("copy", [{"x": middle, "y": empty(24, 16)}])


def test_a_tensor_of_which_another_launch_wrote_a_part() -> None:
    middle = empty(32, 16)
    assert not found("copy", [{"x": filled(24, 16), "y": middle}])
    finding = one(found("copy", [{"x": middle, "y": empty(32, 16)}]), "uninitialised")
    assert "reads x[24:32, 0:16]" in finding.message


def test_one_tensor_under_two_names() -> None:
    """In place: y is x, and is written as y."""
    same = filled(24, 16)
    assert not found("copy", [{"x": same, "y": same}])
    hollow = empty(24, 16)
    assert not [f for f in found("copy", [{"x": hollow, "y": hollow}]) if f.kind == "uninitialised"]  # not followed


def test_a_tile_of_a_stage() -> None:
    finding = one(found("half_filled", [{"x": filled(24, 16), "y": empty(24, 16)}]), "uninitialised")
    assert "the storer reads shared tile pipe[" in finding.message
    assert "].b, which nothing has written since its stage was freed" in finding.message
    assert finding.places[0].stage in ("pipe[0]", "pipe[1]")


def test_a_private_tile() -> None:
    finding = one(found("private", [{"x": filled(64, 16), "y": empty(64, 16)}]), "uninitialised")
    assert finding.message == "the consumer reads shared tile own, which nothing has written"
    assert not found("private", [{"x": filled(64, 16), "y": empty(64, 16)}], FIRST=True)


def test_adding_to_nothing() -> None:
    def args(y: SimTensor) -> list[dict[str, Any]]:
        return [{"x": filled(8, 16), "y": SimTensor(y.array.copy(), y.dtype)} for _ in range(2)]

    assert not found("accumulate", args(filled(8, 16)))
    finding = one(found("accumulate", args(empty(8, 16))), "uninitialised")
    assert "the storer adds to y[0:8, 0:16]" in finding.message
    assert "clear `y` before the launch" in finding.advice


@FLOATS
def test_a_part_of_a_window(dtype: DType) -> None:
    args = [{"x": filled(8, 16, dtype), "y": empty(8, 16, dtype)}]
    finding = one(found("two_halves", args), "uninitialised")
    assert "of which a part was never written, and the results have NaN" in finding.message
    assert not found("two_halves", args, BOTH=True)


def test_rows_behind_the_last_may_be_missing() -> None:
    """A tail of whole rows that is loaded along: x has 4 rows of 8."""
    x = filled(8, 16)
    forget_contents(x.array[4:], bfloat16)
    assert not found("copy", [{"x": x, "y": empty(8, 16)}])


def test_nan_in_the_operands_is_no_missing_write() -> None:
    x = filled(8, 16, float32)
    x.array[3, 5] = np.nan
    assert not found("copy", [{"x": x, "y": empty(8, 16, float32)}])


@pytest.mark.parametrize("dtype", STORAGE, ids=str)
def test_the_pattern(dtype: DType) -> None:
    array = poisoned((3, 16), dtype)
    assert unwritten(array, dtype).all()
    array[1] = 0
    assert unwritten(array, dtype).tolist() == [[True] * 16, [False] * 16, [True] * 16]
    array[0, 3] = 0  # a narrow dtype may have the pattern as data: rows count as a whole
    assert unwritten(array, dtype)[0].tolist() == ([c != 3 for c in range(16)] if array.itemsize == 4 else [False] * 16)
    forget_contents(array, dtype)
    assert unwritten(array, dtype).all()


def test_no_arithmetic_makes_the_pattern() -> None:
    assert np.isnan(POISON[float32])
    with np.errstate(all="ignore"):
        made = np.array([0.0], np.float32) / np.array([0.0], np.float32)
    assert not unwritten(np.concatenate([made, -made, np.full(1, np.nan, np.float32)]), float32).any()
    assert not unwritten(encode(np.full((2, 16), np.nan), bfloat16), bfloat16).any()
    assert not unwritten(encode(np.full((2, 16), np.nan), float8_e4m3), float8_e4m3).any()
    assert unwritten(np.full(3, -0x21524111, np.int32), int32).all()


def lanes(written: int, mask: bool) -> list[Finding]:
    """``at`` holds ``written`` indices and then memory that nobody has written; 12 are wanted."""
    at = torch.from_numpy(poisoned((16,), int32))
    at[:written] = torch.arange(written).flip(0)
    x = torch.arange(16 * 16, dtype=torch.float32).view(16, 16)
    y = torch.empty(16, 16, device="meta")
    kernel = memory_kernels.chosen_rows
    return list(pk.check(kernel, x, at, y, 12, world_size=1, sms=1, schedules=2, shrink=False, MASK=mask).findings)


def test_lanes_of_an_index_vector_may_be_missing_if_nobody_uses_them() -> None:
    assert not lanes(12, mask=True)
    assert not lanes(16, mask=False)
    finding = one(lanes(12, mask=False), "uninitialised")
    assert "the loader reads at[12:13] of rank 0, of which nothing was ever written" in finding.message
    assert finding.message.endswith(", and what the launch does depends on it")
    assert "row = pk.load(at, m, (8,))" in str(finding)
    finding = one(lanes(11, mask=True), "uninitialised")
    assert "reads at[11:12] of rank 0" in finding.message


def test_an_index_vector_of_which_nothing_was_written() -> None:
    finding = one(lanes(8, mask=True), "uninitialised")
    assert finding.message.endswith("reads at[8:9] of rank 0, of which nothing was ever written")


def test_masks() -> None:
    mask = Mask(np.zeros((4, 4), bool))
    everything = ((0, 4), (0, 4))
    assert mask.read(everything) == "nothing"
    mask.write(((0, 2), (0, 4)))
    assert mask.read(everything) == "rows"
    assert mask.read(((0, 2), (1, 3))) == "whole"
    mask.write(((2, 4), (0, 2)))
    assert mask.read(everything) == "part"
    mask.write(((2, 4), (2, 4)))
    assert mask.read(everything) == "whole"


# ----------------------------------------------------------------------------------------------------- out of range
def pair(rows: int, cols: int) -> list[dict[str, Any]]:
    return [{"x": filled(rows, cols), "y": filled(rows, cols)}]


@pytest.mark.parametrize("rows", [16, 24, 20, 4])
def test_an_index_too_large_by_one(rows: int) -> None:
    finding = one(found("copy", pair(rows, 16), DOWN=1), "out-of-range")
    first = -(-rows // 8) * 8
    text = f"the loader reads x[{first}:{first + 8}, 0:16], which reads as 0: `x` has shape ({rows}, 16)"
    assert finding.message == f"{text}; x[0, 0] is never read"
    assert "tile m=" in str(finding)


@pytest.mark.parametrize("rows", [16, 24, 20])
def test_a_negative_index(rows: int) -> None:
    finding = one(found("copy", pair(rows, 16), UP=1), "out-of-range")
    assert finding.message == f"the storer writes y[-8:0, 0:16], which writes nothing: `y` has shape ({rows}, 16)"


@pytest.mark.parametrize("cols", [8, 16, 40, 72, 80, 100])
def test_pieces_behind_the_edge(cols: int) -> None:
    assert not found("pieces", pair(20, cols))


@pytest.mark.parametrize("rows", [8, 24, 40, 72])
def test_the_last_shares_may_be_empty(rows: int) -> None:
    assert not found("shares", pair(rows, 16))


def test_ranks_without_a_share() -> None:
    assert not found("own_share", [pair(16, 16)[0] for _ in range(4)])


def test_a_task_too_many_that_does_no_harm() -> None:
    assert not found("copy", pair(24, 16), EXTRA=1)


def test_zeros_from_outside_on_purpose() -> None:
    assert not found("halo", pair(24, 16))


def test_an_index_from_memory() -> None:
    at = SimTensor(np.array([[1, 7, -1, 0]], np.int32), int32)
    assert not found("looked_up", [{"x": filled(16, 16), "at": at, "y": empty(32, 16)}])


# --------------------------------------------------------------------------------------------------- strict bounds
def test_writes_that_the_edge_cuts_off() -> None:
    assert not found("copy", pair(20, 16))
    finding = one(found("copy", pair(20, 16), strict=True), "clipped")
    assert finding.message.startswith("y[16:24, 0:16] reaches over the edge of `y`, whose shape is (20, 16)")
    assert not found("copy", pair(24, 16), strict=True)
