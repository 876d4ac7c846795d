"""ParallelKittens' all-gather + GEMM waits for ``min(num_comm_sms * 3, K / 128)``: a count that its author worked out.

``wrong`` waits for more than is ever sent, ``few`` for less: the last, partial chunk is not counted and not waited for.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers

BC = 64  # columns of a chunk


@pk.function
def send(x, inbox, ready, ring, rows, chunks):
    me, W = pk.rank(), pk.world_size()
    for m, j in pk.tasks(rows, chunks):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, j))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(inbox[(me + 1) % W], s.x, (m, j))  # [push]
            pk.signal(ready, m, (me + 1) % W)


@pk.kernel
def counts_columns_of_32(x: pk.Global, y: pk.Global):  # (M, K), (M, 1): sums of rows of the rank before
    ring, me = pk.pipeline(2, x=pk.shared((16, BC), x.dtype)), pk.rank()
    rows, chunks = pk.cdiv(x.rows, 16), pk.cdiv(x.cols, BC)
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    with pk.communicator(sms=1):
        send(x, inbox, ready, ring, rows, chunks)
    for m in pk.tasks(rows):
        pk.wait(ready, m, pk.cdiv(x.cols, 32))  # [wait]
        pk.store(y, pk.sum(pk.load(inbox[me], (m, 0), (16, 256)), axis=1), (m, 0))


@pk.kernel
def counts_whole_chunks(x: pk.Global, y: pk.Global):
    ring, me = pk.pipeline(2, x=pk.shared((16, BC), x.dtype)), pk.rank()
    rows, chunks = pk.cdiv(x.rows, 16), pk.cdiv(x.cols, BC)
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    with pk.communicator(sms=1):
        send(x, inbox, ready, ring, rows, chunks)
    for m in pk.tasks(rows):
        pk.wait(ready, m, x.cols // BC)
        pk.store(y, pk.sum(pk.load(inbox[me], (m, 0), (16, 256)), axis=1), (m, 0))  # [read]


@pk.kernel
def counts_what_is_sent(x: pk.Global, y: pk.Global):
    ring, me = pk.pipeline(2, x=pk.shared((16, BC), x.dtype)), pk.rank()
    rows, chunks = pk.cdiv(x.rows, 16), pk.cdiv(x.cols, BC)
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    with pk.communicator(sms=1):
        send(x, inbox, ready, ring, rows, chunks)
    for m in pk.tasks(rows):
        pk.wait(ready, m, chunks)
        pk.store(y, pk.sum(pk.load(inbox[me], (m, 0), (16, 256)), axis=1), (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 32, 232), blank(32, 1)]


PATTERN = Pattern(
    source="ParallelKittens ag_gemm",
    cases={
        "wrong": Case(counts_columns_of_32, (finds("bad-count", "wait:team", says=("ready",)),)),
        "few": Case(counts_whole_chunks, (finds("race", "push:storer", "read:team", says=("inbox",)),)),
        "fixed": Case(counts_what_is_sent),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 32, 232).sum(1, keepdim=True),
)
wrong, few, fixed = PATTERN.run("wrong"), PATTERN.run("few"), PATTERN.run("fixed")
