"""ParallelKittens counts tiles by truncating division: the last, partial tiles are never computed, and nothing says so.

``wrong``: the output's tail stays as it was; only who knows the result can see that (``pk.check(reference=)``, not the
command).  ``unsent``: rows that were not sent are read by their receiver.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers


@pk.kernel
def whole_tiles_only(x: pk.Global, y: pk.Global):  # (M, 64) both: y is x of the rank before
    me, W, rows = pk.rank(), pk.world_size(), x.rows // 32
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))
        pk.signal(sent, m, (me + 1) % W)
        pk.wait(sent, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))


@pk.kernel
def tail_read_but_not_sent(x: pk.Global, y: pk.Global):
    me, W, rows = pk.rank(), pk.world_size(), x.rows // 32
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals()
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))
        pk.signal(sent, (), (me + 1) % W)
    for m in pk.tasks(pk.cdiv(x.rows, 32)):
        pk.wait(sent, (), rows)
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))  # [read]


@pk.kernel
def partial_tiles_too(x: pk.Global, y: pk.Global):
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 32)
    inbox, sent = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))
        pk.signal(sent, m, (me + 1) % W)
        pk.wait(sent, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 80, 64), blank(80, 64)]


PATTERN = Pattern(
    source="ParallelKittens tile counts",
    cases={
        "wrong": Case(whole_tiles_only, (finds("wrong-result", says=("`y`",)),)),
        "unsent": Case(tail_read_but_not_sent, (finds("uninitialised", "read:team", says=("inbox",)),)),
        "fixed": Case(partial_tiles_too),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 80, 64),
)
wrong, unsent, fixed = PATTERN.run("wrong"), PATTERN.run("unsent"), PATTERN.run("fixed")
