"""Operands of a checked launch that share memory: copied together, raced together, made smaller together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from tests.check import driver_kernels as kernels

ZEROS = torch.zeros(1, 64)
LINE = torch.arange(1000.0).view(1, -1)
SQUARE = torch.arange(64.0 * 256).view(64, 256)


@pytest.mark.parametrize(
    ("kernel", "x", "y"),
    [
        (kernels.backwards, LINE[:, :640], LINE[:, :640]),  # the same view
        (kernels.backwards_everywhere, LINE[:, :640], LINE[:, :640]),  # in symmetric memory
        (kernels.backwards, [LINE[:, :640], ZEROS.expand(1, 64)], [LINE[:, :640], ZEROS.clone()]),  # of rank 0
        (kernels.backwards, lambda _rank: LINE[:, :640], lambda _rank: LINE.view(-1)[:640].view(1, -1)),
        (kernels.backwards, torch.empty(1, 640, device="meta"), None),  # one tensor twice
        (kernels.doubled, LINE[:, :900], LINE[:, 100:]),  # shifted
        (kernels.doubled, SQUARE[:32], SQUARE[4:36]),  # by rows
        (kernels.doubled, SQUARE[:, :128], SQUARE[:, 64:192]),  # by columns
        (kernels.doubled, SQUARE.view(-1)[:4096].view(32, 128), SQUARE[:32, :128]),  # other strides
    ],
)
def test_operands_that_share_memory_race(kernel: Any, x: Any, y: Any) -> None:
    check = pk.check(kernel, x, x if y is None else y, world_size=2, sms=3, schedules=3, shrink=False)
    races = [f for f in check.findings if f.kind == "race"]
    assert races, str(check)
    assert "share memory" in races[0].message
    assert "`x`" in races[0].message
    assert "`y`" in races[0].message
    assert {p.what.split("`")[1] for p in races[0].places} == {"x", "y"}


@pytest.mark.parametrize(
    ("kernel", "x", "y"),
    [
        (kernels.backwards, LINE[:, :640], LINE[:, :640].clone()),
        (kernels.doubled, SQUARE, SQUARE),  # in place: every element is read and written by one task
        (kernels.doubled, LINE[:, :500], LINE[:, 500:]),  # side by side
        (kernels.doubled, SQUARE[:, :128], SQUARE[:, 128:]),  # row by row in turn: bounds overlap, elements do not
        (kernels.doubled, SQUARE[::2], SQUARE[1::2]),
        (kernels.doubled, LINE[:, :64].expand(8, 64), SQUARE[:8, :64]),
    ],
)
def test_operands_that_do_not_meet_do_not_race(kernel: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    before = x.clone(), y.clone()
    check = pk.check(kernel, x, y, world_size=2, schedules=3)
    assert check.ok, str(check)
    assert torch.equal(x, before[0]), "a check leaves its arguments alone"
    assert torch.equal(y, before[1])


def test_shared_operands_are_copied_with_their_values_and_made_smaller_together() -> None:
    x = SQUARE[4:36, 64:]
    right = {"y": 2 * x}
    assert pk.check(kernels.doubled, x, x, world_size=2, schedules=2, reference=right).ok
    check = pk.check(kernels.doubled, SQUARE[:32], SQUARE[4:36], world_size=2, sms=3, schedules=3)
    assert check.smallest[0].case.image.extents()[0] < (32, 256)
    assert check.smallest[0].case.world == 1


def test_a_role_sees_its_own_stores_by_every_name() -> None:
    x = LINE[:, :640]
    assert pk.check(kernels.backwards, x, x, world_size=1, sms=1, schedules=3, reference={"y": _one_by_one(x)}).ok


def _one_by_one(x: torch.Tensor) -> torch.Tensor:
    tiles = x.clone().view(10, 64)
    for i in range(10):
        tiles[i] = tiles[9 - i]
    return tiles.view(1, -1)
