"""The collectives on GPUs: ranks that share one as threads, and processes with a GPU each."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from collective_calls import Call, make

import pk
import pk.ops
from pk.ops import collective_plans, collectives
from pk.runtime.group import current
from tests.gpu.passing import record

pytestmark = pytest.mark.gpu(1)
OPERATORS = tuple(collectives.DIMENSIONS)
BF16 = torch.bfloat16
HOP_US, MOVED_INSIDE = collective_plans.HOP_US, collective_plans.MOVED_INSIDE


def _many(rank: int, calls: list[Call], world: int, hop_us: float) -> list[torch.Tensor]:
    """Each call twice: the bits must be the same.  Where sums take two hops, peers write all that they can."""
    collective_plans.HOP_US, collective_plans.MOVED_INSIDE = hop_us, MOVED_INSIDE if hop_us > 0 else 0
    try:
        found = [[call.run(rank, world, seed) for seed, call in enumerate(calls)] for _ in range(2)]
    finally:
        current().barrier("all have made their plans")
        collective_plans.HOP_US, collective_plans.MOVED_INSIDE = HOP_US, MOVED_INSIDE
    for call, first, second in zip(calls, *found, strict=True):
        raw = [x.contiguous().view(-1).view(torch.uint8) for x in (first, second)]
        assert torch.equal(*raw), f"other bits: {call}"
    return found[0]


def _checked(world: int, backend: str | None, hop_us: float, count: int, most: int) -> None:
    rng = random.Random(f"{world} {hop_us}")
    calls = [make(rng, world, most) for _ in range(count)] + [make(rng, world, most, "all_reduce") for _ in range(4)]
    calls += [Call(o, (world, 3_000_001), (0,) * len(collectives.DIMENSIONS[o]), BF16, "out") for o in OPERATORS]
    ranks = pk.spawn(_many, world, backend, (calls, world, hop_us))
    for seed, call in enumerate(calls):
        call.check({rank: results[seed] for rank, results in enumerate(ranks)}, world, seed)


@pytest.mark.parametrize("hop_us", [1e9, -1.0], ids=["one hop", "two hops"])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu(world: int, hop_us: float) -> None:
    _checked(world, "cuda-threads", hop_us, 40, 200_000)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("hop_us", [1e9, -1.0], ids=["one hop", "two hops"])
def test_processes(hop_us: float) -> None:
    _checked(2, "cuda", hop_us, 60, 2_000_000)


def _all_bits(rank: int, world: int) -> None:
    """NaN with whatever payload: a tile that only moves is neither widened nor rounded."""
    every = [
        torch.randint(-(2**31), 2**31 - 1, (1 << 18,), generator=torch.Generator().manual_seed(r)).int()
        for r in range(world)
    ]
    for shape in ((1 << 18,), (1 << 9, 1 << 9), (1 << 13, 1 << 5)):
        got = pk.ops.all_gather(every[rank].view(shape).to(pk.device()).view(BF16), dim=-1)
        want = torch.cat([x.view(shape).view(BF16) for x in every], -1)
        assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


def test_all_bits_move() -> None:
    pk.spawn(_all_bits, 2, "cuda-threads", (2,))


def _gradients(rank: int) -> None:
    for operator, dims in (("all_gather", (1,)), ("reduce_scatter", (1,)), ("all_reduce", ()), ("all_to_all", (0, 1))):
        x = torch.ones(64, 128, device=pk.device(), dtype=BF16, requires_grad=True)
        getattr(pk.ops, operator)(x, *dims).sum().backward()
        assert x.grad is not None
        assert x.grad.unique().tolist() == [1.0 if operator in ("reduce_scatter", "all_to_all") else 2.0], operator


def test_gradients() -> None:
    pk.spawn(_gradients, 2, "cuda-threads")


def _graph(rank: int, world: int) -> None:
    """Replays with new values each time; the first calls have grown the work space."""
    x = torch.empty(world * 1000, 24, device=pk.device(), dtype=torch.float32)
    there = pk.empty((world * world * 1000, 24), torch.float32)
    outputs: list[Any] = []

    def step() -> None:
        outputs[:] = [
            pk.ops.all_reduce(x), pk.ops.reduce_scatter(x), pk.ops.all_gather(x, out=there), pk.ops.all_to_all(x, 0, 1),
        ]  # fmt: skip

    x.fill_(rank)
    step()
    pk.synchronize()
    graph = record(step)
    for replay in range(20):
        x.fill_(rank + replay)
        graph.replay()
        pk.synchronize()
        total = float(sum(r + replay for r in range(world)))
        summed, part, gathered, exchanged = outputs
        assert bool((summed == total).all())
        assert bool((part == total).all())
        for moved in (gathered.view(world, -1), exchanged.view(1000, world, 24).transpose(0, 1).flatten(1)):
            assert [float(row.unique()) for row in moved] == [r + replay for r in range(world)]


@pytest.mark.parametrize("world", [2, 4])
def test_graphs(world: int) -> None:
    pk.spawn(_graph, world, "cuda-threads", (world,))


def _many_sizes(rank: int) -> None:
    """Sizes that grow and shrink, back to back without waiting: work space is reused while a peer may be behind."""
    rng = random.Random(0)
    for turn in range(300):
        count = rng.choice((1, 7, 512, 5000, 70_001, 400_000))
        x = torch.full((2, count), float(rank + turn % 50), device=pk.device())
        y = pk.ops.all_reduce(x) if turn % 2 else pk.ops.all_gather(pk.ops.reduce_scatter(x))
        if turn % 10 == 9:
            assert bool((y == 1 + 2 * (turn % 50)).all()), (turn, count)


def test_sizes_back_to_back() -> None:
    pk.spawn(_many_sizes, 2, "cuda-threads")


@pytest.mark.gpu(2)
def test_sizes_back_to_back_in_processes() -> None:
    pk.spawn(_many_sizes, 2, "cuda")
