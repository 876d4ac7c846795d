"""ROCm/iris#465: a flag with the fixed value 1, still up from the call before: the data read are of that call.

Between launches pk's counters always begin at zero.  Inside one, a wait for the first round's count lets every later
round through.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers


@pk.kernel
def wait_for_the_first_round(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):  # (rounds, n) both: sums over ranks
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    slots, got = pk.scratch((2, W, x.cols), x.dtype), pk.signals(n)  # two slots in turn
    for i in pk.tasks(n):
        for t in pk.range(x.rows):
            pk.store(slots, pk.load(x, (t, i), (1, B)), (t % 2, me, i))  # [push]
            pk.signal_all(got, i)
            pk.wait(got, i, W)
            acc = pk.zeros((1, B), pk.float32)
            for r in pk.range(W):
                acc = acc + pk.load(slots[me], (t % 2, r, i), (1, B))  # [read]
            pk.store(out, acc, (t, i))


@pk.kernel
def wait_for_every_round(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    slots, got = pk.scratch((2, W, x.cols), x.dtype), pk.signals(n)
    for i in pk.tasks(n):
        for t in pk.range(x.rows):
            pk.store(slots, pk.load(x, (t, i), (1, B)), (t % 2, me, i))
            pk.signal_all(got, i)
            pk.wait(got, i, W * (t + 1))  # so two slots are enough: who is in round t + 1 has read those of t - 1
            acc = pk.zeros((1, B), pk.float32)
            for r in pk.range(W):
                acc = acc + pk.load(slots[me], (t % 2, r, i), (1, B))
            pk.store(out, acc, (t, i))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 4, 100), blank(4, 100)]


PATTERN = Pattern(
    source="ROCm/iris#465",
    cases={
        "wrong": Case(wait_for_the_first_round, (finds("race", "push:team", "read:team", says=("slots",)),)),
        "fixed": Case(wait_for_every_round),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: torch.stack([numbers(r, 4, 100) for r in range(world)]).sum(0),
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
