"""One launch under one schedule, with everything that looks for mistakes listening: the unit of a check.

A :class:`Case` is all that a launch needs, in plain data: it can be sent to another process, and made smaller.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pk import errors
from pk.ir import nodes as ir
from pk.ir.types import int32
from pk.sim import compare
from pk.sim.checker import Checker
from pk.sim.findings import Finding, Place, causes
from pk.sim.image import Arguments, Image
from pk.sim.memory import SimTensor
from pk.sim.report import Report
from pk.sim.run import simulate
from pk.sim.values import POISON
from pk.sim.written import OTHER

BASELINE = 0  # the schedule whose results those of others are compared with


@dataclass(frozen=True, slots=True)
class Case:
    """A launch of ``kernel``: operands of every rank as they were, blocks of each rank.

    ``strict``: writes that a tensor's edge cuts off are mistakes.
    """

    kernel: ir.Kernel
    image: Image
    sms: int
    multicast: bool = False
    strict: bool = False

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.image.ranks)


@dataclass(frozen=True, slots=True)
class Trial:
    """What one schedule showed.  ``report`` is None if the launch did not end.

    ``broken``: why the launch cannot be checked at all, an error of pk's about the call.  ``endless``: a loop took more
    turns than it may.
    """

    seed: int
    findings: tuple[Finding, ...]
    report: Report | None = None
    broken: errors.PkError | None = None
    results: list[Arguments] | None = field(default=None, compare=False)
    endless: bool = False


def run(
    case: Case,
    seed: int,
    baseline: list[Arguments] | None = None,
    keep: bool = False,
    resident: int | None = None,
    order: Sequence[int] | None = None,
) -> Trial:
    """Simulate ``case`` under the schedule of ``seed``.

    ``baseline``: results of another schedule, from which these must not differ.  ``keep``: hand back the results.
    ``resident``: blocks of a rank that fit on its device, which start in ``order``.
    """
    args = case.image.open()
    checker = make_checker(case)
    report: Report | None = None
    found: list[Finding] = []
    endless = False
    options: dict[str, Any] = {
        "sms": case.sms, "seed": seed, "multicast": case.multicast, "resident": resident, "order": order,
    }  # fmt: skip
    try:
        report = simulate(case.kernel, args, checker=checker, **options)
    except errors.DeadlockError as error:
        if not error.causes:  # those have been reported to the checker
            found.append(_deadlock(error))
    except errors.SimulationError as error:
        failed, endless = _failed(error), isinstance(error, errors.EndlessLoop)
        if not any(f.key == failed.key for f in checker.findings):
            found.append(failed)
    except errors.PkError as error:
        return Trial(seed, (), broken=error)
    found = [*checker.findings, *found]
    if checker.written.lanes and not causes(found) and _matters(case, args, options):
        more = ", and what the launch does depends on it"
        found += [replace(f, message=f.message + more) for f in checker.written.lanes]
    # What a race or a read of nothing leads to is not a mistake of its own.
    if report is not None and baseline is not None and not causes(found):
        text = compare.differing(case.kernel, baseline, args, case.multicast)
        if text:
            found.append(different(case.kernel, text))
    stamped = tuple(replace(f, seed=seed) if f.seed is None else f for f in found)
    return Trial(seed, stamped, report, results=args if keep and report is not None else None, endless=endless)


def _matters(case: Case, results: list[Arguments], options: dict[str, Any]) -> bool:
    """Whether the launch ends otherwise if elements of int32 that nobody has written hold something else."""
    args, checker = case.image.open(), make_checker(case)
    checker.written.other = True
    try:
        simulate(case.kernel, args, checker=checker, **options)
    except errors.PkError:
        return True
    for mine, theirs in zip(results, args, strict=True):
        for name, value in mine.items():
            other = theirs[name]
            if isinstance(value, SimTensor) and isinstance(other, SimTensor) and value.dtype == int32:
                left = (value.array == POISON[int32]) & (other.array == OTHER)  # still unwritten
                other.array[left] = value.array[left]
    return bool(compare.differing(case.kernel, results, args, case.multicast))


def make_checker(case: Case) -> Checker:
    """Everything that looks for mistakes in one launch of ``case``."""
    return Checker(strict=case.strict)


def different(kernel: ir.Kernel, text: str) -> Finding:
    """The finding for results that differ between schedules."""
    return Finding(
        "wrong-result",
        f"results of kernel `{kernel.name}` differ between schedules: {text}",
        (),
        "Something depends on who comes first.  Look for a wait that is missing, or for a sum whose terms are rounded "
        "in the order in which they arrive.",
    )


def _deadlock(error: errors.DeadlockError) -> Finding:
    places = tuple(
        Place(b.rank, b.block, b.role, b.state().partition(": ")[2], b.span, b.task) for b in _one_a_line(error.blocked)
    )
    return Finding(
        "deadlock",
        f"kernel `{error.kernel}` deadlocks: {len(error.blocked)} of {error.roles} roles wait for ever",
        places,
        "Find who should signal what is waited for, and why it does not; or wait for less.",
        error.seed,
    )


def _one_a_line(blocked: tuple[errors.BlockedRole, ...]) -> list[errors.BlockedRole]:
    """The first of the roles that stand at each statement; those that wait for signals come first."""
    first: dict[tuple[bool, str, ir.Span], errors.BlockedRole] = {}
    for b in blocked:
        first.setdefault((b.op in ("fill", "drain"), b.role, b.span), b)
    return [first[key] for key in sorted(first, key=lambda key: key[0])]


_WHERE = re.compile(r"rank (\d+)(?:, block (\d+), (\w+))?(?: at task (.*))?")


def _failed(error: errors.SimulationError) -> Finding:
    rank, block, role = 0, -1, "kernel"
    task: tuple[tuple[str, int], ...] = ()
    match = _WHERE.match(error.where)
    if match:
        rank, block, role = int(match[1]), int(match[2] or -1), match[3] or "kernel"
        pairs = (pair.partition("=") for pair in (match[4] or "").split(", ") if "=" in pair)
        task = tuple((name, int(value)) for name, _, value in pairs)
    outside = "is outside" in error.what or "does not exist" in error.what
    kind = "failed" if not outside else "out-of-range" if "tensor" in error.what else "counter-range"
    advice = "Compute an index that exists, or declare more." if outside else "See the line above."
    return Finding(kind, error.what, (Place(rank, block, role, error.what, error.span, task),), advice)


def crashed(seed: int, error: BaseException) -> errors.PkError:
    """The error for a schedule that ended in a fault of pk's own."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return errors.BackendError(f"the check failed in schedule {seed}, which is a fault of pk:\n{text}")
