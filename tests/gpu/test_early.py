"""Launches that do not wait for every rank to begin: with ranks that are late, and between launches that do wait."""

from __future__ import annotations

import random
import time

import pytest
import torch

import pk
import pk.ops
from pk.runtime import context as contexts
from pk.runtime.group import current
from tests.gpu.passing import settle

pytestmark = pytest.mark.gpu(1)
LIMIT = 1.0
SMALL, LARGE = 1000, (contexts.EARLY_BYTES // 2) + 1000  # elements: the second has too much scratch to be early


@pk.kernel
def total(x: pk.Global, out: pk.Global, B: pk.constexpr = 256):
    """out := the sum of every rank's x."""
    me, world = pk.rank(), pk.world_size()
    slots, got = pk.scratch((world, x.cols), x.dtype), pk.signals(pk.cdiv(x.cols, B))
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        for r in pk.range(world):
            pk.store(slots[r], pk.load(x, (0, i), (1, B)), (me, i))
            pk.signal(got, i, r)
        pk.wait(got, i, world)
        acc = pk.zeros((1, B), pk.float32)
        for r in pk.range(world):
            acc = acc + pk.load(slots[me], (r, i), (1, B))
        pk.store(out, acc, (0, i))


def late(rank: int) -> bool:
    """Rank 1 begins the second launch after the time limit of waits."""
    x = torch.full((1, SMALL), float(rank + 1), device=pk.device())
    out = torch.zeros(1, SMALL, device=pk.device())
    total(x, out)
    settle("one launch")
    out.zero_()
    if rank == 1:
        time.sleep(2 * LIMIT)
    total(x, out)
    pk.synchronize()
    return bool((out == 3).all())


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit of a wait begins when every rank has begun."""
    monkeypatch.setenv("PK_TIMEOUT_S", str(LIMIT))
    assert pk.spawn(late, 2, "cuda-processes") == [True, True]


def mixed(rank: int, world: int, steps: int) -> int:
    """Early launches and others, in an order that is the ranks' own, each rank held up now and then; wrong results."""
    order, pace, wrong = (
        random.Random(world),
        random.Random(rank),
        torch.zeros(1, dtype=torch.int64, device=pk.device()),
    )
    small, large = (torch.zeros(1, n, device=pk.device()) for n in (SMALL, LARGE))
    sums = [torch.zeros_like(x) for x in (small, large)]
    for step in range(steps):
        kind = order.choice(("total", "total", "all_reduce", "all_gather", "large", "all_to_all"))
        if pace.random() < 0.2:
            torch.cuda._sleep(pace.randrange(200_000))
        value = float(step % 97 + rank)
        every = world * (step % 97) + world * (world - 1) / 2
        x, out = (large, sums[1]) if kind == "large" else (small, sums[0])
        x.fill_(value)
        if kind in ("total", "large"):
            total(x, out)
        elif kind == "all_reduce":
            pk.ops.all_reduce(x, out=out)
        elif kind == "all_gather":
            out = pk.ops.all_gather(x).sum(0)
        else:
            out = pk.ops.all_to_all(x.expand(world, SMALL).contiguous()).sum(0)
        x.fill_(-1.0)  # whoever reads it late is wrong
        wrong += (out != every).any()
        if step % 50 == 0:
            settle("fifty steps")
    pk.synchronize()
    assert current().context is not None
    return int(wrong.item())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_mixed_with_others(world: int) -> None:
    assert pk.spawn(mixed, world, "cuda-threads", (world, 600)) == [0] * world


def test_mixed_in_processes_that_share_a_gpu() -> None:
    assert pk.spawn(mixed, 2, "cuda-processes", (2, 60)) == [0, 0]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["cuda-processes", "cuda-threads"])
def test_mixed_on_two_gpus(backend: str) -> None:
    assert pk.spawn(mixed, 2, backend, (2, 5000)) == [0, 0]
