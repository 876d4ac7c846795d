"""ParallelKittens' kernels assume that all of 132 or 148 blocks run at once: a grid barrier with the number written in.

On fewer SMs (a smaller GPU, a share of one, SMs kept for others) blocks wait for blocks that cannot start.  A launch of
pk has as many blocks as there are SMs, and deals tasks to them.  So the mistake is to wait for a task that comes later
in the order of tasks: found for the number of SMs that the check is made with.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers

BLOCKS = 8  # "one for each SM"


@pk.kernel
def grid_barrier_in_a_task(x: pk.Global, y: pk.Global):  # (8, 64) both: rows in reverse
    me, staged, there = pk.rank(), pk.scratch((BLOCKS, 64), x.dtype), pk.signals()
    for i in pk.tasks(BLOCKS):
        pk.store(staged[me], pk.load(x, (i, 0), (1, 64)), (i, 0))
        pk.signal(there, (), me)
        pk.wait(there, (), BLOCKS)  # [wait]
        pk.store(y, pk.load(staged[me], (BLOCKS - 1 - i, 0), (1, 64)), (i, 0))


@pk.kernel
def grid_barrier_between_task_loops(x: pk.Global, y: pk.Global):
    me, staged, there = pk.rank(), pk.scratch((BLOCKS, 64), x.dtype), pk.signals()
    for i in pk.tasks(BLOCKS):
        pk.store(staged[me], pk.load(x, (i, 0), (1, 64)), (i, 0))
        pk.signal(there, (), me)
    for i in pk.tasks(BLOCKS):  # every task of the first loop comes before
        pk.wait(there, (), BLOCKS)
        pk.store(y, pk.load(staged[me], (BLOCKS - 1 - i, 0), (1, 64)), (i, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, BLOCKS, 64), blank(BLOCKS, 64)]


PATTERN = Pattern(
    source="ParallelKittens NUM_BLOCKS",
    cases={
        "wrong": Case(grid_barrier_in_a_task, (finds("not-resident", "wait:team", says=("there",)),)),
        "enough": Case(grid_barrier_in_a_task, options={"sms": BLOCKS}),  # the same kernel, where it happens to work
        "fixed": Case(grid_barrier_between_task_loops),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers(rank, BLOCKS, 64).flip(0),
    world=1,
    sms=4,
)
wrong, enough, fixed = PATTERN.run("wrong"), PATTERN.run("enough"), PATTERN.run("fixed")  # enough: with --sms 8
