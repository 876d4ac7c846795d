"""Blocks that have no room on the device yet: they start when another block of their rank ends.

pk launches as many blocks as fit, so that all of a launch run at the same time.  A check may ask what happens when
fewer fit: ``simulate(..., resident=n, order=...)``.  A kernel whose blocks wait for later ones then stops, and one
whose blocks wait for earlier ones ends only if blocks start in the order of their numbers, which no GPU promises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pk import errors
from pk.ir import nodes as ir
from pk.ir.budget import pipeline_bytes, tile_bytes
from pk.ir.layout import exchange_bytes
from pk.ir.layout import groups as warpgroups
from pk.ir.rules import BLOCK_SHARED, RESERVED_SHARED
from pk.sim.findings import Finding

if TYPE_CHECKING:
    from pk.sim.machine import Launch, Role

SMS = 132  # of an H200
SM_SHARED = BLOCK_SHARED + 1024  # bytes of shared memory of an SM: each block takes 1 KiB beside its own
SM_REGISTERS, REGISTERS = 65536, 128  # of an SM, and of a thread (kernels without a consumer have fewer)
BLOCK_SYSTEM = 1024  # bytes that the driver takes of each block's shared memory


class Room:
    """Which blocks of each rank are on the device.  ``order``: in which blocks start (default: by number)."""

    def __init__(self, launch: Launch, resident: int, order: Sequence[int] | None = None) -> None:
        self._launch = launch
        self._roles: dict[tuple[int, int], list[Role]] = {}
        for role in launch.roles:
            self._roles.setdefault((role.rank, role.block), []).append(role)
            role.started = False
        self._left = {key: len(roles) for key, roles in self._roles.items()}
        blocks = sorted({block for _, block in self._roles}) if order is None else list(order)
        self._waiting = [[b for b in reversed(blocks) if (rank, b) in self._roles] for rank in range(launch.world)]
        self.resident = resident

    def begin(self, rank: int) -> None:
        """The stream of ``rank`` has reached the launch: its first blocks start."""
        for _ in range(self.resident):
            self._start(rank)

    def ended(self, role: Role) -> None:
        """A role has ended.  With its last role a block makes room for the next."""
        key = (role.rank, role.block)
        self._left[key] -= 1
        if not self._left[key]:
            self._start(role.rank)

    def _start(self, rank: int) -> None:
        if self._waiting[rank]:
            for role in self._roles[rank, self._waiting[rank].pop()]:
                role.started = True
                self._launch.schedule.add(role)


def shared_bytes(kernel: ir.Kernel) -> int:
    """Bytes of shared memory that a block of ``kernel`` takes, of whichever class takes most."""
    most = 0
    for owner, block in kernel.classes:
        pipelines = sum(pipeline_bytes(p) for p in kernel.pipelines if p.owner == owner)
        private = sum(tile_bytes(t.type) for t in kernel.shared if t.owner == owner)
        most = max(most, pipelines + private + exchange_bytes(kernel, block))
    return most + RESERVED_SHARED


def capacity(kernel: ir.Kernel, sms: int = SMS, shared: int = SM_SHARED) -> int:
    """How many blocks of ``kernel`` can be on a device of ``sms`` SMs with ``shared`` bytes each at the same time.

    An estimate from shared memory and registers of what the launcher asks the driver; at least ``sms``, since a kernel
    of which no block fits does not compile.
    """
    threads = 128 * (warpgroups(kernel) + 1)
    fit = min(shared // (shared_bytes(kernel) + BLOCK_SYSTEM), SM_REGISTERS // (REGISTERS * threads))
    return sms * max(fit, 1)


Run = Callable[[int, Sequence[int]], list[Finding]]
"""``run(resident, order)``: simulates the launch on fresh copies of its operands and returns what was found."""


def probe(run: Run, sms: int, resident: int) -> list[Finding]:
    """What goes wrong when only ``resident`` of the ``sms`` blocks of a rank fit at once.

    Blocks start in the order of their numbers, then the other way round, then the odd ones first.  A launch that ends
    in some orders and not in others is ``order-dependent``; one that never ends is ``not-resident`` or ``deadlock``.
    ``run`` must turn a :class:`pk.errors.DeadlockError` into its causes (``error.causes``).
    """
    if resident >= sms:
        return []
    forward = list(range(sms))
    orders = {
        "in the order of their numbers": forward,
        "in the opposite order": forward[::-1],
        "odd ones first": forward[1::2] + forward[::2],
    }
    outcome = {name: run(resident, order) for name, order in orders.items()}
    bad = [(name, found) for name, found in outcome.items() if _stopped(found)]
    good = [name for name, found in outcome.items() if not _stopped(found)]
    if not bad or not good:
        return [f for _, found in bad[:1] for f in found]
    name, found = bad[0]
    first = next(f for f in found if f.kind in _STOPS)
    message = (
        f"the launch ends if blocks start {good[0]} and stops if they start {name} ({resident} of {sms} blocks fit at "
        f"once): {first.message}"
    )
    advice = f"Launch at most {resident} blocks a rank, or let work that waits be claimed (dynamic=True), not numbered."
    return [Finding("order-dependent", message, first.places, advice, first.seed)]


def with_more(found: list[Finding], run: Callable[[int], list[Finding]], sms: int) -> list[Finding]:
    """``found``, in which a deadlock that more blocks prevent says so, and is ``not-resident``.

    ``run(sms)`` simulates the launch with so many blocks a rank and returns what was found.  A block runs its tasks
    one after the other, so one whose task waits for a later task of its own is as stuck as one that waits for a block
    without room.
    """
    if not any(f.kind == "deadlock" for f in found):
        return found
    enough = next((n for n in (2 * sms, 4 * sms, 8 * sms) if n <= SMS and not _stopped(run(n))), None)
    if enough is None:
        return found
    advice = (
        "A task may wait only for tasks that are dealt before it: a block runs its tasks one after the other, and how "
        "many blocks there are depends on the device.  Put those who wait into a task loop behind those who signal."
    )
    text = f"the launch ends with {enough} blocks a rank, and not with {sms}: "
    return [
        replace(f, kind="not-resident", message=text + f.message, advice=advice) if f.kind == "deadlock" else f
        for f in found
    ]


_STOPS = frozenset({"deadlock", "bad-count", "not-resident"})


def _stopped(found: list[Finding]) -> bool:
    return any(f.kind in _STOPS for f in found)


def make_room(launch: Launch, resident: int | None, order: Sequence[int] | None, sms: int) -> Room | None:
    """The room of a launch of ``sms`` blocks a rank; None if all of them fit.

    Raises :class:`pk.errors.ArgumentError` if ``order`` does not name each block once, or ``resident`` is not positive.
    """
    if order is not None and sorted(order) != list(range(sms)):
        raise errors.ArgumentError(f"order={list(order)} does not name each of the blocks 0 to {sms - 1} once.")
    if resident is not None and resident < 1:
        raise errors.ArgumentError(f"resident={resident}: at least one block must fit.")
    if resident is None or resident >= sms:
        return None
    return Room(launch, resident, order)
