"""Which blocks of the grid belong to which class, as C++ expressions: communicators first, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pk.codegen.plan import ClassPlan, Plan


def communicator_blocks(c: ClassPlan, plan: Plan) -> str:
    """How many blocks communicator ``c`` has: what it asks for, as long as compute keeps half of the grid."""
    classes = plan.communicators
    at = classes.index(c)
    room = "int(gridDim.x) / 2"
    for before in classes[:at]:
        room += f" - {before.prefix}blocks()"
    if len(classes) - 1 > at:
        room += f" - {plan.cluster * (len(classes) - 1 - at)}"  # one, or a pair, for each behind it
    if plan.cluster > 1:
        pairs = f"(config::{c.prefix}sms + {plan.cluster - 1}) / {plan.cluster}"
        return f"{plan.cluster} * max(1, min({pairs}, ({room}) / {plan.cluster}))"
    return f"max(1, min(config::{c.prefix}sms, {room}))"


def blocks(c: ClassPlan, plan: Plan, paired: bool = True) -> str:
    """The number of blocks of a class; of pairs, if they take tasks in pairs and ``paired``."""
    whole = f"{c.prefix}blocks()"
    if not c.prefix and plan.kernel.joins:
        whole = "gridDim.x"
    elif not c.prefix:
        whole = "gridDim.x" + "".join(f" - {other.prefix}blocks()" for other in plan.communicators)
    return _pairs(whole, c.cluster if paired else 1)


def number(c: ClassPlan, plan: Plan, paired: bool = True) -> str:
    """This block's number in its class, or that of its pair."""
    before = plan.communicators
    if c.prefix:
        before = before[: before.index(c)]
    elif plan.kernel.joins:
        before = ()
    return _pairs("blockIdx.x" + "".join(f" - {other.prefix}blocks()" for other in before), c.cluster if paired else 1)


def _pairs(text: str, cluster: int) -> str:
    if cluster == 1:
        return text
    return f"({text}) / {cluster}" if " " in text else f"{text} / {cluster}"


def least(plan: Plan) -> int:
    """The fewest blocks that a launch needs: one for each communicator, and as many that compute."""
    return plan.cluster * max(1, 2 * len(plan.communicators))
