"""ParallelKittens' GEMM + all-reduce: a signal sent when the stage has been read, not when the store has landed.

In pk a signal waits for the stores that its own role made: the completion wait cannot be forgotten or weakened.  What
can be done wrong is to signal from a role that did not make them.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Refused, Weakened, blank, finds, numbers


@pk.kernel
def consumer_signals(x: pk.Global, y: pk.Global):  # (M, 64) both: y is x of the rank before, doubled
    output = pk.pipeline(2, y=pk.shared((64, 64), x.dtype))
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 64)
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        with pk.consumer(warpgroups=1):
            with output.fill() as s:
                pk.store(s.y, pk.load(x, (m, 0), (64, 64)) * 2.0)
            pk.signal(sent, m, (me + 1) % W)
            pk.wait(sent, m, 1)
            pk.store(y, pk.load(inbox[me], (m, 0), (64, 64)), (m, 0))  # [read]
        with pk.storer():
            with output.drain() as s:
                pk.store_async(inbox[(me + 1) % W], s.y, (m, 0))  # [push]


@pk.kernel
def storer_signals(x: pk.Global, y: pk.Global):
    output = pk.pipeline(2, y=pk.shared((64, 64), x.dtype))
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 64)
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        with pk.consumer(warpgroups=1):
            with output.fill() as s:
                pk.store(s.y, pk.load(x, (m, 0), (64, 64)) * 2.0)
            pk.wait(sent, m, 1)
            pk.store(y, pk.load(inbox[me], (m, 0), (64, 64)), (m, 0))  # [load]
        with pk.storer():
            with output.drain() as s:
                pk.store_async(inbox[(me + 1) % W], s.y, (m, 0))  # [store]
            pk.signal(sent, m, (me + 1) % W)


@pk.kernel
def reads_only(x: pk.Global):
    sent = pk.signals(1)
    for _ in pk.tasks(1):
        pk.signal(sent, 0, 0, completion="read")


@pk.kernel
def loader_signals(x: pk.Global, y: pk.Global):
    ring, sent = pk.pipeline(2, x=pk.shared((64, 64), x.dtype)), pk.signals(1)
    for m in pk.tasks(pk.cdiv(x.rows, 64)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, 0))
            pk.signal(sent, 0, 0)
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(y, s.x, (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 128, 64), blank(128, 64)]


FLOATS = pk.spec(torch.float32, 2)
PATTERN = Pattern(
    source="ParallelKittens gemm_ar",
    cases={
        "wrong": Case(consumer_signals, (finds("race", "push:storer", "read:consumer", says=("inbox",)),)),
        "fixed": Case(storer_signals),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: 2 * numbers((rank - 1) % world, 128, 64),
    refused={
        "read": Refused(reads_only, (FLOATS,), ("completion",)),
        "loader": Refused(loader_signals, (FLOATS, FLOATS), ("loader", "signal")),
    },
    weakened={
        "read": Weakened("fixed", finds("race", "store:storer", "load:consumer"), "signal", (("completion", False),)),
    },
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
