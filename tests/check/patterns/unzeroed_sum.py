"""ParallelKittens' GEMM + reduce-scatter adds into a C that the caller must have zeroed, behind a barrier.

``unordered``: the owner's first term is a store, and nothing keeps the others' adds behind it.  ``unzeroed``: nobody
stores a first term.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers


@pk.kernel
def add_at_once(x: pk.Global, c: pk.Parallel):  # (world, M, 64), (M, 64): the sum over ranks of x[owner]
    ring, me = pk.pipeline(2, x=pk.shared((32, 64), x.dtype)), pk.rank()
    for owner, m in pk.tasks(pk.ranks_from(me), pk.cdiv(c.rows, 32)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (owner, m, 0))
        with pk.storer():
            with ring.drain() as s:
                if owner == me:
                    pk.store_async(c[me], s.x, (m, 0))  # [first]
                else:
                    pk.store_add_async(c[owner], s.x, (m, 0))  # [add]


@pk.kernel
def add_after_the_first(x: pk.Global, c: pk.Parallel):
    ring, me, rows = pk.pipeline(2, x=pk.shared((32, 64), x.dtype)), pk.rank(), pk.cdiv(c.rows, 32)
    begun = pk.signals(pk.world_size(), rows)
    for owner, m in pk.tasks(pk.ranks_from(me), rows):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (owner, m, 0))
        with pk.storer():
            if owner != me:
                pk.wait(begun, (owner, m), 1)
            with ring.drain() as s:
                if owner == me:
                    pk.store_async(c[me], s.x, (m, 0))
                else:
                    pk.store_add_async(c[owner], s.x, (m, 0))
            if owner == me:
                pk.signal_all(begun, (me, m))


@pk.kernel
def add_to_nothing(x: pk.Global, c: pk.Parallel):  # through scratch, which holds anything
    ring, sums = pk.pipeline(2, x=pk.shared((32, 64), x.dtype)), pk.scratch((c.rows, c.cols), x.dtype)
    out = pk.pipeline(2, c=pk.shared((32, 64), x.dtype))
    me, W, rows = pk.rank(), pk.world_size(), pk.cdiv(c.rows, 32)
    added = pk.signals(rows)
    for owner, m in pk.tasks(pk.ranks_from(me + 1), rows):  # own tiles last
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (owner, m, 0))
            if owner == me:
                pk.wait(added, m, W)
                with out.fill() as s:
                    pk.load_async(s.c, sums[me], (m, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_add_async(sums[owner], s.x, (m, 0))  # [unzeroed]
            pk.signal(added, m, owner)
            if owner == me:
                with out.drain() as s:
                    pk.store_async(c[me], s.c, (m, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, world, 64, 64), blank(64, 64)]


PATTERN = Pattern(
    source="ParallelKittens gemm_rs",
    cases={
        "wrong": Case(add_at_once, (finds("race", "first:storer", "add:storer", says=("`c`",)),)),
        "unzeroed": Case(add_to_nothing, (finds("uninitialised", "unzeroed:storer", says=("sums",)),)),
        "fixed": Case(add_after_the_first),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: torch.stack([numbers(r, world, 64, 64)[rank] for r in range(world)]).sum(0),
)
wrong, unzeroed, fixed = PATTERN.run("wrong"), PATTERN.run("unzeroed"), PATTERN.run("fixed")
