"""Which layout a register tile has: fragment where it meets an mma, linear elsewhere."""

from __future__ import annotations

import pytest

from pk import errors
from pk.ir import split
from pk.ir.layout import Layout, Layouts, exchange_slots, groups, layouts, linear, role_warps
from tests.dsl.reading import read, refusal

BOTH = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Global):
    inputs = pk.pipeline(2, a=pk.shared((128, 64), a.dtype), b=pk.shared((64, 64), b.dtype))
    for m in pk.tasks(pk.cdiv(a.rows, 128)):
        with pk.loader():
            with inputs.fill() as s:
                pk.load_async(s.a, a, (m, 0))
                pk.load_async(s.b, b, (0, 0))
        with pk.consumer(warpgroups=2):
            acc = pk.zeros((128, 64), pk.float32)
            bias = pk.load(c, (0, 0), (1, 64))
            with inputs.drain() as s:
                pk.mma(acc, s.a, s.b)
                other = pk.load(s.a)
            top = pk.max(acc + bias, axis=1)
            low = pk.sum(other, axis=1)
            mask = other > low
            pk.store(c, top, (m, 0))
            pk.store(c, pk.where(mask, other, 0), (m, 0))
            {more}
"""


def consumer(more: str = "pass") -> tuple[Layouts, dict[str, str]]:
    kernel = read(BOTH.replace("{more}", more))
    body = split.slice_role(kernel.compute, "consumer")
    return Layouts(body, 8), dict(layouts(body, 8))


def test_groups_are_what_arithmetic_connects() -> None:
    _, kinds = consumer()
    fragments = dict.fromkeys(("acc", "bias", "top"), "fragment")
    assert kinds == fragments | dict.fromkeys(("other", "low", "mask"), "linear")


def test_a_sum_joins_groups() -> None:
    _, kinds = consumer("pk.store(c, other * top, (m, 0))")
    assert set(kinds.values()) == {"fragment"}


def test_a_shared_tile_separates_them() -> None:
    """What passes through memory is free to be dealt anew: that is what the error advises."""
    message = refusal(errors.ShapeMismatch, BOTH.replace("{more}", "pk.store(c, pk.zeros((8, 64)) + bias, (m, 0))"))
    assert "8 rows cannot be split among 2 warpgroups, and meets `acc`" in message
    assert "through a shared tile" in message


def test_tallest_tile_says_how_many_warps_share_a_row() -> None:
    found, _ = consumer()
    assert found.of_name("low") == Layout("linear", 8, 1)
    assert (linear(8, 2).share, linear(8, 3).share, linear(12, 5).share, linear(8, 1).share) == (4, 2, 2, 8)


def test_every_element_is_dealt() -> None:
    for layout in (linear(8, 8), linear(8, 3), linear(12, 5), linear(4, 1)):
        for rows, cols in ((1, 8), (5, 96), (8, 8192), (3, 33)):
            held = layout.row_slots(rows) * layout.groups * layout.col_slots(cols) * layout.lanes
            assert held >= rows * cols
            assert cols % layout.vector(cols) == 0


def test_columns_in_other_threads_are_refused() -> None:
    message = refusal(errors.ShapeMismatch, BOTH.replace("{more}", "part = other[:, 8:16]"))
    assert "columns 8:16 of a tile (128, 64) lie in other threads" in message


def test_a_tile_that_no_registers_hold() -> None:
    message = refusal(errors.TileTooLarge, BOTH.replace("{more}", "big = pk.full((1024, 512), 1.0)"))
    assert "needs 2048 registers of each of the role's 256 threads" in message


def test_a_copy_that_no_registers_hold() -> None:
    """It takes the registers of its bytes."""
    copy = TEAM.replace("(1, 64)) * 2", "({rows}, 1024))")
    assert read(copy.replace("{rows}", "112"))
    message = refusal(errors.TileTooLarge, copy.replace("{rows}", "128"))
    assert "a register tile (128, 1024) needs 256 registers of each of the role's 256 threads, and they have" in message


def test_words_that_warps_exchange() -> None:
    found, _ = consumer()
    kernel = read(BOTH.replace("{more}", "pk.store(c, pk.sum(acc, axis=0), (m, 0))"))
    body = split.slice_role(kernel.compute, "consumer")
    assert exchange_slots(body, Layouts(body, 8)) == 4
    plain = split.slice_role(read(BOTH.replace("{more}", "pass")).compute, "consumer")
    assert exchange_slots(plain, found) == 0


TEAM = """
@pk.kernel
def k(x: pk.Global):
    for i in pk.tasks(4):
        pk.store(x, pk.load(x, (i, 0), (1, 64)) * 2, (i, 0))
"""


def test_a_team_has_eight_warps_of_its_own() -> None:
    kernel = read(TEAM)
    assert (groups(kernel), role_warps(kernel, kernel.compute, "team")) == (2, 8)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("pk.store(x, pk.load(x, (i, 0), (2, 64), other=0.5) // 2, (i, 0))", "`//` on float32"),
        ("pk.store(x, ~pk.load(x, (i, 0), (2, 64)), (i, 0))", "`~` on register"),
        ("pk.store(x, pk.load(x, (i,), (2, 64)), (i, 0))", "has 1 entry"),
        ("pk.store(x, pk.load(x, (i, 0), (2, 64)))", "without a coordinate"),
        ("pk.store(x, pk.iota((2, 2)), (i, 0))", "pk.iota of shape (2, 2)"),
        ("pk.store(x, pk.iota((1, 64)), (i, 0))", "pk.store of int32 to the global tensor `x` of bfloat16"),
        ("pk.store(x, pk.sum(pk.zeros((2, 64)), axis=2), (i, 0))", "along axis 2"),
        ("pk.store(x, pk.where(i < 2, 1.0, 0.0), (i, 0))", "for a scalar write `x if c else y`"),
        ("pk.store(x, pk.exp2(pk.zeros((2, 64)) < 1), (i, 0))", "pk.exp2 of register[2x64 bool]"),
        ("pk.store(x, pk.zeros((2, 64)) + pk.zeros((4, 64)), (i, 0))", "(2, 64) and (4, 64)"),
        ("pk.store(x, pk.gelu(1.0 * i, approximate='fast'), (i, 0))", "approximate='fast'"),
    ],
)
def test_mistakes_are_named(line: str, text: str) -> None:
    source = TEAM.replace("pk.store(x, pk.load(x, (i, 0), (1, 64)) * 2, (i, 0))", line)
    with pytest.raises(errors.CompileError) as caught:
        read(source)
    assert text in str(caught.value), str(caught.value)
