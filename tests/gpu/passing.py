"""A kernel whose every number can be predicted, for tests that launch it ten thousand times.

Rank r gives its ``x`` to rank r + 1, which waits for every tile: counters, entry words, and data that must be new.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import pk
from pk.runtime.group import current


@pk.kernel
def pass_on(
    x: pk.Global,  # (M, N)
    y: pk.Parallel,  # (M, N)  of the rank to the left
    B: pk.constexpr = 64,
):
    """y[rank + 1] = x."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    landed = pk.signals(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B))
    right = (pk.rank() + 1) % pk.world_size()
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y[right], s.t, (m, n))
            pk.signal(landed, (m, n), right)
            pk.wait(landed, (m, n), 1)


@pk.kernel
def copy_slowly(
    x: pk.Global,  # (M, N)
    y: pk.Global,  # (M, N)
    times: int,
    B: pk.constexpr = 64,
):
    """y = x, each tile ``times`` times: how long it takes is the caller's choice."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            for _ in pk.range(times):
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
        with pk.storer():
            for _ in pk.range(times):
                with ring.drain() as s:
                    pk.store_async(y, s.t, (m, n))


class Passing:
    """``step()`` makes new data, launches, and adds what is wrong to ``bad``, all on the device: so it can be captured.

    Numbers are integers below 128, exact in bfloat16.
    """

    def __init__(self, rank: int, world: int, rows: int = 96, cols: int = 136) -> None:
        device = pk.device()
        self.place = torch.arange(rows * cols, device=device, dtype=torch.int32).view(rows, cols)
        self.count = torch.zeros((), device=device, dtype=torch.int32)
        self.bad = torch.zeros((), device=device, dtype=torch.int64)
        self.mine, self.left = 17 * rank, 17 * ((rank - 1) % world)
        self.x = torch.empty(rows, cols, device=device, dtype=torch.bfloat16)
        self.y = pk.empty((rows, cols), torch.bfloat16)
        self.y.fill_(-1)

    def data(self, offset: int) -> torch.Tensor:
        """What the rank with that offset passes on in this step."""
        return ((self.place + self.count + offset) % 127).bfloat16()

    def step(self, launch: Callable[[torch.Tensor, torch.Tensor], None] = pass_on) -> None:
        """One launch with data that was never there before."""
        self.count += 1
        self.x.copy_(self.data(self.mine))
        launch(self.x, self.y)
        self.bad += (self.y != self.data(self.left)).sum()

    def warm_up(self) -> None:
        """Every kernel of torch's is loaded before one of pk's waits for another rank; memory is there."""
        self.step(lambda x, y: None)
        settle("torch is warm")
        self.step()
        pk.synchronize()
        self.bad.zero_()
        settle("all is warm")

    def check(self, steps: int) -> None:
        """All ``steps`` launches since ``warm_up`` were right."""
        pk.synchronize()
        assert int(self.count) == steps + 2
        assert int(self.bad) == 0, f"{int(self.bad)} wrong numbers in {steps} launches"


def settle(what: str) -> None:
    """All ranks are here and their streams are idle."""
    torch.cuda.current_stream().synchronize()
    current().barrier(what, 60)


def record(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """``work`` as a graph.  Ranks that are threads must all be idle before one begins, and share no capture mode;
    ``torch.cuda.graph`` synchronises the GPU first, which ends a capture that another has begun.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    side = torch.cuda.Stream() if stream.cuda_stream == 0 else stream
    settle("ready to capture")
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    settle("captured")
    return graph
