"""``pk.pipeline(over=p)``: stages that the role in the middle changes in place."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

import pk
from pk import errors
from pk.codegen.plan import plan
from pk.ir.text import text
from pk.ops import parallel_kernels
from tests.dsl.reading import refusal
from tests.over_kernels import doubled, lent

SPECS = {"x": pk.spec("bfloat16", 2), "y": pk.spec("bfloat16", 2)}
WAYS: list[tuple[Any, dict[str, Any]]] = [
    (doubled, {}), (doubled, {"S": 1}), (doubled, {"GROUPS": 2, "B": 128}), (lent, {}), (lent, {"S": 1, "AHEAD": 1}),
    (lent, {"S": 2, "AHEAD": 2}), (lent, {"S": 4, "AHEAD": 4}), (lent, {"S": 3, "AHEAD": 1}), (lent, {"LATE": True}),
]  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("kernel", "options"), WAYS, ids=str)
def test_results_and_the_checker(kernel: Any, options: dict[str, Any]) -> None:
    x = numbers(300, 264)
    found = pk.check(
        kernel, x, torch.zeros_like(x), world_size=1, schedules=30, sms=2, reference={"y": 2 * x}, **options
    )
    assert found.ok, found


@pytest.mark.parametrize(("kernel", "options"), WAYS, ids=str)
def test_compiled(kernel: Any, options: dict[str, Any]) -> None:
    program = kernel.specialise(**SPECS, **options)
    resources = program.binary.resources
    assert (resources.spill_bytes, resources.local_bytes) == (0, 0)
    tile, stages = options.get("B", 64), options.get("S", 3)
    assert plan(program.ir).compute.tile_bytes == stages * tile * tile * 2  # one set of stages


def test_more_ahead_than_stages_is_a_deadlock() -> None:
    x = numbers(64, 512)
    found = pk.check(lent, x, torch.zeros_like(x), world_size=1, schedules=3, sms=1, S=2, AHEAD=3)
    assert {f.kind for f in found.findings} <= {"deadlock", "not-resident"}
    assert found.findings
    late = pk.check(lent, x, torch.zeros_like(x), world_size=1, schedules=3, sms=1, S=2, AHEAD=2, LATE=True)
    assert not late.ok  # it fills a stage that it has not taken back


def test_either_branch_may_load_first() -> None:
    @pk.kernel
    def k(x: pk.Global, y: pk.Global):
        ring = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
        out = pk.pipeline(over=ring)
        for m in pk.tasks(pk.cdiv(x.rows, 64)):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, 0))
            with pk.consumer():
                with ring.drain() as s:
                    with out.fill() as o:
                        if m > 0:
                            pk.store(o.t, pk.full((64, 64), 3.0, pk.float32))
                        else:
                            pk.store(o.t, pk.load(s.t) * 2.0)
            with pk.storer():
                with out.drain() as o:
                    pk.store_async(y, o.t, (m, 0))

    x = numbers(128, 64)
    want = torch.cat([2 * x[:64], torch.full((64, 64), 3.0).bfloat16()])
    assert pk.check(k, x, torch.zeros_like(x), world_size=1, sms=2, schedules=10, reference={"y": want}).ok


def test_it_is_not_explored() -> None:
    x = numbers(64, 64)
    found = pk.check(doubled, x, torch.zeros_like(x), world_size=1, schedules=2, sms=1, exhaustive=True)
    assert found.ok
    assert "not every interleaving was explored: the stages of `ring`, which `out` is over" in str(found)


def test_emitted() -> None:
    program = lent.specialise(**SPECS)
    assert "pipeline out = over ring, compute" in text(program.ir)
    source = program.source.text
    assert "out: consumer -> storer, the stages of ring, changed in place" in source
    assert "out_stage" not in source
    assert source.count("shared.out_ring.wait_empty(ring_at") == 2  # before each fill of the ring below
    storer = source[source.index("void storer(") :]
    begins = storer[: storer.index("ring_at, role, SITE_RING_FILL")]
    assert "shared.out_ring.finish_stores(out_at);" in begins  # it may hold the stage that it waits for
    consumer = source[source.index("void consumer(") : source.index("void storer(")]
    assert consumer.index("role.sync();  // every warp has read t") < consumer.index("        store(o.t")


# ---------------------------------------------------------------------------------------------------------- refused
HEAD = """
@pk.kernel
def k(x: pk.Global, y: pk.Global):
    ring = pk.pipeline(2, t=pk.shared((64, 64), x.dtype))
    {declared}
    for m in pk.tasks(4{options}):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (m, 0))
        with pk.consumer({groups}):
{consumer}
        with pk.storer():
{storer}
"""
STORER = "with out.drain() as o:\n    pk.store_async(y, o.t, (m, 0))\n"
RIGHT = "with ring.drain() as s:\n    with out.fill() as o:\n        pk.store(o.t, pk.load(s.t) * 2.0)\n"
OVER = "out = pk.pipeline(over=ring)"
REFUSED: dict[str, tuple[type[errors.PkError], dict[str, str], str]] = {
    "no pipeline": (errors.WrongOperand, {"declared": "out = pk.pipeline(over=x)"}, "over= is"),
    "stages of its own": (
        errors.WrongOperand, {"declared": "out = pk.pipeline(3, over=ring)"}, "with stages or tiles of its own",
    ),
    "tiles of its own": (
        errors.WrongOperand, {"declared": "out = pk.pipeline(over=ring, t=pk.shared((64, 64), x.dtype))"},
        "with stages or tiles of its own",
    ),
    "over one over": (
        errors.PipelineMisused, {"declared": "a = pk.pipeline(over=ring)\n    out = pk.pipeline(over=a)"},
        "which nothing fills",
    ),
    "outside": (
        errors.PipelineMisused,
        {"consumer": "with ring.drain() as s:\n    v = pk.load(s.t)\nwith out.fill() as o:\n    pk.store(o.t, v)\n"},
        "`ring.drain()` with 0 `out.fill()` directly inside it",
    ),
    "twice": (
        errors.PipelineMisused,
        {"consumer": RIGHT + "    with out.fill() as o:\n        pk.store(o.t, pk.load(s.t))\n"},
        "`ring.drain()` with 2 `out.fill()` directly inside it",
    ),
    "sometimes": (
        errors.PipelineMisused,
        {
            "consumer": "with ring.drain() as s:\n    if m > 1:\n        with out.fill() as o:\n"
            "            pk.store(o.t, pk.load(s.t))\n",
        },
        "with 0 `out.fill()`",
    ),
    "read after": (
        errors.PipelineMisused,
        {
            "consumer": RIGHT + "    v = pk.load(s.t)\n    pk.store(y, v, (m, 0))\n",
        },
        "is read after a store to its stage",
    ),
    "read in the next turn": (
        errors.PipelineMisused,
        {
            "consumer": "with ring.drain() as s:\n    with out.fill() as o:\n        for i in pk.range(3):\n"
            "            pk.store(o.t, pk.load(s.t) * 2.0)\n",
        },
        "is read after a store to its stage",
    ),
    "no consumer": (
        errors.PipelineMisused,
        {
            "groups": "", "consumer": "    v = m\n",
            "storer": "with ring.drain() as s:\n    with out.fill() as o:\n        pk.load_async(o.t, x, (m, 0))\n",
        },
        "Only a consumer changes stages in place",
    ),
    "pingpong": (errors.PipelineMisused, {"groups": "warpgroups=2, pingpong=True"}, "a pingpong consumer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    kind, parts, words = REFUSED[name]
    given = {"declared": OVER, "options": "", "groups": "", "consumer": RIGHT, "storer": STORER} | parts
    given |= {role: textwrap.indent(given[role], " " * 12) for role in ("consumer", "storer")}
    shown = refusal(kind, HEAD.format(**given))
    assert words in shown, shown
    assert "^\n" in shown, shown
    assert len(shown.splitlines()[-1]) > 20  # advice


# --------------------------------------------------------------------------------------------------- sums over ranks
SMALL = {
    "BM": 64, "BN": 64, "BK": 32, "P": 16, "STAGES": 2, "WARPGROUPS": 1, "LAG": 2, "STEPS": 2, "SHIFT": 1,
}  # fmt: skip


def scattered(rank: int, world: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    a, b = numbers(world, m, k, seed=rank), numbers(k, n, seed=50 + rank)
    bias = torch.randn(1, n, generator=torch.Generator().manual_seed(5))
    results = []
    for options in ({}, {"IN_PLACE": True, "PARTS": 3, "AHEAD": 3}, {"IN_PLACE": True, "PARTS": 1, "AHEAD": 1}):
        c = torch.full((m, n), float("nan")).bfloat16()
        parallel_kernels.matmul_reduce_scatter_ordered(
            a=a, b=b, c=c, bias=bias, ACTIVATION="relu", sms=4, **SMALL, **options
        )
        pk.synchronize()
        results.append(c)
    assert torch.equal(results[0], results[1])
    return results[0], results[2]


@pytest.mark.parametrize("world", range(1, 9))
def test_sums_have_the_same_bits(world: int) -> None:
    shape = [(136, 72, 64), (8, 8, 8), (64, 200, 40)][world % 3]
    for plain, in_place in pk.spawn(scattered, world, "sim", (world, shape)):
        assert torch.isfinite(plain).all()
        assert torch.equal(plain, in_place)


def reduced(rank: int, world: int, shape: tuple[int, int, int], symmetric: bool) -> list[torch.Tensor]:
    m, n, k = shape
    a, b = numbers(m, k, seed=rank), numbers(k, n, seed=50 + rank)
    results = []
    for options in ({}, {"IN_PLACE": True, "PARTS": 3, "AHEAD": 3}, {"IN_PLACE": True, "PARTS": 1, "AHEAD": 1}):
        made = pk.empty((m, n), torch.bfloat16) if symmetric else torch.empty(m, n, dtype=torch.bfloat16)
        parallel_kernels.matmul_all_reduce_ordered(
            a=a, b=b, **{"c" if symmetric else "out": made}, ACTIVATION="relu", sms=4, PR=16, **SMALL, **options
        )
        pk.synchronize()
        results.append(made.clone())
    return results


@pytest.mark.parametrize("world", range(1, 9))
def test_sums_on_every_rank_have_the_same_bits(world: int) -> None:
    shape = [(136, 72, 64), (8, 8, 8), (64, 200, 40)][world % 3]
    every = pk.spawn(reduced, world, "sim", (world, shape, world % 2 == 0))
    for plain, *in_place in every:
        assert torch.isfinite(plain).all()
        assert torch.equal(plain, every[0][0])
        assert all(torch.equal(plain, x) for x in in_place)


@pytest.mark.parametrize("world", [2, 3])
def test_the_checker_finds_nothing_in_sums(world: int) -> None:
    found = pk.check(
        parallel_kernels.matmul_reduce_scatter_ordered, lambda r: numbers(world, 72, 32, seed=r),
        lambda r: numbers(32, 72, seed=9 + r), torch.zeros(72, 72).bfloat16(), world_size=world, schedules=40, sms=3,
        IN_PLACE=True, PARTS=3, AHEAD=3, **SMALL,
    )  # fmt: skip
    assert found.ok, found


# ------------------------------------------------------------------------------------------- what a storer may hold
@pk.kernel
def waits_between(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):
    """A storer that has just waited for its stores, and then lends and takes back in turn."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    out, sent = pk.pipeline(over=ring), pk.signals(1)
    cols = pk.cdiv(x.cols, B)
    for m in pk.tasks(pk.cdiv(x.rows, B)):
        with pk.consumer():
            for n in pk.range(cols):
                with ring.drain() as s:
                    with out.fill() as o:
                        pk.store(o.t, pk.load(s.t) * 2.0)
        with pk.storer():
            for n in pk.range(2):
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
            with out.drain() as o:
                pk.store_async(y, o.t, (m, 0))
            pk.wait(sent, 0, 0)
            for n in pk.range(cols - 2):
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n + 2))
                with out.drain() as o:
                    pk.store_async(y, o.t, (m, n + 1))
            with out.drain() as o:
                pk.store_async(y, o.t, (m, cols - 1))


@pk.kernel
def two_rings(x: pk.Global, y: pk.Global, z: pk.Global, B: pk.constexpr = 64):
    """A storer that drains two rings: at the next task it waits for the first, of which the consumer comes last."""
    first, second = pk.pipeline(1, t=pk.shared((B, B), x.dtype)), pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    for m in pk.tasks(pk.cdiv(x.rows, B)):
        with pk.consumer():
            for n in pk.range(2):
                with second.fill() as o:
                    pk.store(o.t, pk.load(x, (m, n), (B, B)))
            with first.fill() as o:
                pk.store(o.t, pk.load(x, (m, 0), (B, B)))
        with pk.storer():
            with first.drain() as o:
                pk.store_async(y, o.t, (m, 0))
            for n in pk.range(2):
                with second.drain() as o:
                    pk.store_async(z, o.t, (m, n))


def storer_of(kernel: Any, **specs: Any) -> str:
    text = kernel.specialise(**specs).source.text
    begin = text.index("void storer(")
    return text[begin : text.index("\n}\n", begin)]


def test_a_storer_frees_what_it_holds_before_it_lends_in_every_turn() -> None:
    text = storer_of(waits_between, **SPECS)
    assert text.count("shared.out_ring.wait_empty(ring_at") == 2
    for part in text.split("shared.out_ring.wait_empty(ring_at")[:-1]:
        assert "shared.out_ring.finish_stores(out_at);" in part.splitlines()[-2]
    x = numbers(128, 320)
    assert pk.check(waits_between, x, torch.zeros_like(x), world_size=1, sms=2, reference={"y": 2 * x}).ok


def test_a_storer_of_two_rings_frees_what_it_holds_before_the_next_task() -> None:
    text = storer_of(two_rings, **SPECS, z=pk.spec("bfloat16", 2))
    inside = text[text.index("for (; task < tasks") :]
    assert inside.rindex("shared.second_ring.finish_stores(second_at);", 0, inside.index("\n    }\n")) > inside.index(
        "second_ring.release_after_store"
    )
