"""Streams: launches of one group are a sequence whatever streams they are on; two groups run side by side."""

from __future__ import annotations

import pytest
import torch

import pk
from pk.runtime import group as groups
from pk.runtime.group import Group
from tests.gpu.passing import Passing, copy_slowly, pass_on, settle

pytestmark = pytest.mark.gpu(1)


def _alternate(rank: int, world: int) -> None:
    """Each launch reads what the launch before wrote, on another stream, without the user ordering them."""
    work = Passing(rank, world)
    work.warm_up()
    streams = [torch.cuda.Stream() for _ in range(2)]
    buffers = [pk.empty((96, 136), torch.bfloat16) for _ in range(9)]
    for buffer in buffers:
        buffer.fill_(-1)
    pass_on(work.x, buffers[0])  # the kernel is warm on this shape
    pk.synchronize()
    for repeat in range(50):
        buffers[0].copy_((work.place + repeat + 31 * rank) % 127)
        settle("data is ready")
        for number in range(8):
            with torch.cuda.stream(streams[number % 2]):
                if number % 3 == 0:
                    torch.cuda._sleep(100_000)  # this stream is late, the other one would not be
                pass_on(buffers[number], buffers[number + 1])
        with torch.cuda.stream(streams[1]):
            pk.synchronize()
        source = (rank - 8) % world
        want = ((work.place + repeat + 31 * source) % 127).bfloat16()
        assert torch.equal(buffers[8], want), f"repeat {repeat}"


@pytest.mark.parametrize("world", [1, 2])
def test_launches_on_two_streams_are_ordered(world: int) -> None:
    pk.spawn(_alternate, world, "cuda-threads", (world,))


@pytest.mark.gpu(2)
def test_launches_on_two_streams_are_ordered_on_two_gpus() -> None:
    pk.spawn(_alternate, 2, "cuda-processes", (2,))


def _pair() -> list[Group]:
    return [Group(0, 1, "cuda", device=0, driver=groups.cuda_driver(0)) for _ in range(2)]


def test_two_groups_have_kernels_in_flight_at_once() -> None:
    """Different counters, disjoint SMs: neither waits for the other, and both are right."""
    torch.cuda.init()
    both, streams = _pair(), [torch.cuda.Stream() for _ in range(2)]
    rows, times = 256, 4000
    x = [torch.randn(rows, 64, device="cuda").bfloat16() for _ in both]
    y = [torch.zeros_like(t) for t in x]

    def launch(which: int, times: int) -> None:
        with torch.cuda.stream(streams[which]):
            copy_slowly(x[which], y[which], times, group=both[which], sms=4)

    def elapsed(chosen: list[int]) -> float:
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in chosen]
        torch.cuda._sleep(2_000_000)  # everything is enqueued before anything begins
        start.record()
        for end, which in zip(ends, chosen, strict=True):
            streams[which].wait_event(start)
            launch(which, times)
            end.record(streams[which])
        torch.cuda.synchronize()
        return max(start.elapsed_time(end) for end in ends)

    for which in (0, 1):
        launch(which, 1)
    alone = min(elapsed([0]) for _ in range(3))
    together = min(elapsed([0, 1]) for _ in range(3))
    for which, group in enumerate(both):
        pk.synchronize(group)
        assert torch.equal(x[which], y[which])
        group.close()
    assert together < 1.6 * alone, f"one {alone:.2f} ms, both {together:.2f} ms"


def test_a_thousand_launches_of_two_groups_side_by_side() -> None:
    torch.cuda.init()
    both, streams = _pair(), [torch.cuda.Stream() for _ in range(2)]
    place = torch.arange(96 * 136, device="cuda", dtype=torch.int32).view(96, 136)
    x = [torch.zeros(96, 136, device="cuda", dtype=torch.bfloat16) for _ in both]
    y = [torch.zeros_like(t) for t in x]
    bad = torch.zeros(2, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    for number in range(1000):
        for which, group in enumerate(both):
            with torch.cuda.stream(streams[which]):
                x[which].copy_((place + number + 50 * which) % 127)
                pass_on(x[which], y[which], group=group, sms=2 + (number + which) % 40)
                bad[which] += (y[which] != x[which]).sum()
    torch.cuda.synchronize()
    assert bad.tolist() == [0, 0]
    for group in both:
        pk.synchronize(group)
        group.close()
