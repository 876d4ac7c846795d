"""NVIDIA/Megatron-LM#7263: a buffer cleared after the barrier that lets peers write into it: an early write is lost."""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers


@pk.kernel
def barrier_then_clear(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):  # (1, n): the sum of the others' even tiles
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, met, sent = pk.scratch((W, x.cols), x.dtype), pk.signals(n), pk.signals(n)
    for i in pk.tasks(n):
        pk.barrier(met, i)
        pk.store(inbox[me], pk.zeros((8, B), pk.float32), (0, i))  # [clear]
        for r in pk.ranks_from(me + 1, W - 1):
            if i % 2 == 0:  # not everything is sent, so what is not must be zero
                pk.store(inbox[r], pk.load(x, (0, i), (1, B)), pk.at(me, i * B))  # [push]
            pk.signal(sent, i, r)
        pk.wait(sent, i, W - 1)
        pk.store(out, pk.sum(pk.load(inbox[me], (0, i), (8, B)), axis=0), (0, i))


@pk.kernel
def clear_then_barrier(x: pk.Global, out: pk.Global, B: pk.constexpr = 64):
    me, W, n = pk.rank(), pk.world_size(), pk.cdiv(x.cols, B)
    inbox, met, sent = pk.scratch((W, x.cols), x.dtype), pk.signals(n), pk.signals(n)
    for i in pk.tasks(n):
        pk.store(inbox[me], pk.zeros((8, B), pk.float32), (0, i))
        pk.barrier(met, i)
        for r in pk.ranks_from(me + 1, W - 1):
            if i % 2 == 0:
                pk.store(inbox[r], pk.load(x, (0, i), (1, B)), pk.at(me, i * B))
            pk.signal(sent, i, r)
        pk.wait(sent, i, W - 1)
        pk.store(out, pk.sum(pk.load(inbox[me], (0, i), (8, B)), axis=0), (0, i))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 1, 256), blank(1, 256)]


def reference(rank: int, world: int) -> torch.Tensor:
    even = (torch.arange(256) // 64 % 2 == 0).float()
    return sum((numbers(r, 1, 256) for r in range(world) if r != rank), torch.zeros(1, 256)) * even


PATTERN = Pattern(
    source="NVIDIA/Megatron-LM#7263",
    cases={
        "wrong": Case(barrier_then_clear, (finds("race", "clear:team", "push:team", says=("inbox",)),)),
        "fixed": Case(clear_then_barrier),
    },
    arguments=arguments,
    result=1,
    reference=reference,
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
