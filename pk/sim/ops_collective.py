"""Meaning of what combines every rank's copy of a window."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from pk.sim.direct import put, see
from pk.sim.machine import Program, Role, Site, Window
from pk.sim.values import decode, encode, greatest, least

COMBINE: dict[str, Callable[[Any, Any], Any]] = {"sum": np.add, "min": least, "max": greatest}


def reduce(role: Role, site: Site, target: Window, source: Window) -> Program:
    """``target := source of rank 0 + source of rank 1 + ...`` (or min, max), in float32, rounded once.

    What lies outside the source is 0, what lies outside the target is dropped; NaN wins over numbers.  The copies are
    read one after the other, some time from here on; the store lands as those of threads do.  Combined in the network
    (``Launch.multicast``), the order of the ranks is any.
    """
    launch, shape = role.launch, site.attr("shape")
    yield from role.enter(site)
    for tensor in {source.tensor, target.tensor}:
        see(role, tensor)
    ranks = list(source.ranks)
    if launch.multicast:
        random.Random(launch.schedule.random.random()).shuffle(ranks)
    total = None
    for rank in ranks:
        yield launch.entries[role.rank], 0, site  # others may go on in between
        buffer = launch.buffer(rank, source.tensor)
        raw = launch.memory.access(role.who, role.ident, "read", buffer, site.span, source.coord, shape)
        values = decode(raw, buffer.dtype).astype(np.float32)
        total = values if total is None else COMBINE[site.attr("op")](total, values)
    assert total is not None
    put(role, site, target, encode(total, launch.buffer(role.rank, source.tensor).dtype), shape)


def all_reduce(role: Role, site: Site, window: Window) -> Program:
    """``reduce`` of every rank's window into every rank's window."""
    yield from reduce(role, site, window, window)


MEANING: dict[str, Callable[..., Any]] = {"reduce": reduce, "all_reduce": all_reduce}
