"""ROCm/iris#462: a lock written with a release of GPU scope and polled by another GPU: it may never be seen.

pk has no scopes to choose: the compiler writes every signal with system scope, and ``scope=`` does not compile.  A
signal that is weakened behind the compiler's back (in the IR) is found: nothing orders the stores before it.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Refused, Weakened, blank, finds, numbers

FLOATS = pk.spec(torch.float32, 2)


@pk.kernel
def pass_on(x: pk.Global, y: pk.Global):  # (M, 64) both: y is x of the rank before
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 32)
    inbox, ready = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))  # [push]
        pk.signal(ready, m, (me + 1) % W)
        pk.wait(ready, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))  # [read]


@pk.kernel
def scoped(x: pk.Global):
    ready = pk.signals(1)
    for _ in pk.tasks(1):
        pk.store(x, 0.0, (0, 0))
        pk.signal(ready, 0, pk.rank(), scope="gpu")


@pk.kernel
def spin(x: pk.Global, flags: pk.Global, y: pk.Global):  # a lock in plain memory, polled with plain loads
    for i in pk.tasks(pk.cdiv(x.rows, 32)):
        while pk.load(flags, i) != 1:
            pass
        pk.store(y, pk.load(x, (i, 0), (32, 64)), (i, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 64, 64), blank(64, 64)]


PATTERN = Pattern(
    source="ROCm/iris#462",
    cases={"fixed": Case(pass_on)},
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 64, 64),
    refused={
        "scope": Refused(scoped, (FLOATS,), ("scope",)),
        "spin": Refused(spin, (FLOATS, pk.spec(torch.int32, 1), FLOATS), ("spins on memory", "pk.wait")),
    },
    weakened={
        "scope": Weakened("fixed", finds("race", "push:team", "read:team"), "signal", (("scope", "block"),)),
    },
)
fixed = PATTERN.run("fixed")
