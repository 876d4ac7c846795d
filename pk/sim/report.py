"""What a simulation tells: how much happened, and the reports of what went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from pk import errors
from pk.ir import nodes as ir
from pk.sim.diagnose import diagnose
from pk.sim.machine import Launch, Role


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


def deadlock(kernel: ir.Kernel, seed: int, steps: int, launch: Launch) -> errors.DeadlockError:
    """The error for a launch in which nothing can happen any more, though not all roles are done.

    Its causes are also reported to the checker, if there is one.  The launch cannot be used afterwards.
    """
    checker = launch.checker
    blocked = tuple(_blocked(role) for role in launch.roles if role.blocked is not None)
    causes = tuple(diagnose(launch, kernel, seed))
    if checker is not None:
        for finding in causes:
            checker.report(finding)
    return errors.DeadlockError(kernel.name, seed, steps, len(launch.roles), blocked, causes)


def _blocked(role: Role) -> errors.BlockedRole:
    assert role.blocked is not None
    counter, needed, site = role.blocked
    names, values = role.task
    return errors.BlockedRole(
        role.rank,
        role.block,
        role.title,
        site.op,
        counter.name,
        counter.index,
        counter.value,
        needed,
        tuple(zip(names, values, strict=True)),
        site.span,
    )
