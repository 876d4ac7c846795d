"""The beginning of a launch on one rank, and how the others hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pk.sim.machine import Launch


class Begin:
    """A rank whose stream has not reached the launch yet; then its entry word to one peer."""

    __slots__ = ("block", "ident", "kind", "launch", "rank", "target")

    def __init__(self, launch: Launch, rank: int, target: int | None = None) -> None:
        self.launch, self.rank, self.block, self.target = launch, rank, 0, target
        self.kind = "signal"
        self.ident = launch.new_ident()

    def step(self) -> None:
        """Begin: release the rank's roles, and tell every rank (oneself too)."""
        launch = self.launch
        if self.target is not None:
            launch.add(launch.entries[self.target], 1, self)
            return
        launch.begun[self.rank] = True
        if launch.checker is not None:
            launch.checker.rank_begin(launch, self.rank)
        launch.start_roles(self.rank)
        for peer in range(launch.world):
            launch.schedule.add(Begin(launch, self.rank, peer))
