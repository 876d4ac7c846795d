"""What a simulation tells: how much happened, and the reports of what went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from pk import errors
from pk.sim.machine import Role


@dataclass(frozen=True, slots=True)
class Report:
    """A finished simulation.

    ``loads``, ``stores`` and ``signals`` count what took effect (a store or signal to every rank counts once a rank),
    ``messages`` those of them that crossed from one rank to another.  ``digest`` names the schedule: equal digests
    mean that everything happened in the same order.
    """

    kernel: str
    world: int
    sms: int
    seed: int
    digest: str
    steps: int
    waits: int
    loads: int
    stores: int
    signals: int
    messages: int
    max_in_flight: int

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.world} rank{'s' * (self.world > 1)} x {self.sms} SMs, seed {self.seed}, "
            f"schedule {self.digest}\n"
            f"  {self.steps} steps, {self.waits} waits that had to wait; {self.loads} loads, {self.stores} stores, "
            f"{self.signals} signals, {self.messages} of them between ranks, at most {self.max_in_flight} in flight"
        )


def deadlock(kernel: str, seed: int, steps: int, roles: list[Role]) -> errors.DeadlockError:
    """The error for a launch in which nothing can happen any more, though not all roles are done."""
    blocked = tuple(_blocked(role) for role in roles if role.blocked is not None)
    return errors.DeadlockError(kernel, seed, steps, len(roles), blocked)


def _blocked(role: Role) -> errors.BlockedRole:
    assert role.blocked is not None
    counter, needed, site = role.blocked
    names, values = role.task
    return errors.BlockedRole(
        role.rank,
        role.block,
        role.kind,
        site.op,
        counter.name,
        counter.index,
        counter.value,
        needed,
        tuple(zip(names, values, strict=True)),
        site.span,
    )
