"""ParallelKittens' epilogue: thread 0 meets the other GPUs at a barrier while other threads still reset counters.

pk's counters need no reset and cannot be written.  The same mistake with data: one block tells the peers that the inbox
is clear, and the other blocks have not cleared their parts.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Refused, blank, finds, numbers


@pk.kernel
def first_block_speaks_for_all(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):  # (1, n): the sum of the others
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, clear, sent = pk.scratch((W, x.cols), x.dtype), pk.signals(1), pk.signals(n)
    for i in pk.tasks(n):
        pk.store(inbox[me], pk.zeros((8, B), pk.float32), (0, i))  # [clear]
        if i == 0:
            pk.signal_all(clear, 0)
        pk.wait(clear, 0, W)
        for r in pk.ranks_from(me + 1, W - 1):
            pk.store(inbox[r], pk.load(x, (0, i), (1, B)), pk.at(me, i * B))  # [push]
            pk.signal(sent, i, r)
        pk.wait(sent, i, W - 1)
        pk.store(out, pk.sum(pk.load(inbox[me], (0, i), (8, B)), axis=0), (0, i))


@pk.kernel
def every_block_speaks(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, clear, sent = pk.scratch((W, x.cols), x.dtype), pk.signals(n), pk.signals(n)
    for i in pk.tasks(n):
        pk.store(inbox[me], pk.zeros((8, B), pk.float32), (0, i))
        pk.signal_all(clear, i)
        pk.wait(clear, i, W)
        for r in pk.ranks_from(me + 1, W - 1):
            pk.store(inbox[r], pk.load(x, (0, i), (1, B)), pk.at(me, i * B))
            pk.signal(sent, i, r)
        pk.wait(sent, i, W - 1)
        pk.store(out, pk.sum(pk.load(inbox[me], (0, i), (8, B)), axis=0), (0, i))


@pk.kernel
def reset(x: pk.Global):
    sent = pk.signals(4)
    for i in pk.tasks(4):
        pk.store(sent, 0, i)


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 1, 256), blank(1, 256)]


PATTERN = Pattern(
    source="ParallelKittens epilogue_kernel",
    cases={
        "wrong": Case(first_block_speaks_for_all, (finds("race", "clear:team", "push:team", says=("inbox",)),)),
        "fixed": Case(every_block_speaks),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: sum((numbers(r, 1, 256) for r in range(world) if r != rank), torch.zeros(1, 256)),
    refused={"reset": Refused(reset, (pk.spec(torch.float32, 2),), ("sent",))},
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
