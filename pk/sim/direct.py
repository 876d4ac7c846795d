"""Stores of threads, without TMA: they land late, but the role that made them sees them at once."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pk.sim.machine import Arrival, Operation, Role, Site, Window
from pk.sim.values import Array


class DirectStore(Operation):
    """Values on their way from a role's registers to one rank.

    They land when the schedule picks them, before a later signal of the role leaves, or when the role itself looks at
    memory again (``see``), whichever comes first.
    """

    __slots__ = ("landed", "releases", "shape", "site", "values", "window")
    bulk: ClassVar[bool] = False

    def __init__(self, role: Role, site: Site, window: Window, values: Array, shape: tuple[int, ...]) -> None:
        self.site, self.window, self.values, self.shape = site, window, values, shape
        self.releases: list[Arrival] = []
        self.landed = False
        super().__init__(role, "land")

    def step(self) -> None:
        """Write to memory; signals that waited only for this may leave."""
        if self.landed:
            return
        self.landed = True
        role, window = self.role, self.window
        launch = role.launch
        target = launch.buffer(window.ranks[0], window.tensor)
        launch.memory.access(
            role.who, self.ident, "write", target, self.site.span, window.coord, self.shape, self.values
        )
        launch.done(self)
        del role.open_stores[self.ident]
        launch.let_go(self.releases)


def put(role: Role, site: Site, window: Window, values: Array, shape: tuple[int, ...]) -> None:
    """Store ``values`` (storage, of ``shape``) at the window on each of its ranks; the role has met them."""
    see(role, window.tensor)  # stores of one role to one place land in order
    for rank in window.ranks:
        store = DirectStore(role, site, Window(window.tensor, window.coord, (rank,)), values, shape)
        role.launch.count(store, remote=rank != role.rank)
        role.open_stores[store.ident] = store
        role.launch.issue(store)


def see(role: Role, tensor: str) -> None:
    """Before ``role`` reads ``tensor``: its own earlier stores to it, by this name or another, have landed."""
    for store in list(role.open_stores.values()):
        if isinstance(store, DirectStore) and (store.window.tensor == tensor or _meets(store, tensor)):
            store.step()


def _meets(store: DirectStore, tensor: str) -> bool:
    """Whether ``tensor`` may lie in the memory that ``store`` writes: two parameters may be given one tensor."""
    launch, rank = store.role.launch, store.window.ranks[0]
    return np.may_share_memory(launch.buffer(rank, tensor).array, launch.buffer(rank, store.window.tensor).array)
