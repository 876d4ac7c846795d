"""ROCm/iris#463: locks allocated for tiles of 64 rows, used by a call with tiles of 32: writes past the array's end.

There the neighbours on the symmetric heap are corrupted and later calls give wrong numbers.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers

ALLOCATED = 64  # rows of a tile in the call that the array was sized for


@pk.kernel
def sized_for_another_call(x: pk.Global, y: pk.Global, BM: pk.constexpr = 32):  # (M, 64) both: x of the rank before
    me, W = pk.rank(), pk.world_size()
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(pk.cdiv(x.rows, ALLOCATED))
    for m in pk.tasks(pk.cdiv(x.rows, BM)):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (BM, 64)), (m, 0))
        pk.signal(ready, m, (me + 1) % W)  # [signal]
        pk.wait(ready, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (BM, 64)), (m, 0))


@pk.kernel
def sized_for_this_call(x: pk.Global, y: pk.Global, BM: pk.constexpr = 32):
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, BM)
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (BM, 64)), (m, 0))
        pk.signal(ready, m, (me + 1) % W)
        pk.wait(ready, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (BM, 64)), (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 128, 64), blank(128, 64)]


PATTERN = Pattern(
    source="ROCm/iris#463",
    cases={
        "wrong": Case(sized_for_another_call, (finds("counter-range", "signal:team", says=("ready", "(2,)")),)),
        "fixed": Case(sized_for_this_call),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 128, 64),
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
