"""``pk.communicator(joins=True)``: blocks that communicate first and then compute."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

import pk
from pk import errors
from pk.ops import parallel_kernels
from pk.runtime.group import current
from tests.dsl.reading import refusal

SMALL = {"BM": 64, "BN": 32, "BK": 32, "P": 32, "STAGES": 2, "OUTS": 2, "WARPGROUPS": 1, "BC": 32, "PARTS": 2}


@pk.kernel
def spread(
    x: pk.Global,  # (M, 16)
    y: pk.Parallel,  # (M, 16)  of the rank to the left
    out: pk.Global,  # (M, 16)
    B: pk.constexpr = 16, JOINS: pk.constexpr = True, SIGNAL: pk.constexpr = True, WAIT: pk.constexpr = True,
):  # fmt: skip
    """out = twice what the rank to the left has."""
    landed, right = pk.signals(pk.cdiv(x.rows, B)), (pk.rank() + 1) % pk.world_size()
    with pk.communicator(sms=2, joins=JOINS):
        for m in pk.tasks(pk.cdiv(x.rows, B)):
            pk.store(y[right], pk.load(x, (m, 0), (B, B)), (m, 0))
            if SIGNAL:
                pk.signal(landed, m, right)
    for m in pk.tasks(pk.cdiv(x.rows, B), dynamic=True):
        if WAIT:
            pk.wait(landed, m, 1)
        pk.store(out, pk.load(y[pk.rank()], (m, 0), (B, B)) * 2.0, (m, 0))


@pk.kernel
def waits_for_itself(x: pk.Global, out: pk.Global, B: pk.constexpr = 16):
    """With two blocks: the communicator waits for the task that would come behind another that waits for it."""
    done, sent = pk.signals(2), pk.signals(1)
    with pk.communicator(sms=1, joins=True):
        pk.wait(done, 1, 1)
        pk.signal(sent, 0, pk.rank())
    for m in pk.tasks(2, dynamic=True):
        if m == 0:
            pk.wait(sent, 0, 1)
        pk.store(out, pk.load(x, (m, 0), (B, B)), (m, 0))
        pk.signal(done, m, pk.rank())


def gathered(rank: int, world: int, shape: tuple[int, int, int], options: dict[str, Any]) -> tuple[Any, ...]:
    m, n, k = shape
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(rank)).bfloat16()
    b = torch.randn(k, n, generator=torch.Generator().manual_seed(99)).bfloat16()
    found = []
    for join in (False, True):
        c = torch.full((world, m, n), float("nan"), dtype=torch.bfloat16)
        parallel_kernels.all_gather_matmul(x=x, b=b, c=c, JOIN=join, **SMALL, **options)
        pk.synchronize()
        found.append(c)
    current(None).barrier("done")
    every = [torch.randn(m, k, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
    return *found, torch.stack([y.double() @ b.double() for y in every])


@pytest.mark.parametrize(("world", "shape"), [(1, (64, 32, 32)), (2, (160, 72, 64)), (3, (72, 40, 96)), (4, (8, 8, 8))])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_bits_as_without(
    world: int, shape: tuple[int, int, int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PK_SEED", str(seed))
    for plain, joined, want in pk.spawn(gathered, world, "sim", (world, shape, {"COMM": 2, "sms": 5})):
        assert torch.equal(plain, joined)
        assert float((joined.double() - want).norm() / want.norm()) < 1e-2


def blocks(rank: int) -> torch.Tensor:
    return torch.full((80, 16), float(rank + 1))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_checker_finds_nothing(world: int) -> None:
    found = pk.check(
        spread, blocks, torch.zeros(80, 16), torch.zeros(80, 16), world_size=world, sms=5,
        reference=lambda given: {"out": [2 * given[r - 1]["x"] for r in range(world)]},
    )  # fmt: skip
    assert found.ok, found


def test_the_checker_finds_what_is_wrong() -> None:
    given = (blocks, torch.zeros(80, 16), torch.zeros(80, 16))
    forgot = pk.check(spread, *given, SIGNAL=False, world_size=2, schedules=3, sms=5)
    assert {f.kind for f in forgot.findings} & {"deadlock", "bad-count", "missing-signal"}
    hasty = pk.check(spread, *given, WAIT=False, world_size=2, schedules=10, sms=5)
    assert "race" in {f.kind for f in hasty.findings}


def test_the_operators_kernel_is_clean() -> None:
    x, b = (lambda rank: torch.randn(72, 64).bfloat16()), torch.randn(64, 40).bfloat16()
    c = torch.zeros(2, 72, 40, dtype=torch.bfloat16)
    found = pk.check(
        parallel_kernels.all_gather_matmul, x, b, c, JOIN=True, COMM=2, **SMALL, world_size=2, schedules=30, sms=5
    )
    assert found.ok, found


def test_blocks_that_join_too_late_are_a_deadlock() -> None:
    def run(rank: int) -> None:
        waits_for_itself(torch.ones(32, 16), torch.zeros(32, 16), sms=2)

    with pytest.raises(errors.RankError) as caught:
        pk.spawn(run, 1, "sim")
    said = str(caught.value)
    assert "`waits_for_itself` deadlocks" in said
    assert "team: begins when the communicator of its block has ended" in said
    assert "communicator's team: wait of done[1] needs 1" in said
    assert "or drop joins=" in said
    assert "with pk.communicator(sms=1, joins=True):" in said


def test_it_is_not_explored() -> None:
    found = pk.check(
        spread, blocks, torch.zeros(80, 16), torch.zeros(80, 16), world_size=2, sms=4, exhaustive=True, schedules=2
    )
    assert found.ok
    assert "not every interleaving was explored: blocks that take tasks when their communicator has ended" in str(found)


def test_a_communicator_warp_beside_one_that_joins_is_refused() -> None:
    source = """
    @pk.kernel
    def k(x: pk.Global):
        ring, seen = pk.pipeline(2, t=pk.shared((64, 64), x.dtype)), pk.signals(4)
        with pk.communicator(sms=2, joins=True):
            pk.wait(seen, 0, 1)
        with pk.communicator():
            pk.signal(seen, 0, pk.rank())
        for m in pk.tasks(4, dynamic=True):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, 0))
            with pk.consumer():
                with ring.drain() as s:
                    t = pk.load(s.t)
    """
    assert "beside a communicator warp, line" in refusal(errors.WrongOperand, source)


HEAD = "@pk.kernel\ndef k(x: pk.Global, N: pk.constexpr = 2):\n    seen = pk.signals(4)\n"
TASKS = "for m in pk.tasks(4, dynamic={dynamic}):\n    pk.signal(seen, m, pk.rank())\n"
JOINS = "with pk.communicator(sms=2, joins=True):\n    "
REFUSED: dict[str, tuple[type[errors.PkError], str, bool, str]] = {  # error, body, dynamic tasks, words
    "a warp": (errors.WrongOperand, "with pk.communicator(joins=True):\n    pass\n", True, "without sms="),
    "dealt": (errors.WrongOperand, JOINS + "pk.wait(seen, 0, 1)\n", False, "dealt to the blocks beforehand"),
    "two": (
        errors.WrongOperand,
        "with pk.communicator(sms=1):\n    pk.wait(seen, 0, 1)\n" + JOINS + "pk.wait(seen, 1, 1)\n",
        True, "beside another communicator",
    ),
    "pairs": (
        errors.WrongOperand, JOINS + "for a, b in pk.tasks(2, 2, cluster=2):\n        pk.signal(seen, a, pk.rank())\n",
        True, "cluster=2",
    ),
    "no tasks": (
        errors.WrongOperand, JOINS + "pk.signal(seen, 0, pk.rank())\npk.wait(seen, 0, 2)\n", False, "that has no tasks",
    ),
    "no SM": (
        errors.WrongOperand, "with pk.communicator(sms=0, joins=True):\n    pk.wait(seen, 0, 1)\n", True,
        "pk.communicator(sms=0)",
    ),
    "no flag": (
        errors.NotConstant, "with pk.communicator(sms=2, joins=N):\n    pk.wait(seen, 0, 1)\n", True, "joins= is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_join(name: str) -> None:
    kind, body, dynamic, words = REFUSED[name]
    tasks = "" if name == "no tasks" else TASKS.format(dynamic=dynamic)
    shown = refusal(kind, HEAD + textwrap.indent(body + tasks, "    "))
    assert words in shown, shown
    assert "^\n" in shown, shown
    assert len(shown.splitlines()[-1]) > 20  # advice


def test_emitted() -> None:
    program = parallel_kernels.all_gather_matmul.specialise(
        x=pk.spec("bfloat16", 2), b=pk.spec("bfloat16", 2), c=pk.spec("bfloat16", 3), JOIN=True
    )
    source = program.source.text
    entry = source[source.index('extern "C"') :]
    assert entry.count("main_kernel(p,") == 1
    assert "} else {" not in entry
    assert "shared.ring_ring.retire();" in source
    assert "mbarrier_invalidate(shared.launch.entered);" in source
    assert source.count("launch_close(role, SITE_EXIT)") == 1  # a block is counted out once
    resources = program.binary.resources
    assert (resources.spill_bytes, resources.local_bytes) == (0, 0)
