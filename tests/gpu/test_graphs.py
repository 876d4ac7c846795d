"""CUDA graphs: captured launches, ten thousand replays with changing data, eager launches and other shapes between."""

from __future__ import annotations

import time

import pytest
import torch

import pk
from pk import errors
from tests.gpu.passing import Passing, pass_on, record, settle

pytestmark = pytest.mark.gpu(1)
CHUNK = 50  # replays between two synchronisations: bounds what a rank may be ahead of another


def replays(rank: int, world: int, total: int, limit_s: float) -> int:
    """``total`` steps: mostly replays, every ``CHUNK`` an eager launch and one of another shape.  How many steps."""
    main, other = Passing(rank, world), Passing(rank, world, rows=200, cols=64)
    main.warm_up()
    other.warm_up()
    graph = record(main.step)
    end, steps, others = time.monotonic() + limit_s, 0, 0
    while steps < total:
        for _ in range(CHUNK - 1):
            graph.replay()
        main.step()
        other.step()
        steps, others = steps + CHUNK, others + 1
        settle("a chunk")
        assert time.monotonic() < end, f"{steps} steps took {limit_s} s"
    main.check(steps)
    other.check(others)
    return steps


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ten_thousand_replays(world: int) -> None:
    assert pk.spawn(replays, world, "cuda-threads", (world, 10_000, 120.0)) == [10_000] * world


def test_replays_in_processes_that_share_a_gpu() -> None:
    assert pk.spawn(replays, 2, "cuda-processes", (2, 100, 120.0)) == [100, 100]  # a time slice of the driver a hop


@pytest.mark.gpu(2)
@pytest.mark.parametrize("backend", ["cuda-processes", "cuda-threads"])
def test_ten_thousand_replays_on_two_gpus(backend: str) -> None:
    assert pk.spawn(replays, 2, backend, (2, 10_000, 120.0)) == [10_000] * 2


def _torch_graph(rank: int, world: int) -> None:
    """The ordinary way, ``torch.cuda.graph``, with several launches and a prepared one in a graph."""
    work = Passing(rank, world)
    work.warm_up()
    prepared = pass_on.prepare(work.x, work.y)
    graph = torch.cuda.CUDAGraph()
    settle("before")
    with torch.cuda.graph(graph):
        work.step()
        work.step(lambda x, y: prepared())
        work.step()
    settle("captured")
    for _ in range(20):
        graph.replay()
    work.check(60)


def test_torch_cuda_graph_world_1() -> None:
    pk.spawn(_torch_graph, 1, "cuda-threads", (1,))


def test_torch_cuda_graph_in_processes() -> None:
    pk.spawn(_torch_graph, 2, "cuda-processes", (2,))


def _fork(rank: int, world: int) -> None:
    """Two streams inside one capture: the launches of the group stay one after the other."""
    work = Passing(rank, world)
    work.warm_up()
    a, b, z = work.x, work.y, torch.zeros_like(work.x)
    main, side = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    settle("before")
    with torch.cuda.graph(graph, stream=main):
        pass_on(a, b)
        side.wait_stream(main)
        a.add_(1)
        torch.cuda._sleep(200_000)
        pass_on(a, b)
        with torch.cuda.stream(side):
            pass_on(b, z)  # after the launch above, although this stream does not wait for `main`'s
        main.wait_stream(side)
    for number in range(1, 21):
        graph.replay()
        pk.synchronize()
        assert torch.equal(a, b) and torch.equal(z, b), f"replay {number}"


def test_streams_inside_a_capture() -> None:
    pk.spawn(_fork, 1, "cuda-threads", (1,))


def _growth(rank: int, world: int) -> None:
    """A graph outlives the counters it was captured with; what needs memory is refused during capture, and harmless."""
    work = Passing(rank, world)
    work.warm_up()
    tall = torch.ones(16 * 70_000, 16, device=pk.device(), dtype=torch.bfloat16)
    flat = pk.empty(tuple(tall.shape), torch.bfloat16)
    small = torch.ones(16, 16, device=pk.device(), dtype=torch.bfloat16)
    into = pk.empty((16, 16), torch.bfloat16)
    pass_on(small, into, B=16)
    pk.synchronize()

    def captured() -> None:
        with pytest.raises(errors.BackendError, match="while a CUDA graph is being captured"):
            pass_on(tall, flat, B=16)
        with pytest.raises(errors.BackendError, match="while a CUDA graph is being captured"):
            pass_on(small, into, B=32)
        with pytest.raises(errors.BackendError, match="while a CUDA graph is being captured"):
            pk.empty((5, 5), torch.float32)
        work.step()

    graph = record(captured)
    graph.replay()
    pass_on(tall, flat, B=16)  # grows
    pk.synchronize()
    assert bool((flat == 1).all())
    for _ in range(20):
        graph.replay()
        work.step()
    work.check(41)


def test_growth_between_replays() -> None:
    pk.spawn(_growth, 1, "cuda-threads", (1,))


@pk.kernel
def never_signalled(c: pk.Global):
    never = pk.signals(1)
    for _ in pk.tasks(1):
        with pk.storer():
            pk.wait(never, 0, 1)


def _hang(rank: int, world: int) -> None:
    """A hang between replays is reported, replays of a stopped group do nothing, and after the reset they are right."""
    work = Passing(rank, world)
    work.warm_up()
    graph = record(work.step)
    graph.replay()
    settle("one replay")
    c = torch.zeros(8, 8, device=pk.device(), dtype=torch.bfloat16)
    never_signalled(c)
    with pytest.raises(errors.HangError, match="never"):
        pk.synchronize()
    graph.replay()
    with pytest.raises(errors.HangError):
        work.step()
    torch.cuda.current_stream().synchronize()
    pk.reset()
    work.bad.zero_()
    work.count.fill_(2)
    settle("reset")
    for _ in range(20):
        graph.replay()
    work.check(20)


@pytest.mark.parametrize("world", [1, 2])
def test_a_graph_survives_a_hang(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "1")
    pk.spawn(_hang, world, "cuda-threads", (world,))
