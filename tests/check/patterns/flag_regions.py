"""vllm-project/vllm#25892, sgl-project/sglang#11609: flags of consecutive all-reduces of other shapes overlap.

The second call's region of flags (and of data) begins at an offset computed from its own size.  Where waits ask for
equality it hangs; here it sums what is not there yet.  Between launches pk lays counters out anew; inside one kernel
that reduces two tensors the mistake can still be made.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers


@pk.function
def all_reduce(x, out, slots, got, i, at):  # tile i of x, through slot and flag `at`
    me, W = pk.rank(), pk.world_size()
    pk.store(slots, pk.load(x, (0, i), (1, 64)), (me, at))  # [push]
    pk.signal_all(got, at)
    pk.wait(got, at, W)  # [flag]
    acc = pk.zeros((1, 64), pk.float32)
    for r in pk.range(W):
        acc = acc + pk.load(slots[me], (r, at), (1, 64))  # [read]
    pk.store(out, acc, (0, i))


@pk.kernel
def regions_of_their_own_size(x: pk.Global, small: pk.Global, out: pk.Global, out_small: pk.Global):
    first, second = pk.cdiv(x.cols, 64), pk.cdiv(small.cols, 64)
    slots = pk.scratch((pk.world_size(), (first + second) * 64), x.dtype)
    got = pk.signals(first + second)
    for i in pk.tasks(first):
        all_reduce(x, out, slots, got, i, i)
    for i in pk.tasks(second):
        all_reduce(small, out_small, slots, got, i, second + i)


@pk.kernel
def regions_side_by_side(x: pk.Global, small: pk.Global, out: pk.Global, out_small: pk.Global):
    first, second = pk.cdiv(x.cols, 64), pk.cdiv(small.cols, 64)
    slots = pk.scratch((pk.world_size(), (first + second) * 64), x.dtype)
    got = pk.signals(first + second)
    for i in pk.tasks(first):
        all_reduce(x, out, slots, got, i, i)
    for i in pk.tasks(second):
        all_reduce(small, out_small, slots, got, i, first + i)


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 1, 256), numbers(rank + 100, 1, 128), blank(1, 256), blank(1, 128)]


PATTERN = Pattern(
    source="vllm-project/vllm#25892",
    cases={
        "wrong": Case(
            regions_of_their_own_size,
            (
                finds("race", "push:team", says=("slots",)),
                finds("race", "push:team", "read:team", says=("slots",)),
                finds("lost-signal", "flag:team", says=("got[", "ends at 4")),
            ),
        ),
        "fixed": Case(regions_side_by_side),
    },
    arguments=arguments,
    result=3,
    reference=lambda rank, world: torch.stack([numbers(r + 100, 1, 128) for r in range(world)]).sum(0),
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
