"""The budget of a role's ``for`` loops: a bound gone wild must not look like a hang."""

from __future__ import annotations

from pk.sim.machine import Role, Site


def turns(role: Role, left: list[int], start: int, stop: int, site: Site) -> range:
    """``range(start, stop)``.  ``left``: the turns that the role may still take, all its loops together.

    Raises :class:`pk.errors.SimulationError` when they run out.
    """
    left[0] -= max(stop - start, 0)
    if left[0] < 0:
        raise role.fail(
            site,
            f"this loop has {stop - start:,} turns (from {start} to {stop}), which takes the loops of its role past "
            f"{role.launch.turns:,} (PK_SIM_STEPS); correct its bounds, or set PK_SIM_STEPS higher",
        )
    return range(start, stop)
