"""``pk.tasks(dynamic=True)``: the blocks of a class claim task numbers, whoever comes first.

The first role of a block claims; the others wait for what it claimed, so that all roles of a block see one sequence.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from pk.sim.machine import Counter, Role, Site, Wait

if TYPE_CHECKING:
    from pk.sim.machine import Launch


class Work:
    """The work counter of a class on one rank: the next number to be claimed."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = 0


class Claims:
    """What one block has claimed so far, and which of its roles claims."""

    __slots__ = ("first", "numbers", "published", "work")

    def __init__(self, launch: Launch, work: Work, first: str) -> None:
        self.work, self.first = work, first
        self.numbers: list[int] = []
        self.published = Counter(launch.schedule, "claims of this block")


def next_task(role: Role, site: Site) -> Generator[Wait, None, int]:
    """The number of the role's next task.  It may be past the last: then nothing is left."""
    claims, at = role.claims, role.taken
    assert claims is not None
    role.taken += 1
    if role.kind == claims.first:
        yield claims.published, 0, site  # anybody may come first
        claims.numbers.append(claims.work.next)
        claims.work.next += 1
        role.launch.add(claims.published, 1, role)
    else:
        yield claims.published, at + 1, site
    return claims.numbers[at]
