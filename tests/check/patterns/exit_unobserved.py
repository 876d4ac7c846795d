"""jax-ml/jax#30159: a kernel that ends without having observed its own and its peer's writes.

Of a user's ``Parallel`` tensor pk takes care: a launch ends when every rank is done with it.  What a kernel hands on
from scratch before its end, it must wait for.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, Weakened, blank, finds, numbers


@pk.kernel
def hand_on_unobserved(x: pk.Global, y: pk.Global):  # (M, 64) both: y is x of the rank before
    me, W = pk.rank(), pk.world_size()
    inbox = pk.scratch((x.rows, x.cols), x.dtype)
    for m in pk.tasks(pk.cdiv(x.rows, 32)):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))  # [push]
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))  # [read]


@pk.kernel
def hand_on_observed(x: pk.Global, y: pk.Global):
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(x.rows, 32)
    inbox, there = pk.scratch((x.rows, x.cols), x.dtype), pk.signals(rows)
    for m in pk.tasks(rows):
        pk.store(inbox[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))
        pk.signal(there, m, (me + 1) % W)
        pk.wait(there, m, 1)
        pk.store(y, pk.load(inbox[me], (m, 0), (32, 64)), (m, 0))


@pk.kernel
def push_to_output(x: pk.Global, y: pk.Parallel):  # the compiler's exit words make the end of the launch a barrier
    me, W = pk.rank(), pk.world_size()
    for m in pk.tasks(pk.cdiv(x.rows, 32)):
        pk.store(y[(me + 1) % W], pk.load(x, (m, 0), (32, 64)), (m, 0))  # [remote]


@pk.kernel
def pull_from_input(x: pk.Parallel, y: pk.Global):  # and who reads a peer's input is done before the peer goes on
    me, W = pk.rank(), pk.world_size()
    for m in pk.tasks(pk.cdiv(x.rows, 32)):
        pk.store(y, pk.load(x[(me - 1) % W], (m, 0), (32, 64)), (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 64, 64), blank(64, 64)]


PATTERN = Pattern(
    source="jax-ml/jax#30159",
    cases={
        "wrong": Case(hand_on_unobserved, (finds("race", "push:team", "read:team", says=("inbox",)),)),
        "fixed": Case(hand_on_observed),
        "push": Case(push_to_output),
        "pull": Case(pull_from_input),
    },
    weakened={"exit": Weakened("push", finds("race", "remote:team", says=("`y`",)), exit_words=False)},
    arguments=arguments,
    result=1,
    reference=lambda rank, world: numbers((rank - 1) % world, 64, 64),
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
push, pull = PATTERN.run("push"), PATTERN.run("pull")
