"""flashinfer-ai/flashinfer#2665: the grid is for a whole chunk, the last chunk is shorter, and surplus blocks store.

Their tiles lie behind the chunk: in the rows of the next rank, whose own tile may come before or after; behind the
last rank they lie outside the tensor, where nothing is written.
"""

from __future__ import annotations

import torch

import pk
from tests.check.patterns.pattern import Case, Pattern, blank, finds, numbers

CHUNK = 2  # tiles of 16 rows


@pk.kernel
def unguarded(x: pk.Parallel, y: pk.Global):  # (M, 64), (world * M, 64): all ranks' rows below each other
    W, tiles = pk.world_size(), pk.cdiv(x.rows, 16)
    for r, chunk, t in pk.tasks(W, pk.cdiv(tiles, CHUNK), CHUNK):
        tile = pk.load(x[r], (chunk * CHUNK + t, 0), (16, 64))
        pk.store(y, tile, pk.at(r * x.rows + (chunk * CHUNK + t) * 16, 0))  # [store]


@pk.kernel
def guarded(x: pk.Parallel, y: pk.Global):
    W, tiles = pk.world_size(), pk.cdiv(x.rows, 16)
    for r, chunk, t in pk.tasks(W, pk.cdiv(tiles, CHUNK), CHUNK):
        if chunk * CHUNK + t < tiles:
            tile = pk.load(x[r], (chunk * CHUNK + t, 0), (16, 64))
            pk.store(y, tile, pk.at(r * x.rows + (chunk * CHUNK + t) * 16, 0))


def arguments(rank: int, world: int) -> list[torch.Tensor]:
    return [numbers(rank, 48, 64), blank(48 * world, 64)]


PATTERN = Pattern(
    source="flashinfer-ai/flashinfer#2665",
    cases={
        "wrong": Case(unguarded, (finds("race", "store:team", says=("`y`", "[48:64, 0:64]")),)),
        "fixed": Case(guarded),
    },
    arguments=arguments,
    result=1,
    reference=lambda rank, world: torch.cat([numbers(r, 48, 64) for r in range(world)]),
)
wrong, fixed = PATTERN.run("wrong"), PATTERN.run("fixed")
