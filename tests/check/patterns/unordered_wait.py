"""ParallelKittens' ``wait`` is a relaxed load: nothing orders the loads that follow, bulk copies least of all.

pk's wait always acquires, with a fence for the copy engine.  It does so for the role that waits: a load of another role
of the same block is not ordered by it.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Refused, Weakened, blank, finds, numbers


@pk.kernel
def storer_waits(x: pk.Global, y: pk.Global):  # (M, 64) both: y is x of the rank before
    outbox, ring = pk.pipeline(2, x=pk.shared((64, 64), x.dtype)), pk.pipeline(2, x=pk.shared((64, 64), x.dtype))
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 64)
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        with pk.loader():
            with outbox.fill() as s:
                pk.load_async(s.x, x, (m, 0))
            with ring.fill() as s:
                pk.load_async(s.x, inbox[me], (m, 0))  # [read]
        with pk.storer():
            with outbox.drain() as s:
                pk.store_async(inbox[(me + 1) % W], s.x, (m, 0))  # [push]
            pk.signal(sent, m, (me + 1) % W)
            pk.wait(sent, m, 1)
            with ring.drain() as s:
                pk.store_async(y, s.x, (m, 0))


@pk.kernel
def loader_waits(x: pk.Global, y: pk.Global):
    outbox, ring = pk.pipeline(2, x=pk.shared((64, 64), x.dtype)), pk.pipeline(2, x=pk.shared((64, 64), x.dtype))
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 64)
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        with pk.loader():
            with outbox.fill() as s:
                pk.load_async(s.x, x, (m, 0))
            pk.wait(sent, m, 1)
            with ring.fill() as s:
                pk.load_async(s.x, inbox[me], (m, 0))  # [load]
        with pk.storer():
            with outbox.drain() as s:
                pk.store_async(inbox[(me + 1) % W], s.x, (m, 0))  # [store]
            pk.signal(sent, m, (me + 1) % W)
            with ring.drain() as s:
                pk.store_async(y, s.x, (m, 0))


@pk.kernel
def relaxed(x: pk.Global):
    sent = pk.signals(1)
    for _ in pk.tasks(1):
        pk.wait(sent, 0, 1, order="relaxed")


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 128, 64), blank(128, 64)]


PATTERN = Pattern(
    source="ParallelKittens wait",
    cases={
        "wrong": Case(storer_waits, (finds("race", "push:storer", "read:loader", says=("inbox",)),)),
        "fixed": Case(loader_waits),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 128, 64),
    weakened={
        "fence": Weakened("fixed", finds("race", "store:storer", "load:loader"), "wait", (("fence", False),)),
    },
    refused={"relaxed": Refused(relaxed, (pk.spec(torch.float32, 2),), ("order",))},
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
