"""The budget of a role's ``for`` loops: a bound gone wild must not look like a hang."""

from __future__ import annotations

from pk import env, errors
from pk.ir import nodes as ir
from pk.sim.machine import Role, Site

WHILE_TURNS = 100_000  # of one `while`, if PK_SIM_STEPS is not set: each has to be run to be counted


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


def while_turns() -> int:
    """The turns that one `while` may take: ``PK_SIM_STEPS``, or less than its default if it is not set."""
    return env.SIM_STEPS.get() if env.SIM_STEPS.given() else WHILE_TURNS


def endless(turns: int, span: ir.Span, where: str) -> errors.EndlessLoop:
    """The error for a `while` at ``span`` that has taken ``turns``."""
    more = 10 * turns if env.SIM_STEPS.given() else env.SIM_STEPS.default  # no less than `for` loops have now
    return errors.EndlessLoop(
        f"a `while` has not ended after {turns:,} turns; correct its condition, or set PK_SIM_STEPS higher "
        f"(such as PK_SIM_STEPS={more})",
        span,
        where,
    )
