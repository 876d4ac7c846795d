"""deepseek-ai/DeepGEMM#429: 121 tiles a group and clusters of two: a pair straddles two groups of different depth.

The two blocks of a pair bring each other half of every tile of B.  In the pair that straddles, one has more steps of
k than the other, and waits for halves that nobody brings.  Here the pairs are written out with signals; with
``pk.tasks(cluster=2)`` the compiler shares only loads whose number cannot differ inside a pair.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, finds

TILES = 11  # of a group: odd
STEPS = (4, 2)  # of k, in each group


@pk.kernel
def pairs_of_all_tiles(b: pk.Global, ks: pk.Global, out: pk.Global, KMAX: pk.constexpr = 4):
    """b (groups, KMAX, 32), ks (groups,) steps of each, out (groups * tiles, 32): the sum of the group's rows of b."""
    me, n = pk.rank(), ks.cols * TILES
    halves, brought = pk.scratch((n, KMAX, 32), b.dtype), pk.signals(n, KMAX)
    for t in pk.tasks(n):
        group, side, other = t // TILES, t % 2, t + 1 - 2 * (t % 2)
        acc = pk.zeros((1, 16), pk.float32)
        for k in pk.range(pk.load(ks, group)):
            pk.store(halves[me], pk.load(b, (group, k, side), (1, 16)), (other, k, side))
            pk.signal(brought, (other, k), me)
            pk.wait(brought, (t, k), 1)  # [wait]
            acc = acc + pk.load(halves[me], (t, k, 1 - side), (1, 16))
        pk.store(out, acc, (t, 1 - side))


@pk.kernel
def pairs_inside_a_group(b: pk.Global, ks: pk.Global, out: pk.Global, KMAX: pk.constexpr = 4):
    me, n = pk.rank(), ks.cols * TILES
    halves, brought = pk.scratch((n, KMAX, 32), b.dtype), pk.signals(n, KMAX)
    for t in pk.tasks(n):
        group, side = t // TILES, t % TILES % 2
        other = t + 1 - 2 * side
        alone = t % TILES == TILES - 1 and TILES % 2 == 1  # the last tile of an odd group has no partner
        acc = pk.zeros((1, 16), pk.float32)
        for k in pk.range(pk.load(ks, group)):
            if alone:
                acc = acc + pk.load(b, (group, k, 1 - side), (1, 16))
            else:
                pk.store(halves[me], pk.load(b, (group, k, side), (1, 16)), (other, k, side))
                pk.signal(brought, (other, k), me)
                pk.wait(brought, (t, k), 1)
                acc = acc + pk.load(halves[me], (t, k, 1 - side), (1, 16))
        pk.store(out, acc, (t, 1 - side))


@pk.kernel
def clustered(b: pk.Global, out: pk.Global, EVEN: pk.constexpr = False):
    """As a cluster of pk: b (K, 128) is the same for all tiles of out (22 * 64, 128), the number of steps is not."""
    ring = pk.pipeline(2, b=pk.shared((64, 128), b.dtype))
    for t, _ in pk.tasks(2 * TILES, 1, cluster=2):
        steps = 4 if EVEN else 4 - 2 * (t // TILES)
        with pk.loader():
            for k in pk.range(steps):
                with ring.fill() as s:
                    pk.load_async(s.b, b, (k, 0))
        with pk.consumer(warpgroups=1):
            acc = pk.zeros((64, 128), pk.float32)
            for _k in pk.range(steps):
                with ring.drain() as s:
                    acc = acc + pk.load(s.b)
            pk.store(out, acc, (t, 0))


def operand() -> torch.Tensor:
    return torch.randint(-8, 9, (2, 4, 32), generator=torch.Generator().manual_seed(0)).float()


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [operand(), torch.tensor(STEPS, dtype=torch.int32), torch.zeros(2 * TILES, 32)]


def reference(rank: int, world: int) -> torch.Tensor:
    sums = torch.stack([operand()[g, : STEPS[g]].sum(0) for g in range(2)])
    want = sums.repeat_interleave(TILES, 0).view(2, TILES, 2, 16)
    kept = torch.zeros(2, TILES, 2, 16)
    for tile in range(TILES):  # each block adds up the half that its partner brings
        kept[:, tile, 1 - tile % 2] = want[:, tile, 1 - tile % 2]
    return kept.view(2 * TILES, 32)


PATTERN = Pattern(
    source="deepseek-ai/DeepGEMM#429",
    cases={
        "wrong": Case(pairs_of_all_tiles, (finds("deadlock", "wait:team", says=("brought[10, 2]",)),)),
        "fixed": Case(pairs_inside_a_group),
    },
    arguments=arguments,
    result=2,
    reference=reference,
    world=1,
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
