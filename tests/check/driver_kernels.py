"""Small kernels, right and wrong, for the tests of ``pk.check`` itself."""

from __future__ import annotations

import torch

import pk


@pk.kernel
def push(x: pk.Global, out: pk.Parallel, B: pk.constexpr = 16):  # (1, n) both; out: what the rank before has
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    got = pk.signals(n)
    for i in pk.tasks(n):
        pk.store(out[(me + 1) % W], pk.load(x, (0, i), (1, B)), (0, i))
        pk.signal(got, i, (me + 1) % W)
        pk.wait(got, i, 1)


@pk.kernel
def push_early(x: pk.Global, out: pk.Global, B: pk.constexpr = 16):  # the signal overtakes the data
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    slots, got = pk.scratch((1, x.cols), x.dtype), pk.signals(n)
    for i in pk.tasks(n):
        pk.signal(got, i, (me + 1) % W)
        pk.store(slots[(me + 1) % W], pk.load(x, (0, i), (1, B)), (0, i))
        pk.wait(got, i, 1)
        pk.store(out, pk.load(slots[me], (0, i), (1, B)), (0, i))


@pk.kernel
def backwards(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):  # (1, n * B) both: y := the tiles of x, backwards
    n = pk.cdiv(x.cols, B)
    for i in pk.tasks(n):
        pk.store(y, pk.load(x, (0, n - 1 - i), (1, B)), (0, i))


@pk.kernel
def backwards_everywhere(x: pk.Parallel, y: pk.Global, B: pk.constexpr = 64):
    n = pk.cdiv(x.cols, B)
    for i in pk.tasks(n):
        pk.store(y, pk.load(x[pk.rank()], (0, n - 1 - i), (1, B)), (0, i))


@pk.kernel
def doubled(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):  # y := 2 x, (m, n)
    for i, j in pk.tasks(x.rows, pk.cdiv(x.cols, B)):
        pk.store(y, pk.load(x, (i, j), (1, B)) * 2.0, (i, j))


@pk.kernel
def arrivals(x: pk.Global, out: pk.Global, B: pk.constexpr = 16):  # tiles of x, in the order in which they come
    count = pk.signals(1)
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        pk.store(out, pk.load(x, (0, i), (1, B)), (0, pk.fetch_add(count, 0, 1)))


@pk.kernel
def in_order(x: pk.Global, out: pk.Global, B: pk.constexpr = 16):
    """Ends only if task 0 comes first: a deadlock of some schedules."""
    count, never = pk.signals(1), pk.signals(1)
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        place = pk.fetch_add(count, 0, 1)
        if place == 0:
            if i > 0:
                pk.wait(never, 0, 1)
        pk.store(out, pk.load(x, (0, i), (1, B)), (0, i))


@pk.kernel
def starved(x: pk.Global, out: pk.Global, B: pk.constexpr = 16):
    """A wait for more signals than there are: a deadlock of every schedule."""
    me, W = pk.rank(), pk.world_size()
    got = pk.signals(1)
    for i in pk.tasks(pk.cdiv(x.cols, B)):
        if i == 0:
            pk.signal(got, 0, (me + 1) % W)
            pk.wait(got, 0, 2)
        pk.store(out, pk.load(x, (0, i), (1, B)), (0, i))


@pk.kernel
def add_up(x: pk.Global, out: pk.Parallel, B: pk.constexpr = 32):  # (B, B) tiles: the sum over ranks, on rank 0
    ring = pk.pipeline(1, t=pk.shared((B, B), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (m, n))
        with pk.storer():
            with ring.drain() as s:
                pk.store_add_async(out[0], s.t, (m, n))


def run(rank: int, world: int) -> torch.Tensor:
    """Push on every rank, for ``FILE:FUNCTION``."""
    x, out = numbers(rank), pk.empty((1, 64), torch.float32)
    push(x, out)
    pk.synchronize()
    assert torch.equal(out, numbers((rank - 1) % world)), "the launch has left no result"
    return out.clone()


def run_early(rank: int) -> None:
    """The same with the mistake."""
    push_early(numbers(rank), torch.zeros(1, 64))


def run_starved(rank: int) -> None:
    """A launch that never ends."""
    starved(numbers(rank), torch.zeros(1, 64))


def alone() -> None:
    """No rank, no spawn: a group of one."""
    out = torch.zeros(1, 64)
    in_order(numbers(0), out)


def idle() -> None:
    """Launches nothing."""


def numbers(rank: int, n: int = 64) -> torch.Tensor:
    """(1, n) float32, another for every rank."""
    return torch.arange(n, dtype=torch.float32).view(1, n) + 1000 * rank


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wrong", action="store_true")
    options = parser.parse_args()
    if options.wrong:
        pk.spawn(run_early, options.ranks)
    else:
        pk.spawn(run, options.ranks, args=(options.ranks,))
    print("the program's own words")
