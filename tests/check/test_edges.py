"""Lines that miss their tensor: what is a finding, and the tails, halos and sentinels that are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.sim.findings import KINDS, Finding, Place, causes, distinct
from pk.sim.run import ir


# ------------------------------------------------------------------------------------------------ too small a scratch
@pk.kernel
def three_lines(x: pk.Global, out: pk.Global, SLOTS: pk.constexpr):
    s = pk.scratch((SLOTS, x.cols), pk.float32)
    me = pk.rank()
    for _ in pk.tasks(1):
        pk.store(s[me], pk.load(x, (0, 0), (1, 32)), (0, 0))
        pk.store(s[me], pk.load(x, (1, 0), (1, 32)), (1, 0))
        pk.store(s[me], pk.load(x, (2, 0), (1, 32)), (2, 0))
        pk.store(out, pk.load(s[me], (0, 0), (1, 32)) + pk.load(s[me], (1, 0), (1, 32)), (0, 0))


@pk.kernel
def one_loop(x: pk.Global, out: pk.Global, SLOTS: pk.constexpr):
    s = pk.scratch((SLOTS, x.cols), pk.float32)
    me = pk.rank()
    for _ in pk.tasks(1):
        for j in pk.range(3):
            pk.store(s[me], pk.load(x, (j, 0), (1, 32)), (j, 0))
        acc = pk.zeros((1, 32), pk.float32)
        for j in pk.range(3):
            acc = acc + pk.load(s[me], (j, 0), (1, 32))
        pk.store(out, acc, (0, 0))


@pk.kernel
def slabs(x: pk.Global, out: pk.Global, SLOTS: pk.constexpr):
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 8)
    s, got = pk.scratch((W, SLOTS, x.rows, 1), pk.float32), pk.signals(n)
    for i in pk.tasks(n):
        t = pk.load(x, (i, 0), (8, 32))
        pk.store(s, pk.max(t, axis=1), (me, 0, i, 0))
        pk.store(s, pk.min(t, axis=1), (me, 1, i, 0))
        pk.store(s, pk.sum(t, axis=1), (me, 2, i, 0))
        pk.signal_all(got, i)
        pk.wait(got, i, W)
        acc = pk.zeros((8, 1), pk.float32)
        for r in pk.range(W):
            acc = acc + pk.load(s[me], (r, 0, i, 0), (8, 1)) + pk.load(s[me], (r, 2, i, 0), (8, 1))
        pk.store(out, acc, (i, 0))


@pk.kernel
def one_half(x: pk.Global, out: pk.Global, BOTH: pk.constexpr):
    """Two buffers of as many rows as x has, or only one."""
    s, n = pk.scratch((x.rows * BOTH, x.cols), pk.float32), x.rows
    me = pk.rank()
    for i in pk.tasks(n):
        pk.store(s[me], pk.load(x, (i, 0), (1, 32)), (i, 0))
        pk.store(s[me], pk.load(x, (i, 0), (1, 32)), (i + n, 0))
        pk.store(out, pk.load(s[me], (i, 0), (1, 32)), (i, 0))


def checked(kernel: Any, *args: Any, world: int = 2, sms: int = 2, **constants: Any) -> list[Finding]:
    options: dict[str, Any] = {"world_size": world, "sms": sms, "schedules": 2, "shrink": False}
    return list(pk.check(kernel, *args, **options, **constants).findings)


def told(findings: list[Finding]) -> list[str]:
    assert all(f.kind == "out-of-range" for f in findings), findings
    return [f.places[0].span.text.strip() for f in findings]


X = torch.randn(8, 32)


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_a_line_for_a_slot_too_many() -> None:
    assert told(checked(three_lines, X, nothing(1, 32), SLOTS=2)) == [
        "pk.store(s[me], pk.load(x, (2, 0), (1, 32)), (2, 0))"
    ]
    assert not checked(three_lines, X, nothing(1, 32), SLOTS=3)


def test_a_turn_for_a_slot_too_many() -> None:
    findings = checked(one_loop, X, nothing(1, 32), SLOTS=2)
    assert told(findings) == [
        "pk.store(s[me], pk.load(x, (j, 0), (1, 32)), (j, 0))",
        "acc = acc + pk.load(s[me], (j, 0), (1, 32))",
    ]
    assert findings[0].message == "the team writes s[2, 0:32], which writes nothing: `s` has shape (2, 32)"
    assert findings[0].advice == (
        "Entry 0 of the coordinate counts elements, and `s` has 2 elements there: correct it, make `s` larger, or "
        "guard the line with an `if`."
    )
    assert not checked(one_loop, X, nothing(1, 32), SLOTS=3)


@pytest.mark.parametrize("world", [1, 3])
def test_a_slab_too_few(world: int) -> None:
    x = torch.randn(20, 32)
    lines = told(checked(slabs, x, nothing(20, 1), world=world, SLOTS=2))
    assert lines[0] == "pk.store(s, pk.sum(t, axis=1), (me, 2, i, 0))"
    assert not checked(slabs, x, nothing(20, 1), world=world, SLOTS=3)


def test_a_buffer_too_few() -> None:
    findings = checked(one_half, X, nothing(8, 32), BOTH=1)
    assert told(findings) == ["pk.store(s[me], pk.load(x, (i, 0), (1, 32)), (i + n, 0))"]
    assert findings[0].message.endswith("; no tile of this line lies inside it in this launch")
    assert not checked(one_half, X, nothing(8, 32), BOTH=2)


# ---------------------------------------------------------------------------------------------- leading dimensions
@pk.kernel
def planes(x: pk.Global, out: pk.Global, FROM: pk.constexpr, TO: pk.constexpr):  # (planes, M, N)
    for m in pk.tasks(pk.cdiv(x.rows, 8)):
        pk.store(out, pk.load(x, (FROM, m, 0), (8, 32)), (TO, m, 0))
        pk.store(out, pk.load(x, (0, m, 0), (8, 32)), (0, m, 0))


@pytest.mark.parametrize(("source", "target", "line"), [(2, 1, "reads x[2, "), (1, 2, "writes out[2, ")])
def test_a_plane_that_is_not_there(source: int, target: int, line: str) -> None:
    (finding,) = checked(planes, torch.randn(2, 20, 32), nothing(2, 20, 32), FROM=source, TO=target)
    assert finding.kind == "out-of-range"
    assert line in finding.message
    assert not checked(planes, torch.randn(2, 20, 32), nothing(2, 20, 32), FROM=1, TO=1)


# ------------------------------------------------------------------------------------------------ tails are no mistake
@pk.kernel
def dealt_planes(x: pk.Parallel, out: pk.Global):
    """Planes dealt to the ranks, rows in blocks of 4, none guarded."""
    me, W = pk.rank(), pk.world_size()
    for i, m in pk.tasks(pk.cdiv(x.depth, W), pk.cdiv(x.rows, 4)):
        for r in pk.range(4):
            pk.store(x[me], pk.load(out, (i * W + me, m * 4 + r, 0), (1, 32)), (i * W + me, m * 4 + r, 0))


@pk.kernel
def through_scratch(x: pk.Global, out: pk.Global):
    """Rows in blocks of 4 and tiles of 64 columns in two halves, through scratch just as large as x; none guarded."""
    s, me = pk.scratch((x.rows, x.cols), pk.float32), pk.rank()
    for m in pk.tasks(pk.cdiv(x.rows, 4)):
        for r in pk.range(4):
            pk.store(s[me], pk.load(x, (m * 4 + r, 0), (1, 32)), (m * 4 + r, 0))
            pk.store(s[me], pk.load(x, (m * 4 + r, 1), (1, 32)), (m * 4 + r, 1))
            pk.store(out, pk.load(s[me], (m * 4 + r, 0), (1, 64)), (m * 4 + r, 0))


@pk.kernel
def neighbours(x: pk.Global, out: pk.Global):
    """Zeros around a block of planes."""
    for d, m in pk.tasks(x.depth, pk.cdiv(x.rows, 8)):
        t = pk.load(x, (d, m, 0), (8, 32)) * 2.0
        t = t - pk.load(x, (d - 1, m, 0), (8, 32)) - pk.load(x, (d + 1, m, 0), (8, 32))
        pk.store(out, t, (d, m, 0))


@pk.kernel
def prefix(x: pk.Global, out: pk.Global):
    """What the ranks before have, from slots of which the one before the first is zero."""
    me, W = pk.rank(), pk.world_size()
    s, got = pk.scratch((W, x.cols), pk.float32), pk.signals()
    for _ in pk.tasks(1):
        pk.store(s, pk.load(x, (0, 0), (1, 32)), (me, 0))
        pk.signal_all(got, ())
        pk.wait(got, (), W)
        pk.store(out, pk.load(s[me], (me - 1, 0), (1, 32)), (0, 0))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tails_are_no_mistake(world: int) -> None:
    planes_ = torch.zeros(5, 6, 32)
    assert not checked(dealt_planes, planes_, planes_.clone(), world=world)
    for cols in (32, 40, 64):
        assert not checked(through_scratch, torch.randn(6, cols), nothing(6, cols), world=world)
    assert not checked(neighbours, torch.randn(3, 20, 32), nothing(3, 20, 32), world=1)
    assert not checked(prefix, X, nothing(1, 32), world=world)


# ------------------------------------------------------------------------------------------------ indices from memory
@pk.kernel
def placed(x: pk.Global, index: pk.Global, out: pk.Global, GUARD: pk.constexpr = False):
    for i in pk.tasks(x.rows):
        to = pk.load(index, i)
        if not GUARD or to >= 0:
            pk.store(out, pk.load(x, (i, 0), (1, 32)), (to, 0))


@pk.kernel
def taken(x: pk.Global, index: pk.Global, out: pk.Global):
    for i in pk.tasks(out.rows):
        pk.store(out, pk.load(x, (pk.load(index, i), 0), (1, 32)), (i, 0))


@pk.kernel
def full_slots(x: pk.Global, out: pk.Global, SLOTS: pk.constexpr = 4):
    """The first four rows to come get a slot, the others none."""
    count, s = pk.signals(), pk.scratch((SLOTS, x.cols), pk.float32)
    for i in pk.tasks(x.rows):
        at = pk.fetch_add(count, (), 1)
        pk.store(s[pk.rank()], pk.load(x, (i, 0), (1, 32)), (at, 0))
        pk.store(out, 1.0, i)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_negative_index_from_memory() -> None:
    index = ints(0, 1, 2, -1, 4, 5, 6, 7)
    (finding,) = checked(placed, X, index, torch.zeros(8, 32), world=1)
    assert told([finding]) == ["pk.store(out, pk.load(x, (i, 0), (1, 32)), (to, 0))"]
    assert finding.message == "the team writes out[-1, 0:32], which writes nothing: `out` has shape (8, 32)"
    assert "guard the line with an `if`" in finding.advice
    assert not checked(placed, X, index, torch.zeros(8, 32), world=1, GUARD=True)
    assert not checked(taken, X, index, nothing(8, 32), world=1)
    assert not checked(taken, X, ints(*[-1] * 8), nothing(8, 32), world=1)


def test_indices_from_memory_that_never_meet_the_tensor() -> None:
    far = ints(*range(8, 16))
    (finding,) = checked(placed, X, far, torch.zeros(8, 32), world=1)
    assert finding.message.endswith("`out` has shape (8, 32); no tile of this line lies inside it in this launch")
    (finding,) = checked(taken, X, far, nothing(8, 32), world=1)
    assert "the team reads x[" in finding.message
    some = ints(*range(7, 15))  # what is beyond the edge may be dropped on purpose
    assert not checked(placed, X, some, torch.zeros(8, 32), world=1)
    assert not checked(full_slots, X, nothing(8), world=1)


# ------------------------------------------------------------------------------------------------------ strict bounds
def make(body: str, lines: int) -> str:
    head = "import pk\n\n@pk.kernel\ndef many(x: pk.Global, out: pk.Global):\n    for i in pk.tasks(2):\n"
    return head + "".join(f"        {body}\n" for _ in range(lines))


def test_tails_do_not_hide_what_is_worse(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 lines write over the edge, then two blocks write to one place."""
    text = make("pk.store(out, pk.load(x, (i, 0), (8, 32)), (i, 0))", 25)
    (tmp_path / "many_lines.py").write_text(text + "        pk.store(out, pk.load(x, (0, 0), (1, 32)), (0, 0))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from many_lines import many  # type: ignore[import-not-found]

    x = torch.randn(12, 20)
    found = pk.check(many, x, nothing(12, 20), world_size=1, sms=2, schedules=2, strict=True, shrink=False).findings
    kinds = [f.kind for f in found]
    first_clipped = kinds.index("clipped")
    assert "race" in kinds[:first_clipped]
    assert set(kinds[first_clipped:]) == {"clipped"}
    lines = [f.places[0].span.line for f in found if f.kind == "clipped"]
    assert len(lines) == len(set(lines)) == 20


@pk.kernel
def doubled(x: pk.Global, out: pk.Global):
    for i in pk.tasks(2):
        pk.store(out, pk.load(x, (i, 0), (8, 32)) * 2.0, (i, 0))


def test_tails_do_not_hide_wrong_results() -> None:
    x = torch.randn(12, 32)
    right = pk.check(doubled, x, nothing(12, 32), world_size=1, schedules=1, strict=True, reference={"out": 2 * x})
    assert [f.kind for f in right.findings] == ["clipped"]
    wrong = pk.check(doubled, x, nothing(12, 32), world_size=1, schedules=1, strict=True, reference={"out": x})
    assert [f.kind for f in wrong.findings] == ["wrong-result", "clipped"]


def test_the_order_of_findings() -> None:
    place = Place(0, 0, "team", "", ir.Span("f.py", 1, 0, 1, 1))
    made = [Finding(kind, kind, (place,), "") for kind in reversed(KINDS)]
    kinds = [f.kind for f in distinct([*made, *made])]
    assert kinds[-3:] == ["lost-signal", "out-of-range", "clipped"]
    assert sorted(kinds) == sorted(KINDS)
    assert [f.kind for f in causes(made)] == [k for k in reversed(KINDS) if k != "clipped"]
