"""ParallelKittens' ``barrier_all`` used back to back on one index, and its wait for *exactly* n.

There the second barrier's signals can carry the counter past n before a slow poller of the first has looked: it waits
for ever.  pk waits for *at least* n, so nobody is passed by; but then the count of the first barrier also lets the
second one through, and a barrier has its index once per launch.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Refused, blank, finds, numbers


@pk.kernel
def one_index(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):  # (rounds, n) both: y is x of the rank before
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, met = pk.scratch((1, x.cols), x.dtype), pk.signals(n)
    for i in pk.tasks(n):
        for t in pk.range(x.rows):
            pk.store(inbox[(me + 1) % W], pk.load(x, (t, i), (1, B)), (0, i))  # [push]
            pk.barrier(met, i)  # [pushed]
            pk.store(y, pk.load(inbox[me], (0, i), (1, B)), (t, i))  # [read]
            pk.barrier(met, i)  # [taken]


@pk.kernel
def an_index_each(x: pk.Global, y: pk.Global, B: pk.constexpr = 64):
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, met = pk.scratch((1, x.cols), x.dtype), pk.signals(n, x.rows, 2)
    for i in pk.tasks(n):
        for t in pk.range(x.rows):
            pk.store(inbox[(me + 1) % W], pk.load(x, (t, i), (1, B)), (0, i))
            pk.barrier(met, (i, t, 0))
            pk.store(y, pk.load(inbox[me], (0, i), (1, B)), (t, i))
            pk.barrier(met, (i, t, 1))


@pk.kernel
def exactly(x: pk.Global):
    met = pk.signals(1)
    for _ in pk.tasks(1):
        pk.wait(met, 0, 8, exactly=True)


@pk.kernel
def compare(x: pk.Global):
    met = pk.signals(1)
    for _ in pk.tasks(1):
        while pk.load(met, 0) != 8:
            pass


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 3, 128), blank(3, 128)]


PATTERN = Pattern(
    source="ParallelKittens barrier_all, wait",
    cases={
        "wrong": Case(
            one_index,
            (
                finds("race", "push:team", "read:team", says=("inbox",)),
                finds("lost-signal", "pushed:team", "taken:team", says=("arrives twice", "met[")),
            ),
        ),
        "fixed": Case(an_index_each),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 3, 128),
    refused={
        "exactly": Refused(exactly, (pk.spec(torch.float32, 2),), ("exactly",)),
        "compare": Refused(compare, (pk.spec(torch.float32, 2),), ("met",)),
    },
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
