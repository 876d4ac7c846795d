"""``with pk.communicator():``, one warp beside the other roles: what it may hold, what it computes, what it becomes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pk
from pk import errors
from pk.codegen import readable
from pk.codegen.plan import plan
from pk.ir.mutate import mutants
from pk.ir.text import text
from pk.ops import model, parallel_kernels
from pk.runtime import tracing
from tests import communicator_kernels as k
from tests.dsl.reading import refusal

HEAD = """
@pk.kernel
def k(x: pk.Global, c: pk.Parallel, STAGES: pk.constexpr = 2, WARP: pk.constexpr = True):
    ring = pk.pipeline(STAGES, x=pk.shared((64, 64), x.dtype))
    seen = pk.signals(4)
    rows = pk.cdiv(x.rows, 64)
"""
ROLES = """
for m in pk.tasks(rows):
    with pk.loader():
        with ring.fill() as s:
            pk.load_async(s.x, x, (m, 0))
    with pk.consumer({warpgroups}):
        with ring.drain() as s:
            t = pk.load(s.x)
"""

REFUSED: dict[str, tuple[type[errors.PkError], str, str, str]] = {  # error, body, words of it, the line it shows
    "two": (
        errors.WrongRole, "with pk.communicator():\n    pass\nwith pk.communicator():\n    pass\n" + ROLES,
        "a second pk.communicator() without sms=; the first is in line 8", "with pk.communicator():",
    ),
    "in a loop": (
        errors.WrongRole, "for m in pk.range(rows):\n    with pk.communicator():\n        pass\n" + ROLES,
        "pk.communicator inside a loop, branch or role", "with pk.communicator():",
    ),
    "in a branch": (
        errors.WrongRole, "if rows > 3:\n    with pk.communicator():\n        pass\n" + ROLES,
        "pk.communicator inside a loop, branch or role", "with pk.communicator():",
    ),
    "in a role": (
        errors.WrongRole, "with pk.loader():\n    with pk.communicator():\n        pass\n" + ROLES,
        "pk.communicator inside a loop, branch or role", "with pk.communicator():",
    ),
    "in a communicator": (
        errors.WrongRole, "with pk.communicator(sms=2):\n    with pk.communicator():\n        pass\n" + ROLES,
        "pk.communicator inside a loop, branch or role", "with pk.communicator():",
    ),
    "a role": (
        errors.WrongRole, "with pk.communicator():\n    with pk.loader():\n        pass\n" + ROLES,
        "pk.loader inside a communicator", "with pk.loader():",
    ),
    "a stage": (
        errors.WrongRole, "with pk.communicator():\n    with ring.fill() as s:\n        pass\n" + ROLES,
        "`ring.fill()` may not stand in a communicator", "with ring.fill() as s:",
    ),
    "a bulk load": (
        errors.WrongRole, "with pk.communicator():\n    pk.load_async(ring, x, (0, 0))\n" + ROLES,
        "may not stand in a communicator", "pk.load_async(ring, x, (0, 0))",
    ),
    "no roles": (
        errors.WrongRole, "with pk.communicator():\n    pass\nfor m in pk.tasks(rows):\n    pk.signal_all(seen, 0)",
        "in a kernel whose task loops have no role blocks", "with pk.communicator():",
    ),
    "claimed tasks": (
        errors.WrongOperand, "with pk.communicator():\n    for m in pk.tasks(3, dynamic=True):\n        pass\n" + ROLES,
        "pk.tasks(dynamic=True) in a communicator warp", "for m in pk.tasks(3, dynamic=True):",
    ),
    "paired tasks": (
        errors.WrongOperand,
        "with pk.communicator():\n    for m, n in pk.tasks(4, 4, cluster=2):\n        y = 1\n" + ROLES,
        "pk.tasks(cluster=2) in a communicator warp", "for m, n in pk.tasks(4, 4, cluster=2):",
    ),
    "a name of the others": (
        errors.NameOutOfScope,
        "with pk.storer():\n    pass\nn = rows + 1\nwith pk.communicator():\n    y = n\n" + ROLES,
        "`n` belongs to the compute class and is used in the communicator", "y = n",
    ),
    "a name of its own": (
        errors.NameOutOfScope, "with pk.communicator():\n    y = rows + 1\nz = y\n" + ROLES,
        "`y` does not exist here", "z = y",
    ),
    "a large tile": (
        errors.TileTooLarge,
        "with pk.communicator():\n    t = pk.load(x, (0, 0), (16, 128)) * 2.0\n    pk.store(c, t, (0, 0))\n" + ROLES,
        "a register tile (16, 128) needs 64 registers of each of the communicator warp's 32 threads, and they have 32",
        "t = pk.load(x, (0, 0), (16, 128)) * 2.0",
    ),
    "a large copy": (
        errors.TileTooLarge,
        "with pk.communicator():\n    pk.store(c, pk.load(x, (0, 0), (64, 64)), (0, 0))\n" + ROLES,
        "a register tile (64, 64) needs 64 registers of each of the communicator warp's 32 threads, and they have 32",
        "pk.store(c, pk.load(x, (0, 0), (64, 64)), (0, 0))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    kind, lines, words, line = REFUSED[name]
    source = HEAD + textwrap.indent(lines.format(warpgroups=2).strip("\n"), "    ")
    shown = refusal(kind, source)
    assert words in shown, shown
    assert line in shown, shown
    assert "^\n" in shown, shown
    assert len(shown.splitlines()[-1]) > 20  # advice


# --------------------------------------------------------------------------------------------------------- results
def _gathered(rank: int, world: int, dtype: torch.dtype, constants: dict[str, Any]) -> torch.Tensor:
    x = _numbers(rank, (70, 96), dtype)
    out = torch.zeros(world, 70, 96, dtype=dtype)
    k.gather(x, out, **constants)
    return out


def _numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("constants", [{}, {"DYNAMIC": True}, {"CLUSTER": 2}, {"SMS": 1}], ids=str)
def test_gather(world: int, constants: dict[str, Any]) -> None:
    want = torch.stack([_numbers(r, (70, 96), torch.bfloat16) for r in range(world)])
    for out in pk.spawn(_gathered, world, "sim", (world, torch.bfloat16, constants)):
        assert torch.equal(out, want)


def test_arithmetic() -> None:
    xs = torch.stack([_numbers(r, (37, 152), torch.float32).round() for r in range(3)])

    def body(rank: int) -> tuple[torch.Tensor, ...]:
        total, tops = pk.empty((3, 37, 1), torch.float32), pk.empty((3, 1, 152), torch.float32)
        copy = torch.zeros(37, 152)
        k.reckon(xs[rank].contiguous(), total, tops, copy)
        return total.clone(), tops.clone(), copy

    for rank, (total, tops, copy) in enumerate(pk.spawn(body, 3, "sim")):
        assert torch.equal(total, xs.sum(2, keepdim=True))
        assert torch.equal(tops, xs.amax(1, keepdim=True))
        assert torch.equal(copy, xs[rank])


def test_odd_copies() -> None:
    """Tiles over every edge, rows off 16 bytes, fewer rows than a tile has."""
    x = _numbers(0, (45, 131), torch.bfloat16)
    for rows, cols, at in ((5, 24, 0), (16, 128, 3), (1, 33, 3), (40, 1, 0)):
        y, a = torch.zeros(1, 45, 131).bfloat16(), torch.zeros(16, 16)
        k.odd_copies(x, y, a, torch.zeros(16, 16), R=rows, C=cols, ROWS=max(1, rows - 1), AT=at)
        assert torch.equal(y[0], x)


SHAPES = (  # rows, columns, WARPGROUPS and so on
    ((100, 208, 72), {"BM": 64, "BN": 64, "WARPGROUPS": 1, "STAGES": 2}),
    ((130, 144, 144), {"BM": 64, "BN": 128, "WARPGROUPS": 1, "CHUNKS": 2, "GROUP": 1}),
    ((264, 528, 200), {"BM": 128, "BN": 128, "STAGES": 2, "PUSH": 8}),
)


def _product(
    rank: int, world: int, size: tuple[int, int, int], dtype: torch.dtype, whole: bool, constants: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    m, depth, n = size
    x, b = _numbers(rank, (m, depth), dtype), _numbers(99, (depth, n), dtype)
    c = torch.empty(world, m, n, dtype=torch.bfloat16)
    narrow = dtype.itemsize == 1
    full = pk.empty((world, m, depth), dtype) if whole else None
    parallel_kernels.all_gather_matmul(
        x, b.t().contiguous() if narrow else b, c, full, COMM=0, BC=256 // dtype.itemsize, B_T=narrow, **constants
    )
    return c, None if full is None else full.clone()


EVERY_WORLD = [(torch.bfloat16, world) for world in range(1, 9)]
NARROW = [(dtype, world) for dtype in (torch.float16, torch.float8_e4m3fn) for world in (1, 2, 3)]


@pytest.mark.parametrize(("dtype", "world"), [*EVERY_WORLD, *NARROW], ids=str)
def test_all_gather_matmul(dtype: torch.dtype, world: int) -> None:
    """Against the product in float64, every shape at some world; with and without the gathered rows."""
    size, constants = SHAPES[world % 3]
    (m, depth, n), whole = size, world % 2 == 0
    xs = torch.stack([_numbers(r, (m, depth), dtype) for r in range(world)])
    want = xs.double() @ _numbers(99, (depth, n), dtype).double()
    for c, full in pk.spawn(_product, world, "sim", (world, size, dtype, whole, constants)):
        assert (c.double() - want).norm() <= 4e-3 * want.norm()
        assert full is None or torch.equal(full.view(torch.uint8), xs.view(torch.uint8))


def test_the_operator_takes_it() -> None:
    def body(rank: int) -> list[torch.Tensor]:
        a, b = _numbers(rank, (72, 64), torch.bfloat16), _numbers(9, (64, 48), torch.bfloat16)
        return [pk.ops.all_gather_matmul(a, b, comm_sms=sms, config="c64x128") for sms in (0, 2)]

    for warps, sms in pk.spawn(body, 2, "sim"):
        assert torch.equal(warps, sms)


# ---------------------------------------------------------------------------------------------------------- checks
def _check(world: int, schedules: int = 50, **constants: Any) -> pk.Check:
    return pk.check(
        k.gather, lambda rank: _numbers(rank, (70, 96), torch.bfloat16), torch.zeros(world, 70, 96).bfloat16(),
        world_size=world, schedules=schedules, **constants,
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("constants", [{}, {"DYNAMIC": True}], ids=str)
def test_the_checker_finds_nothing(world: int, constants: dict[str, Any]) -> None:
    assert _check(world, **constants).ok


@pytest.mark.parametrize("world", [2, 3])
def test_the_checker_finds_nothing_in_the_operator(world: int) -> None:
    found = pk.check(
        parallel_kernels.all_gather_matmul, lambda rank: _numbers(rank, (72, 48), torch.bfloat16),
        _numbers(9, (48, 32), torch.bfloat16), torch.zeros(world, 72, 32).bfloat16(), world_size=world, schedules=50,
        COMM=0, BM=64, BN=32, BK=16, P=16, STAGES=2, WARPGROUPS=1, BC=16,
    )  # fmt: skip
    assert found.ok, str(found)


def test_planted_mistakes_are_found() -> None:
    forgot = _check(2, 3, SIGNAL=False)
    assert [f.kind for f in forgot.findings] == ["deadlock"]
    assert "nobody signals" in str(forgot) or "ready" in str(forgot)
    hasty = _check(2, 10, WAIT=False)
    assert {f.kind for f in hasty.findings} & {"race", "unwritten"}, str(hasty)


def test_every_interleaving() -> None:
    x = _numbers(0, (32, 32), torch.bfloat16)
    sizes: dict[str, Any] = {"world_size": 2, "schedules": 2, "sms": 1, "exhaustive": True, "R": 16, "C": 32}
    assert pk.check(k.gather, x, torch.zeros(2, 32, 32).bfloat16(), **sizes).ok
    broken = pk.check(k.gather, x, torch.zeros(2, 32, 32).bfloat16(), SIGNAL=False, **sizes)
    assert "deadlock" in {f.kind for f in broken.findings}


# --------------------------------------------------------------------------------------------------- what it becomes
SPECS = {"x": pk.spec(torch.bfloat16, 2), "out": pk.spec(torch.bfloat16, 3)}


def test_cuda(golden: Callable[[str, str], None]) -> None:
    golden("cuda/communicator_warp.cu", readable(k.gather.specialise(**SPECS).source.text))


def test_plan_and_text(golden: Callable[[str, str], None]) -> None:
    made = k.gather.specialise(**SPECS).ir
    golden("plan/communicator_warp.txt", str(plan(made)))
    assert "    with communicator():\n      for m, n in tasks(rows, cols, group=1):" in text(made)
    role = plan(made).compute.role("communicator")
    assert (role.first_warp, role.warps) == (plan(made).launch_warp + 1, 1)
    assert tracing._role(role.first_warp % 4) == "communicator"
    assert [m.operator for m in mutants(made, frozenset({"drop-signal"}))] == ["drop-signal"]


def test_claims_are_those_of_the_other_roles() -> None:
    source = k.gather.specialise(**SPECS, DYNAMIC=True).source.text
    assert "claims.init(/*warps=*/2)" in source
    warp = source[source.index("void communicator(") : source.index("main kernel")]
    assert "claims" not in warp
    assert "task += gridDim.x" in warp
    paired = k.gather.specialise(**SPECS, CLUSTER=2).source.text
    assert "task += gridDim.x)" in paired[paired.index("void communicator(") : paired.index("main kernel")]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("c128x256", torch.bfloat16), ("c128x256", torch.float8_e4m3fn), ("p128x160", torch.bfloat16)],
    ids=str,
)
def test_nothing_spills(name: str, dtype: torch.dtype) -> None:
    """Eight pieces of 16 bytes a lane are under way in the warp, beside consumers with the largest tiles."""
    tile, narrow = model.CONFIGS[name], dtype.itemsize == 1
    every = tile.constants(dtype.itemsize, 2, True)
    sizes = {c: every[c] for c in ("BM", "BN", "BK", "P", "STAGES", "OUTS", "WARPGROUPS", "PINGPONG")}
    made = parallel_kernels.all_gather_matmul.specialise(
        x=pk.spec(dtype, 2), b=pk.spec(dtype, 2), c=pk.spec(torch.bfloat16, 3), whole=pk.spec(dtype, 3),
        scale=pk.spec(torch.float32, 2), bias=pk.spec(torch.float32, 2), B_T=narrow, ACTIVATION="gelu",
        COMM=0, BC=256 // dtype.itemsize, **sizes,
    )  # fmt: skip
    assert "copied_tile<" in made.source.text
    assert made.binary.resources.spill_bytes == 0
