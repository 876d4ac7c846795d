"""PK_SANITIZE without a GPU: which indices are looked at, what is emitted, and that nothing is when it is off."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pk
from pk.artifact import Source
from pk.codegen import generate, readable
from pk.errors import RankError, SimulationError
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.check import check
from pk.ir.sanitize import sanitized
from pk.ir.text import text
from tests import sanitize_kernels as k
from tests.codegen.test_compile import ODD, clean
from tests.gpu.test_sanitize import CLEAN, PLANTED

KERNELS = {
    "counters": (k.counters, {"c": 2}),
    "elements": (k.elements, {"x": 2, "c": 2}),
    "tiles": (k.tiles, {"x": 2, "c": 2}),
    "rows": (k.rows, {"x": 2, "which": 1, "c": 2}),
    "send_rows": (k.send_rows, {"x": 2, "which": 1, "c": 2}),
    "chosen": (k.chosen, {"x": 2, "y": 2, "c": 2}),
    "unwritten": (k.unwritten, {"x": 2, "c": 2}),
}


def plain(name: str) -> ir.Kernel:
    kernel, dims = KERNELS[name]
    specs = {t: pk.spec(torch.int32 if t == "which" else torch.float32, n) for t, n in dims.items()}
    made: ir.Kernel = kernel.specialise(**specs).ir
    return made


def bounds(kernel: ir.Kernel) -> list[ir.Bounds]:
    return [s for _, block in kernel.classes for s in split.statements(block) if isinstance(s, ir.Bounds)]


def checks(name: str, level: int = 1) -> list[str]:
    return [b.what for b in bounds(sanitized(plain(name), level))]


def source(name: str, level: int = 1) -> Source:
    return generate(sanitized(plain(name), level), sanitize=level)


# ------------------------------------------------------------------------------------------------------------- the IR
def test_every_index_rank_and_coordinate_is_looked_at() -> None:
    assert checks("counters") == [
        "index 0 of `arrived`", "index 1 of `arrived`", "the rank that `arrived` is signalled on",
        "index 0 of `arrived`", "index 1 of `arrived`",
    ]  # fmt: skip
    assert checks("tiles") == [
        "row of `x`", "column of `x`", "the rank whose `c` is meant", "row of `c`", "column of `c`",
    ]  # fmt: skip
    assert checks("rows") == [
        "element of `which`", "row of `x`", "column of `x`", "row of `c`", "column of `c`",
    ]  # fmt: skip


def test_an_index_counts_only_where_its_branch_is_taken() -> None:
    guarded = [b.what for b in bounds(sanitized(plain("chosen"))) if b.guard is not None]
    assert guarded == ["row of `x`", "column of `x`", "row of `y`", "column of `y`"]
    printed = text(sanitized(plain("chosen"), 2))
    assert "if m < 2: check -31 <= m * 32 < x.rows, 'row of `x`'" in printed
    assert "if not m < 2: check -31 <= m * 32 < y.rows, 'row of `y`'" in printed
    emitted = source("chosen", 2).text
    assert "if (p.m < 2) check_bounds(role, p.m * 32, p.x_rows, SITE_ROW_OF_X_BOUNDS, -31, 0);" in emitted
    assert "if (!(p.m < 2)) check_bounds(role, p.m * 32, p.y_rows, SITE_ROW_OF_Y_BOUNDS, -31, 0);" in emitted


def test_level_2_allows_no_tile_that_lies_wholly_outside() -> None:
    (one,) = (b for b in bounds(sanitized(plain("tiles"), 1)) if b.what == "row of `x`")
    (two,) = (b for b in bounds(sanitized(plain("tiles"), 2)) if b.what == "row of `x`")
    assert (one.least, one.slack) == (1 - k.TILE - 256, 256)
    assert (two.least, two.slack) == (1 - k.TILE, 0)


def test_a_sanitized_kernel_passes_the_checks() -> None:
    for name in KERNELS:
        check(sanitized(plain(name)))


# ------------------------------------------------------------------------------------------------------- the simulator
def _call(rank: int, name: str, numbers: tuple[int, ...]) -> None:
    x, c = torch.zeros(64, 64), pk.empty((64, 64), torch.float32)
    if name == "counters":
        k.counters(c, *numbers)
    elif name == "elements":
        k.elements(x, c, *numbers)
    elif name == "tiles":
        k.tiles(x, c, *numbers)
    else:
        (k.rows if name == "rows" else k.send_rows)(x, torch.tensor(numbers, dtype=torch.int32), c)


@pytest.mark.parametrize(("call", "wanted"), PLANTED)
def test_simulated_ranks_report_the_same(call: tuple[Any, ...], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SANITIZE", "1")
    with pytest.raises(RankError) as caught:
        pk.spawn(_call, 2, "sim", (call[0], call[1:]))
    assert isinstance(caught.value.__cause__, SimulationError)
    assert wanted in str(caught.value) and "sanitize_kernels.py" in str(caught.value)


@pytest.mark.parametrize("call", CLEAN)
def test_clean_calls_stay_clean(call: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SANITIZE", "1")
    pk.spawn(_call, 2, "sim", (call[0], call[1:]))


def test_the_switch_may_be_turned_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pk.spawn(_call, 1, "sim", ("elements", (99, 0)))  # reads 0: the language says so
    monkeypatch.setenv("PK_SANITIZE", "1")
    with pytest.raises(RankError, match="column of `x` is 99"):
        pk.spawn(_call, 1, "sim", ("elements", (99, 0)))
    monkeypatch.setenv("PK_SANITIZE", "0")
    pk.spawn(_call, 1, "sim", ("elements", (99, 0)))


# ------------------------------------------------------------------------------------------------------------ the text
@pytest.mark.parametrize("name", ["tiles", "rows"])
def test_cuda(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"cuda/sanitized_{name}.cu", readable(source(name).text))


def test_nothing_of_it_is_there_when_it_is_off() -> None:
    for name in KERNELS:
        made = generate(plain(name))
        assert not re.search(r"SANITIZE|check_bounds|BOUNDS|poison", made.text)
        assert made.sanitize == 0


def test_exit_words_are_exchanged_so_that_scratch_may_be_poisoned() -> None:
    assert not generate(plain("unwritten")).remote
    assert source("unwritten").remote


def test_outputs_that_are_only_written_are_known() -> None:
    assert source("tiles").only_written == ("c",)
    assert generate(ODD["epilogue"]).only_written


@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str) -> None:
    clean(source(name))


@pytest.mark.parametrize("name", ["one warpgroup", "conditional", "team"])
def test_corners_of_the_language_compile(name: str) -> None:
    clean(generate(sanitized(ODD[name]), sanitize=1))
