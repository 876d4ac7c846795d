"""Which rank's tiles a block computes: those of all ranks alike, whatever divides what."""

from __future__ import annotations

from collections import Counter

import pytest

from pk.ops.fused import owner_turns


def owners(block: int, blocks: int, world: int, tasks: int) -> list[int]:
    """Of the tiles of ``block``, as ``owner_of`` in ``pk/ops/parallel_kernels.py`` has it on rank world - 1."""
    turns = owner_turns(blocks, world)
    at = [divmod(block + blocks * k, world) for k in range(tasks)]
    return [(turn + step // turns["STEPS"] * turns["SHIFT"]) % world for step, turn in at]


@pytest.mark.parametrize(
    ("blocks", "world"),  # a step is a task of every block
    [(blocks, world) for blocks in (132, 128, 114, 66, 33, 16) for world in range(1, 9) if blocks >= 4 * world],
)
def test_every_block_has_tiles_of_all_owners(blocks: int, world: int) -> None:
    rounds = 8
    for block in range(blocks):
        found = Counter(owners(block, blocks, world, rounds * world))
        assert len(found) == world and max(found.values()) - min(found.values()) <= 2, (block, found)


def test_a_step_has_a_tile_of_every_owner() -> None:
    turns = owner_turns(132, 4)
    for step in (0, 1, 32, 33, 34, 100):
        assert {(turn + step // turns["STEPS"] * turns["SHIFT"]) % 4 for turn in range(4)} == set(range(4))
